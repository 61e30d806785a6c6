"""onnxruntime on the CPU, with the kernels of this package where they are compiled."""
