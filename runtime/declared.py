"""Whether a graph takes and returns what the manifest says: a bundle's files may each be whole and not fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specexport.contract import tensors
from specexport.contract.errors import BundleError
from specexport.contract.model import LoweredAs, Model
from specexport.contract.signature import caches, returned
from specexport.runtime.graph import Array, Buffers

_TYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(bool)": "bool"}
_SAID_BY = {
    tensors.LOGITS: "vocab_size",
    tensors.DRAFT_IDS: "candidates",
    tensors.DRAFT_PROBS: "candidates",
    tensors.CANDIDATES: "heads and candidates",
    tensors.HIDDEN: "hidden",
    tensors.LAYER_STATES: "hidden",
    tensors.HIDDEN_STATE: "hidden",
    tensors.INPUTS_EMBEDS: "embedding_size",
    tensors.EMBEDS_MASK: "embedding_size",
}
"""The manifest's field that a tensor's sizes come from; those of caches come from ``cache``."""
_Shapes = Mapping[str, tuple[str, tuple[int | str | None, ...]]]


def require_declared(path: Path, session: Any, model: Model, lowering: LoweredAs, buffers: Buffers) -> None:
    """Compares what an ``onnxruntime.InferenceSession`` declares with the buffers and caches that it will be given.

    Args:
        path: the graph, to be named.
        session: opened over it.
        model: its entry in the manifest.
        lowering: of its operators.
        buffers: makes the arrays of a shape point.

    Raises:
        BundleError: a tensor is missing, not expected, or of another type or size; names it and the manifest's field.
    """
    points = model.graph.points
    # Of all stages, and the smallest of those.
    point = min(points, key=lambda point: (-point.drafts, point.sizes["B"], point.tokens, point.cache))
    inputs, outputs = buffers(point)
    _compare(path, "input", session.get_inputs(), _of(inputs) | _fixed(caches(model)))
    _compare(path, "output", session.get_outputs(), _of(outputs) | _fixed(returned(model, lowering, "F")))


def _of(arrays: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int | str | None, ...]]]:
    return {name: (array.dtype.name, array.shape) for name, array in arrays.items()}


def _fixed(signature: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int | str | None, ...]]]:
    return {name: (spec.dtype, spec.dims) for name, spec in signature.items()}


def _compare(path: Path, kind: str, declared: Sequence[Any], expected: _Shapes) -> None:
    found: _Shapes = {one.name: (_TYPES.get(one.type, one.type), tuple(one.shape)) for one in declared}
    for name in (*expected, *found):
        if name in expected and name in found and _alike(found[name], expected[name]):
            continue
        stem, _, index = name.partition(".")
        said = f"cache[{index}]" if f"{stem}." in tensors.CACHES else _SAID_BY.get(stem, "methods")
        if f"{stem}." in tensors.STATES:
            said = f"states[{index}]"
        raise BundleError(
            f"{path}: {kind} {name!r} is {_words(found.get(name))}, but {_words(expected.get(name))} by {said} of the "
            "manifest; build the bundle again"
        )


def _alike(one: tuple[str, tuple[int | str | None, ...]], other: tuple[str, tuple[int | str | None, ...]]) -> bool:
    """Whether types and all sizes that are numbers on both sides are the same."""
    sizes = zip(one[1], other[1], strict=False)
    numbers = all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))
    return one[0] == other[0] and len(one[1]) == len(other[1]) and numbers


def _words(shape: tuple[str, tuple[int | str | None, ...]] | None) -> str:
    return "absent" if shape is None else f"{shape[0]}[{', '.join(map(str, shape[1]))}]"
