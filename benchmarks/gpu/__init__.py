"""What ``scripts/gpu_acceptance.py`` checks and measures on a machine with a GPU."""
