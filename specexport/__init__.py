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
    from specexport.llm import LLM
    from specexport.runtime import EmbedsPrompt, SamplingParams

__version__ = "0.1.0"

_MODULES = {
    "LLM": "specexport.llm",
    "AsyncEngine": "specexport.async_engine",
    "EmbedsPrompt": "specexport.runtime",
    "SamplingParams": "specexport.runtime",
}

__all__ = ["LLM", "AsyncEngine", "EmbedsPrompt", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports names when they are used, as every part of the package imports this module."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
