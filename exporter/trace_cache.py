"""A cache of exported graphs, for builds of the same model with another draft, tree or precision.

A file holds a graph without its large weights: it refers to them by name, and they are taken from the traced module. It
would serve any checkpoint of an architecture with equal small weights (norms, biases), in practice the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import torch

from specexport.contract.folders import locked, write_file
from specexport.exporter.checkpoints.stored import form_of, read_parameter, stored_tensor
from specexport.exporter.passes import simplify
from specexport.exporter.passes.linear import FORM
from specexport.exporter.records import fingerprint
from specexport.runtime.machine import cache_folder

MOST = 64
"""Maximum number of files in the cache; the oldest are deleted first."""
_HASH = 32


def cached_trace(module: torch.nn.Module, about: Iterable[object], make: Callable[[], ir.Model]) -> ir.Model:
    """The graph of a module, from the cache or by tracing. Its large weights are read when they are used.

    Args:
        about: everything else that the graph depends on, compared by ``repr``.
        make: traces the module; initializers that are its weights share their memory.
    """
    large = {name: weight for name, weight in module.named_parameters() if _large(weight) or stored_tensor(weight)}
    root = cache_folder()
    path = None if root is None else root / "traces" / f"{_key(module, about)}.onnx"
    with contextlib.ExitStack() as turn:
        if path is not None:
            with contextlib.suppress(OSError):  # without a writable folder, nothing is cached
                path.parent.mkdir(parents=True, exist_ok=True)
                turn.enter_context(locked(path.with_suffix(".turn")))
        graph = None if path is None else _read(path, large.keys())
        if graph is None:
            graph = make()
            _name_weights(graph.graph, large)
            if path is not None:
                _write(path, graph)
    for value in graph.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            parameter = large[str(value.const_value.location)]
            value.const_value = _lazy(parameter, str(value.name))
            value.meta[FORM] = form_of(parameter)
    return graph


def _name_weights(graph: ir.Graph, weights: Mapping[str, torch.Tensor]) -> None:
    """Replaces large weights by references to their names."""
    names = {weight.data_ptr(): name for name, weight in weights.items()}
    for value in graph.initializers.values():
        tensor: Any = getattr(value.const_value, "raw", None)
        name = names.get(tensor.data_ptr()) if isinstance(tensor, torch.Tensor) else None
        if name is not None and tensor.shape == weights[name].shape:
            shape, length = ir.Shape(tensor.shape), 4 * tensor.numel()
            value.const_value = ir.ExternalTensor(name, 0, length, ir.DataType.FLOAT, shape=shape, name=str(value.name))


def _lazy(parameter: torch.Tensor, name: str) -> ir.LazyTensor:
    def read() -> ir.TensorProtocol:
        return ir.Tensor(read_parameter(parameter).float().numpy(), name=name)

    return ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape(parameter.shape), name=name)


def _read(path: Path, weights: Container[str]) -> ir.Model | None:
    """A cached graph; None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[_HASH:]).digest() != content[:_HASH]:
            return None
        graph = ir.from_proto(onnx.ModelProto.FromString(content[_HASH:]))
        os.utime(path)
    except OSError:
        return None
    outside = (value.const_value for value in graph.graph.initializers.values())
    complete = all(str(tensor.location) in weights for tensor in outside if isinstance(tensor, ir.ExternalTensor))
    return graph if complete else None


def _write(path: Path, graph: ir.Model) -> None:
    """Writes a graph, if the folder can be written."""
    content = ir.to_proto(graph).SerializeToString()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, hashlib.sha256(content).digest() + content)
        for old in sorted(path.parent.glob("*.onnx"), key=os.path.getmtime)[:-MOST]:
            old.unlink(missing_ok=True)
    except OSError:
        return


def _key(module: torch.nn.Module, about: Iterable[object]) -> str:
    """A hash of everything that determines a trace: the module's settings and small weights, ``about``, our code."""
    parts = hashlib.sha256(fingerprint().encode())
    tensors: dict[str, torch.Tensor] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        settings = {key: value for key, value in vars(submodule).items() if _plain(value) and key != "name_or_path"}
        parts.update(repr((name, type(submodule), submodule.extra_repr(), sorted(settings.items()))).encode())
        config = vars(submodule).get("config")
        parts.update(config.to_json_string().encode() if hasattr(config, "to_json_string") else b"")
        namespaces = (vars(submodule), submodule._parameters, submodule._buffers)
        tensors |= {f"{name}.{key}": value for of in namespaces for key, value in of.items() if torch.is_tensor(value)}
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        # Tied weights become one initializer, equal weights do not.
        parts.update(repr((first.setdefault(id(tensor), name), name, tensor.shape, tensor.dtype)).encode())
        if not _large(tensor) or not isinstance(tensor, torch.nn.Parameter):
            numbers = read_parameter(tensor).contiguous()
            parts.update(numbers.flatten().view(torch.uint8).numpy().tobytes())
    parts.update(repr(list(about)).encode())
    return parts.hexdigest()


def _large(weight: torch.Tensor) -> bool:
    """Whether a weight is too large for a trace to depend on its numbers."""
    return weight.numel() > simplify.LARGEST_FOLDED


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    if isinstance(value, Mapping):
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        return True
    return value is None or isinstance(value, bool | int | float | str | np.integer)
