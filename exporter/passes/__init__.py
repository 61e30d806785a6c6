"""Small rewrites of a traced graph, one a file; each takes an ``onnx_ir`` model and changes it in place."""
