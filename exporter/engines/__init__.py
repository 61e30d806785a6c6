"""Compiles a bundle's ONNX graphs to engines of TensorRT and TensorRT-RTX. Needs the ``[compile]`` extra; no torch."""
