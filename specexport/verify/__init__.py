"""Whether a bundle is whole and computes what the models it was built from compute."""
