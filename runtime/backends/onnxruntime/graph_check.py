"""Checks a graph's inputs and outputs against the manifest: a bundle's files may be intact and still not match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specexport.contract.errors import BundleError
from specexport.contract.model import LoweredAs, Model
from specexport.contract.signature import cache_inputs, cache_outputs
from specexport.contract.tensors import DECLARED, Tensor
from specexport.runtime.backend import Array, Buffers

_TYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(bool)": "bool"}
_Shapes = Mapping[str, tuple[str, tuple[int | str | None, ...]]]


def require_declared(path: Path, session: Any, model: Model, lowering: LoweredAs, buffers: Buffers) -> None:
    """Compares what an ``onnxruntime.InferenceSession`` declares with the buffers and caches that it will get.

    Args:
        path: the graph, for errors.
        session: its session.
        model: its entry in the manifest.
        lowering: its operators.
        buffers: creates the arrays of a shape point.

    Raises:
        BundleError: a tensor is missing, unexpected, or of another type or size; names it and the manifest's field.
    """
    points = model.graph.points
    # The smallest of the points with all stages.
    point = min(points, key=lambda point: (-point.drafts, point.sizes["B"], point.tokens, point.cache))
    inputs, outputs = buffers(point)
    _compare(path, "input", session.get_inputs(), _of(inputs) | _declared(cache_inputs(model)))
    returned = cache_outputs(model.cache, model.states, lowering, "F")
    _compare(path, "output", session.get_outputs(), _of(outputs) | _declared(returned))


def _of(arrays: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int | str | None, ...]]]:
    return {name: (array.dtype.name, array.shape) for name, array in arrays.items()}


def _declared(signature: Iterable[Tensor]) -> dict[str, tuple[str, tuple[int | str | None, ...]]]:
    return {str(tensor): (tensor.dtype, tensor.dims) for tensor in signature}


def _compare(path: Path, kind: str, declared: Sequence[Any], expected: _Shapes) -> None:
    actual: _Shapes = {value.name: (_TYPES.get(value.type, value.type), tuple(value.shape)) for value in declared}
    for name in (*expected, *actual):
        if name in expected and name in actual and _matches(actual[name], expected[name]):
            continue
        stem, _, index = name.partition(".")
        field = DECLARED[stem].field if stem in DECLARED else "methods"
        if field in ("cache", "states"):
            field = f"{field}[{index}]"
        raise BundleError(
            f"{path}: {kind} {name!r} is {_words(actual.get(name))}, but {_words(expected.get(name))} by {field} of "
            "the manifest; build the bundle again"
        )


def _matches(a: tuple[str, tuple[int | str | None, ...]], b: tuple[str, tuple[int | str | None, ...]]) -> bool:
    """Whether two types are equal, and all sizes that are numbers on both sides."""
    sizes = zip(a[1], b[1], strict=False)
    numbers = all(m == n for m, n in sizes if isinstance(m, int) and isinstance(n, int))
    return a[0] == b[0] and len(a[1]) == len(b[1]) and numbers


def _words(shape: tuple[str, tuple[int | str | None, ...]] | None) -> str:
    return "absent" if shape is None else f"{shape[0]}[{', '.join(map(str, shape[1]))}]"
