"""Running on an NVIDIA GPU: memory planned up front, pinned staging, one stream, captured graphs.

Nothing here imports ``cuda.bindings``, onnxruntime or TensorRT before a bundle is opened on a GPU.
"""
