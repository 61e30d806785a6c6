"""The lean runtime: runs a bundle. Imports neither torch, transformers nor onnx.

>>> from specexport.runtime import Engine, SamplingParams
>>> engine = Engine.load("bundle/")  # doctest: +SKIP
>>> for chunk in engine.stream("def fibonacci(n):", SamplingParams(max_tokens=64)):  # doctest: +SKIP
...     print(chunk.text, end="")
"""

from specexport.contract.errors import BackendError, BundleError, RequestError, SpecExportError
from specexport.runtime.engine import Engine
from specexport.runtime.logits import TokenLogprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.prompt import EmbedsPrompt
from specexport.runtime.request import Chunk, Completion, Stats, Stream

__all__ = [
    "BackendError",
    "BundleError",
    "Chunk",
    "Completion",
    "EmbedsPrompt",
    "Engine",
    "RequestError",
    "SamplingParams",
    "SpecExportError",
    "Stats",
    "Stream",
    "TokenLogprobs",
]
