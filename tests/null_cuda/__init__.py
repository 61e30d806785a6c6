"""CUDA libraries without a device, and the real onnxruntime-gpu over them; see ``install`` and ``dry_run``."""
