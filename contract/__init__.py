"""The contract of exporter and runtime: errors, tensors, shape points, trees and the bundle manifest.

Nothing here imports torch, transformers, onnx or an inference backend.
"""
