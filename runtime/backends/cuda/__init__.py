"""Runs bundles on an NVIDIA GPU: memory planned up front, pinned staging buffers, one stream, captured graphs.

``cuda.bindings``, onnxruntime and TensorRT are not imported before a bundle is opened on a GPU.
"""
