"""Benchmarks of speculative decoding, here and in other engines, on the same models and prompts."""
