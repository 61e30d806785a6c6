"""specexport: speculative decoding, compiled ahead of time.

>>> from specexport import LLM, SamplingParams
>>> llm = LLM(model="Qwen/Qwen3-4B", speculative_config={"method": "ngram"})  # doctest: +SKIP
>>> llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64))[0].outputs[0].text  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specexport.async_engine import AsyncEngine
    from specexport.contract.errors import (
        BackendError,
        BuildError,
        BundleError,
        ClosedError,
        ContextLengthError,
        DeadlineError,
        QueueFullError,
        RequestError,
        SpecExportError,
        TrainError,
    )
    from specexport.llm import LLM, CompletionOutput, RequestOutput
    from specexport.runtime import EmbedsPrompt, SamplingParams
    from specexport.runtime.speculative import PLAIN, Speculative

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "PLAIN",
    "AsyncEngine",
    "BackendError",
    "BuildError",
    "BundleError",
    "ClosedError",
    "CompletionOutput",
    "ContextLengthError",
    "DeadlineError",
    "EmbedsPrompt",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpecExportError",
    "Speculative",
    "TrainError",
    "__version__",
]
_MODULES = {
    "LLM": "specexport.llm",
    "CompletionOutput": "specexport.llm",
    "RequestOutput": "specexport.llm",
    "AsyncEngine": "specexport.async_engine",
    "EmbedsPrompt": "specexport.runtime",
    "SamplingParams": "specexport.runtime",
    "PLAIN": "specexport.runtime.speculative",
    "Speculative": "specexport.runtime.speculative",
} | {name: "specexport.contract.errors" for name in __all__ if name.endswith("Error")}


def __getattr__(name: str) -> Any:
    """Imports a name when it is used, as every part of the package imports this module."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that are not imported yet too, for completion."""
    return sorted({*globals(), *__all__})
