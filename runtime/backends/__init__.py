"""Backends, which run a bundle's graphs: a folder each, which neither other backends nor the runtime import."""
