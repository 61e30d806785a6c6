"""Checks that a bundle is intact and computes what its original models compute."""
