"""Replaces attention in two parts with Attention over the cache in graphs without a loop.

The parts are the cache and the rows that are not in it yet (``TwoPartLowering`` in ``graphs/attention.py``). A graph
that drafts one token writes its rows to the cache anyway; attention over the cache takes a third of the operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
import onnx.reference
import onnx_ir as ir

from specexport.contract import tensors
from specexport.exporter.passes.editing import Nodes, ancestors, constant, insert_behind, op, producer, replace_value

Array = npt.NDArray[Any]
_TRANSPOSE_KEYS = [0, 1, 3, 2]
_HIDDEN = np.finfo(np.float32).min / 2
"""The bias of the score of a hidden row."""
_TOKENS = (1, 2, 5)
"""Numbers of new tokens for which masks and positions are computed."""


@dataclass(frozen=True)
class Causal:
    """Values for which causal attention is known.

    Attributes:
        masks: masks that show each token all rows up to its own, bool ``[B,1,G*T,S]``.
        positions: values that hold the row of each token in the cache, which is its position, ``[B,T]``.
    """

    masks: Collection[ir.Value]
    positions: Collection[ir.Value]


@dataclass(frozen=True)
class _Parts:
    """Attention of queries ``[B,Hkv,G*T,D]`` in two parts.

    Attributes:
        keys: the TensorScatter that writes the keys of new rows to the cache.
        bias: the bias of the scores, ``[B,1,G*T,S+T]``: 0 where a token sees a row.
        total: the sum of both parts, ``[B,Hkv,G*T,D]``.
    """

    query: ir.Value
    keys: ir.Node
    values: ir.Node
    bias: ir.Value
    scale: float
    total: ir.Value


def join_parts(model: ir.Model) -> Causal:
    """Replaces attention in two parts with Attention over the cache, in layers with causal or sliding-window masks.

    The rows that tokens see are computed from the bias of the scores, for several numbers of rows in the cache. Layers
    with other masks stay unchanged, and so do layers that do not write all rows to the cache.
    """
    graph = model.graph
    attentions = [parts for node in graph if node.op_type == "Softmax" and (parts := _match(node)) is not None]
    if not attentions:
        return Causal((), ())
    group_and_window = {bias: _group_and_window(model, bias) for bias in {parts.bias for parts in attentions}}
    masks: dict[tuple[int, int], ir.Value] = {}
    for parts in attentions:
        visible = group_and_window[parts.bias]
        if visible is None:
            continue
        if visible not in masks:
            masks[visible] = _mask(graph, _rows(parts.keys.inputs[0]), *visible)
        written = [node.outputs[0] for node in (parts.keys, parts.values)]
        attention = op(
            "Attention", [parts.query, *written, masks[visible]], f"{parts.total.name}.joined", scale=parts.scale
        )
        replace_value(parts.total, insert_behind(graph, parts.total, attention))
    full = [mask for (_, window), mask in masks.items() if not window]
    return Causal(full, _positions(model))


def _match(softmax: ir.Node) -> _Parts | None:
    added = producer(softmax.inputs[0], "Add")
    if added is None:
        return None
    scores, bias = added.inputs
    joined = producer(_uncast(scores), "Concat")
    if joined is None or bias is None or len(joined.inputs) != 2:
        return None
    of_cache, of_new = [_scaled_product(part) for part in joined.inputs]
    split = _only_reader(softmax.outputs[0], "Split")
    if of_cache is None or of_new is None or split is None or len(split.outputs) != 2:
        return None
    (query, cached_keys, scale), (same_query, keys, same_scale) = of_cache, of_new
    cache_part, new_part = (_only_reader(_cast(part), "MatMul") for part in split.outputs)
    if cache_part is None or new_part is None or (query, scale) != (same_query, same_scale):
        return None
    total = _only_reader(cache_part.outputs[0], "Add")
    if total is None or total is not _only_reader(new_part.outputs[0], "Add"):
        return None
    cached_values, values = cache_part.inputs[1], new_part.inputs[1]
    writing = _writing(cached_keys, keys), _writing(cached_values, values)
    if writing[0] is None or writing[1] is None or cached_values is None or cached_keys.shape != cached_values.shape:
        return None
    return _Parts(query, writing[0], writing[1], bias, scale, total.outputs[0])


def _scaled_product(scores: ir.Value | None) -> tuple[ir.Value, ir.Value, float] | None:
    """The query, keys and factor of ``query @ keys.T * factor``; None for other values."""
    scale, scaled = 1.0, producer(scores, "Mul")
    if scaled is not None:
        scores, factor = scaled.inputs
        tensor = ir.convenience.get_const_tensor(factor) if factor is not None else None
        if tensor is None or tensor.size != 1:
            return None
        scale = float(tensor.numpy().item())
    product = producer(scores, "MatMul")
    turned = producer(product.inputs[1], "Transpose") if product is not None else None
    if product is None or turned is None or list(turned.attributes.get_ints("perm", [])) != _TRANSPOSE_KEYS:
        return None
    query, keys = product.inputs[0], turned.inputs[0]
    return None if query is None or keys is None else (query, keys, scale)


def _writing(cache: ir.Value | None, rows: ir.Value | None) -> ir.Node | None:
    """The node that writes ``rows`` behind the valid rows of a cache of known size; None without."""
    if cache is None or rows is None or not cache.is_graph_input() or not _rows(cache):
        return None
    for node in rows.consumers():
        if node.op_type == "TensorScatter" and node.inputs[0] is cache and node.inputs[1] is rows:
            length = node.inputs[2]
            return node if length is not None and length.name == tensors.PAST_LENGTH else None
    return None


def _rows(cache: ir.Value | None) -> int:
    """S of a cache ``[B,Hkv,S,D]``, or 0 if S is symbolic."""
    rows = cache.shape[2] if cache is not None and cache.shape is not None else None
    return rows if isinstance(rows, int) else 0


def _uncast(value: ir.Value | None) -> ir.Value | None:
    cast = producer(value, "Cast")
    return value if cast is None else cast.inputs[0]


def _cast(value: ir.Value) -> ir.Value:
    cast = _only_reader(value, "Cast")
    return value if cast is None else cast.outputs[0]


def _only_reader(value: ir.Value, kind: str) -> ir.Node | None:
    readers = value.consumers()
    return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None


# --- masks and positions ----------------------------------------------------------------------------------------------


def _mask(graph: ir.Graph, rows: int, group: int, window: int) -> ir.Value:
    """The mask of the last ``window`` rows up to a token's own, or of all if it is 0, bool ``[B,1,G*T,S]``."""
    inputs, nodes = {value.name: value for value in graph.inputs}, Nodes(f"causal.{window}.{group}")
    zero, one, size = (constant(graph, f"causal.{n}", np.array(n)) for n in (0, 1, rows))
    after, around = (constant(graph, f"causal.axes.{len(axes)}", np.array(axes)) for axes in ([1], [1, 3]))
    tokens = nodes.op("Shape", [inputs[tensors.INPUT_IDS]], "shape", start=1, end=2)
    new = nodes.op("Range", [zero, nodes.op("Squeeze", [tokens], "count"), one], "new")
    past = nodes.op("Unsqueeze", [inputs[tensors.PAST_LENGTH], after], "past")
    own = nodes.op("Unsqueeze", [nodes.op("Add", [past, new], "ends"), around], "own")
    every = nodes.op("Range", [zero, size, one], "rows")
    seen = nodes.op("LessOrEqual", [every, own], "seen")
    if window:
        first = nodes.op("Sub", [own, constant(graph, f"causal.window.{window}", np.array(window))], "before")
        seen = nodes.op("And", [seen, nodes.op("Greater", [every, first], "near")], "both")
    if group > 1:
        seen = nodes.op("Concat", [seen] * group, "tiled", axis=2)
    graph.insert_before(graph[0], nodes.list)
    return seen


def _group_and_window(model: ir.Model, bias: ir.Value) -> tuple[int, int] | None:
    """G, and the number of rows up to its own that each token sees, 0 for all; None for other masks.

    Padding follows the last row that is read; the rows that it sees do not matter.
    """
    group, window = 0, None
    for (past, tokens, last), (values,) in _computed(model, [bias]):
        hidden, rows = values < 0, values.shape[-1] - tokens
        group = group or values.shape[2] // tokens
        shape = (1, 1, group, tokens, rows + tokens)
        if values.size != np.prod(shape) or not np.isin(values, (0.0, np.float32(_HIDDEN))).all():
            return None
        if window is None:  # the first text almost fills the cache
            seen = int((~hidden[0, 0, 0]).sum())
            window = seen if seen <= past else 0
        new_rows = past + np.arange(tokens)
        at = np.concatenate([np.arange(rows), new_rows])
        away = new_rows[:, None] - at
        expected = (away < 0) | ((away >= window) & (window > 0))
        expected[:, past:rows] = True
        if (hidden.reshape(shape) != expected)[..., : last + 1, :].any():
            return None
    return None if window is None else (group, window)


def _positions(model: ir.Model) -> list[ir.Value]:
    """The values ``[B,T]`` that rotary angles depend on and that hold the row of each token but padding."""
    angles = [value for node in model.graph if node.op_type == "RotaryEmbedding" for value in node.inputs[1:]]
    candidates = [
        value
        for value in ancestors(angles)
        if value.dtype == ir.DataType.INT64 and value.producer() is not None and value.name
    ]
    wrong: set[ir.Value] = set()
    for (past, tokens, last), arrays in _computed(model, candidates):
        expected = past + np.arange(tokens)[None, : last + 1]
        for value, array in zip(candidates, arrays, strict=True):
            if array.shape != (1, tokens) or (array[:, : last + 1] != expected).any():
                wrong.add(value)
    return [value for value in candidates if value not in wrong]


def _computed(model: ir.Model, values: list[ir.Value]) -> Iterator[tuple[tuple[int, int, int], list[Array]]]:
    """Computes values that depend only on sizes, ``past_length`` and ``last_row``, for several of these.

    Yields:
        The number of valid rows, the number of new tokens and the last token that is no padding; and the values.
    """
    needed = ancestors(values)
    graph = model.graph
    inputs = [value for value in graph.inputs if value in needed]
    cache = next(value for value in graph.inputs if str(value.name).startswith(tensors.CACHES))
    constants = [
        (value, value.const_value.numpy())
        for value in graph.initializers.values()
        if value in needed and value.const_value is not None
    ]
    computed = onnx.helper.make_graph(
        [ir.to_proto(node) for node in graph if not needed.isdisjoint(node.outputs)],
        "computed",
        [onnx.ValueInfoProto(name=str(value.name)) for value in inputs],
        [onnx.ValueInfoProto(name=str(value.name)) for value in values],
        [onnx.numpy_helper.from_array(array, value.name) for value, array in constants],
    )
    opsets = [onnx.helper.make_opsetid("", model.opset_imports[""])]
    evaluator = onnx.reference.ReferenceEvaluator(onnx.helper.make_model(computed, opset_imports=opsets))
    rows = _rows(cache)
    for tokens, past in itertools.product(_TOKENS, (rows - max(_TOKENS), rows // 2, 1, 0)):
        for last in {0, tokens - 1}:
            given: dict[str, int] = {tensors.PAST_LENGTH: past, tensors.LAST_ROW: last}
            feeds: dict[str, Any] = {}
            for value in inputs:
                assert value.shape is not None and value.dtype is not None
                sizes = [dim if isinstance(dim, int) else tokens if dim.value == "T" else 1 for dim in value.shape]
                feeds[str(value.name)] = np.full(sizes, given.get(str(value.name), 0), value.dtype.numpy())
            arrays: Any = evaluator.run(None, feeds)
            yield (past, tokens, last), arrays
