"""What the exporter and the runtime agree on: errors, tensor names, shape points, trees and the bundle manifest.

Nothing here imports torch, transformers, onnx or an inference backend.
"""
