"""Traces of small models, made once a session: half of the tests' time would go into tracing the same ones again."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from filelock import FileLock

SMALL = 4_000_000
"""Parameters; larger models are traced each time, as tests of memory and speed would have it."""

Trace = Callable[..., ir.Model]


def once(trace: Trace, folder: Path, largest: int = SMALL) -> Trace:
    """``specexport.exporter.trace._trace`` with a memory in a folder, which processes may share.

    What a trace depends on is its key: every setting and weight of the module, the shapes of the inputs, all other
    arguments, and the functions that tracing calls, of which a test may have replaced some. Modules of more parameters
    than ``largest`` are traced each time.
    """
    calls = trace.__globals__

    def remembered(model: torch.nn.Module, module: torch.nn.Module, inputs: Any, *arguments: Any) -> ir.Model:
        if sum(parameter.numel() for parameter in module.parameters()) > largest:
            return trace(model, module, inputs, *arguments)
        path = folder / f"{_key(model, module, inputs, (*arguments, _functions(calls)))}.onnx"
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                beside = path.with_suffix(".part")
                onnx.save(ir.to_proto(trace(model, module, inputs, *arguments)), beside)
                beside.rename(path)
        return ir.from_proto(onnx.load(path))

    return remembered


def _key(model: torch.nn.Module, module: torch.nn.Module, inputs: Any, arguments: tuple[Any, ...]) -> str:
    parts = hashlib.sha256()
    tensors = {}
    for name, inner in module.named_modules(remove_duplicate=False):
        settings = {key: value for key, value in vars(inner).items() if _plain(value) and key != "name_or_path"}
        parts.update(repr((name, type(inner), inner.extra_repr(), sorted(settings.items()))).encode())
        held = (vars(inner), inner._parameters, inner._buffers)
        tensors |= {f"{name}.{key}": value for of in held for key, value in of.items() if torch.is_tensor(value)}
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        # Tied weights are stored once, equal ones are not.
        parts.update(repr((first.setdefault(id(tensor), name), name, tensor.shape, tensor.dtype)).encode())
        parts.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    for name, (example, dims) in inputs.items():
        leaves = [(leaf.shape, leaf.dtype) for leaf in torch.utils._pytree.tree_leaves(example)]
        parts.update(repr((name, leaves, dims)).encode())
    config = getattr(model, "config", None)
    parts.update(repr((config.to_json_string() if config is not None else None, arguments)).encode())
    return parts.hexdigest()


def _functions(names: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(name, one.__module__, one.__qualname__) for name, one in names.items() if inspect.isfunction(one)]


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_plain(inner) for inner in value)
    return value is None or isinstance(value, bool | int | float | str | np.integer)
