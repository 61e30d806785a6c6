"""What ``python -m benchmarks.gpu`` checks and measures on a machine with a GPU."""
