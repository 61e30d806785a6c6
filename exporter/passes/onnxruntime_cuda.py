"""Fuses operators into ONNX Runtime's own, which take fewer kernel launches.

A launch takes a GPU about 2.5 us, whatever it computes: more than reading the weights, in small models.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.contract import tensors
from specexport.exporter.passes.editing import Nodes, constant, insert_behind, op, producer, replace_value, supersede
from specexport.exporter.passes.rotary_tables import Tables, look_angles_up
from specexport.exporter.passes.two_part import Causal, join_parts

_DOMAIN = "com.microsoft"
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The types of ONNX Runtime's attention kernels on GPUs."""
_SWAP_HEADS = [0, 2, 1, 3]
_WIDTH_UNIT, _ROTATED_UNIT = 8, 16
"""GroupQueryAttention takes heads whose width is a multiple of the first, and rotates multiples of the second."""


def use_fused_operators(model: ir.Model) -> None:
    """Fuses residual additions with norms, ``x * sigmoid(x)``, and attention with writing its caches."""
    graph = model.graph
    causal = join_parts(model)
    attention = _AttentionFusion(graph, causal)
    for node in list(graph):
        if node.op_type == "RMSNormalization":
            _fuse_residual(graph, node)
        elif node.op_type == "Mul":
            _fuse_silu(graph, node)
        elif node.op_type == "Attention":
            attention.fuse(node)
    look_angles_up(graph)
    model.opset_imports[_DOMAIN] = 1
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)


def _fuse_residual(graph: ir.Graph, norm: ir.Node) -> None:
    """Fuses ``RMSNormalization(x + y, weight)``; the sum may have other readers."""
    total, weight = norm.inputs[0], norm.inputs[1]
    add = producer(total, "Add")
    if add is None or total is None or total.is_graph_output() or weight is None:
        return
    x, y = add.inputs
    if any(value is None or value.const_value is not None or _rank(value) != 3 for value in add.inputs):
        return  # a bias, or a norm of heads
    assert x is not None and y is not None and x.shape is not None and y.shape is not None
    if x.shape[-1] != y.shape[-1]:
        return
    normed, _, _, added = outputs = [ir.val(name) for name in (f"{norm.outputs[0].name}.fused", "", "", "")]
    added.name = f"{total.name}.fused"
    epsilon = ir.AttrFloat32("epsilon", norm.attributes.get_float("epsilon", 1e-5))
    fused = ir.Node(_DOMAIN, "SkipSimplifiedLayerNormalization", [x, y, weight], [epsilon], outputs=outputs)
    graph.insert_after(add, fused)
    replace_value(norm.outputs[0], normed)
    replace_value(total, added)


def _fuse_silu(graph: ir.Graph, product: ir.Node) -> None:
    silu = product.outputs[0]
    for x, gate in (product.inputs, reversed(product.inputs)):
        sigmoid = producer(gate, "Sigmoid")
        if x is not None and sigmoid is not None and sigmoid.inputs[0] is x:
            alpha, output = ir.AttrFloat32("alpha", 1.0), ir.val(f"{silu.name}.fused")
            supersede(graph, product, ir.Node(_DOMAIN, "QuickGelu", [x], [alpha], outputs=[output]))
            return


@dataclass
class _Rows:
    """A TensorScatter that writes ``rows [B,Hkv,T,D]`` to ``cache [B,Hkv,S,D]``."""

    node: ir.Node
    cache: ir.Value
    rows: ir.Value

    @classmethod
    def written_by(cls, value: ir.Value | None) -> _Rows | None:
        node = producer(value, "TensorScatter")
        if node is None:
            return None
        cache, rows, _ = node.inputs
        assert cache is not None and rows is not None
        return cls(node, cache, rows)


@dataclass
class _Attention:
    """An Attention over two caches.

    Attributes:
        query: ``[B,heads,T,D]``; ``group`` of its heads share a head of the caches.
        mask: ``[B,1,T,S]``.
        dtype: the caches' type; their shape is ``cache_shape``, ``[1,Hkv,S,D]``.
        joined: the Reshape that joins a token's heads in the result.
    """

    query: ir.Value
    key: _Rows
    value: _Rows
    mask: ir.Value
    group: int
    dtype: ir.DataType
    cache_shape: list[int]
    joined: ir.Node

    @classmethod
    def of(cls, node: ir.Node) -> _Attention | None:
        """The attention of a node; None if it has another form."""
        query, keys, values, mask = node.inputs[:4]
        key, value = _Rows.written_by(keys), _Rows.written_by(values)
        dtype = None if key is None else key.cache.dtype
        if key is None or value is None or dtype is None or dtype not in _HALF:
            return None
        if any(list(rows.node.outputs[0].consumers()) != [node] for rows in (key, value)):
            return None  # layers that share a cache
        shape = [size for size in key.cache.shape or () if isinstance(size, int)]
        if len(shape) != 4 or shape[0] != 1 or shape[3] % _WIDTH_UNIT:
            return None  # GroupQueryAttention reads the new tokens of one slot, or one token of each slot
        group = 1
        if (tiled := producer(mask, "Concat")) is not None:
            mask, group = tiled.inputs[0], len(tiled.inputs)
        if group > 1:
            folded = producer(query, "Reshape")
            query = folded.inputs[0] if folded is not None else None
        joined = cls._joined(node, group)
        if query is None or mask is None or joined is None:
            return None
        return cls(query, key, value, mask, group, dtype, shape, joined)

    @staticmethod
    def _joined(attention: ir.Node, group: int) -> ir.Node | None:
        """The Reshape that joins a token's heads, or None if something else reads them."""
        value = attention.outputs[0]
        for kind in (*(["Reshape"] if group > 1 else []), "Transpose", "Reshape"):
            (node, *others) = value.consumers()
            if others or node.op_type != kind:
                return None
            if kind == "Transpose" and list(node.attributes.get_ints("perm", [])) != _SWAP_HEADS:
                return None
            value = node.outputs[0]
        return node


class _AttentionFusion:
    """Fuses attention with writing its caches into GroupQueryAttention, without transpositions.

    The operator reads queries, keys and values as ``[B,T,heads * D]``, or all three as one value if they are the parts
    of one product. It rotates them by tables that onnxruntime computes when it opens the graph, and adds a mask that is
    not causal as a bias.
    """

    def __init__(self, graph: ir.Graph, causal: Causal) -> None:
        self._graph = graph
        self._causal = causal
        self._flat: dict[ir.Value, ir.Value] = {}
        self._biases: dict[ir.Value, ir.Value] = {}
        self._tables: Tables | None = None
        self._lengths: ir.Value | None = None
        self._position_ids = next((value for value in graph.inputs if value.name == tensors.POSITION_IDS), None)

    def fuse(self, node: ir.Node) -> None:
        """Replaces an Attention over two caches that no other node reads, if it has the form that graphs give it."""
        attention = _Attention.of(node)
        if attention is None:
            return
        query, key, value, mask = attention.query, attention.key, attention.value, attention.mask
        _, kv_heads, rows, width = attention.cache_shape
        heads = attention.group * kv_heads
        rotation = None if width % _ROTATED_UNIT else self._rotation(query, key.rows, rows)
        query, new_key, rotary = (query, key.rows, [None] * 3) if rotation is None else rotation
        product = _whole(query, new_key, value.rows)
        if product is None:
            each = zip((query, new_key, value.rows), (heads, kv_heads, kv_heads), strict=True)
            inputs: list[ir.Value | None] = [self._flattened(part, n) for part, n in each]
        else:
            inputs = [product, None, None]
        total = constant(self._graph, "rows.all", np.array([rows], np.int32))
        causal = node.inputs[3] in self._causal.masks
        bias = None if causal else self._bias(mask, attention.dtype)
        name = node.outputs[0].name
        outputs = [ir.val(f"{name}.fused"), ir.val(f"{name}.keys"), ir.val(f"{name}.values")]
        attributes = [
            ir.AttrInt64("num_heads", heads),
            ir.AttrInt64("kv_num_heads", kv_heads),
            ir.AttrFloat32("scale", node.attributes.get_float("scale", width**-0.5)),
            ir.AttrInt64("causal", int(causal)),
            ir.AttrInt64("do_rotary", int(rotation is not None)),
            ir.AttrInt64("rotary_interleaved", 0),
        ]
        arguments = [*inputs, key.cache, value.cache, self._valid_rows(rows), total, *rotary, bias]
        fused = ir.Node(_DOMAIN, "GroupQueryAttention", arguments, attributes, outputs=outputs)
        self._graph.insert_after(node, fused)
        outputs[0].type = ir.TensorType(attention.dtype)
        attention.joined.replace_input_with(0, outputs[0])
        for written, now in ((key, outputs[1]), (value, outputs[2])):
            replace_value(written.node.outputs[0], now)

    def _rotation(
        self, query: ir.Value, key: ir.Value, rows: int
    ) -> tuple[ir.Value, ir.Value, list[ir.Value | None]] | None:
        """The values before the rotation of whole heads to ``query`` and ``key``, by their positions alone.

        Returns:
            The queries ``[B,heads,T,D]``; the keys; and cosines and sines of all positions, ``[S,D/2]`` each, with the
            positions. None without such a rotation.
        """
        turned, turned_key = producer(query, "RotaryEmbedding"), producer(key, "RotaryEmbedding")
        if turned is None or turned_key is None or turned.inputs[1:] != turned_key.inputs[1:]:
            return None
        if turned.attributes.get_int("rotary_embedding_dim", 0) or len(turned.inputs) != 3:
            return None
        before, key_before = turned.inputs[0], turned_key.inputs[0]
        if self._tables is None:
            given = [] if self._position_ids is None else [self._position_ids]
            self._tables = Tables(self._graph, {*self._causal.positions, *given}, rows, "table")
        tables = [self._tables.of(angles) for angles in turned.inputs[1:]]
        if before is None or key_before is None or None in tables:
            return None
        return before, key_before, [*tables, self._position_ids]

    def _flattened(self, value: ir.Value, heads: int) -> ir.Value:
        """``[B,heads,T,D]`` as ``[B,T,heads * D]``, from before it was transposed if possible."""
        if value not in self._flat:
            self._flat[value] = self._flatten(value, heads)
        return self._flat[value]

    def _flatten(self, value: ir.Value, heads: int) -> ir.Value:
        rotated = producer(value, "RotaryEmbedding")
        if rotated is not None:
            heads_before, *angles = rotated.inputs
            assert heads_before is not None
            attributes = {**rotated.attributes, "num_heads": ir.AttrInt64("num_heads", heads)}
            inputs = [self._flattened(heads_before, heads), *angles]
            return insert_behind(self._graph, value, op("RotaryEmbedding", inputs, f"{value.name}.flat", **attributes))
        by_rows = _by_rows(value)
        if by_rows is None:
            by_rows = insert_behind(
                self._graph, value, op("Transpose", [value], f"{value.name}.rows", perm=_SWAP_HEADS)
            )
        view = producer(by_rows, "Reshape")
        if view is not None and view.inputs[0] is not None and _rank(view.inputs[0]) == 3:
            return view.inputs[0]
        shape = constant(self._graph, "rows.flat", np.array([0, 0, -1], np.int64))
        return insert_behind(self._graph, by_rows, op("Reshape", [by_rows, shape], f"{value.name}.flat"))

    def _valid_rows(self, rows: int) -> ir.Value:
        """The row of each slot's last new token, int32 ``[B]``: the last valid row of its cache."""
        if self._lengths is None:
            inputs, nodes = {value.name: value for value in self._graph.inputs}, Nodes("rows")
            one, all_rows = (constant(self._graph, f"rows.{n}", np.array(n, np.int32)) for n in (1, rows))
            tokens = nodes.op("Shape", [inputs[tensors.INPUT_IDS]], "shape", start=1, end=2)
            count = nodes.op("Cast", [nodes.op("Squeeze", [tokens], "count")], "tokens", to=ir.DataType.INT32.value)
            first = nodes.op("Sub", [count, one], "first")
            # The last row, by the number of rows that were valid before: only Range takes sizes from the host.
            table = nodes.op("Range", [first, nodes.op("Add", [first, all_rows], "last"), one], "ends")
            self._lengths = nodes.op("Gather", [table, inputs[tensors.PAST_LENGTH]], "valid")
            self._graph.insert_before(self._graph[0], nodes.list)
        return self._lengths

    def _bias(self, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
        """0 where a bool mask ``[B,1,T,S]`` shows a row, and the lowest finite number elsewhere."""
        if mask not in self._biases:
            kind = dtype.numpy()
            limits = {"shown": np.zeros(1, kind), "hidden": np.full(1, ml_dtypes.finfo(kind).min, kind)}
            shown, hidden = (constant(self._graph, f"bias.{which}", array) for which, array in limits.items())
            node = op("Where", [mask, shown, hidden], f"{mask.name}.bias")
            self._biases[mask] = insert_behind(self._graph, mask, node)
        return self._biases[mask]


def _whole(*heads: ir.Value) -> ir.Value | None:
    """The value ``[B,T,N]`` that was split into exactly these parts, ``[B,heads,T,D]`` each; None without."""
    views = [producer(_by_rows(part), "Reshape") for part in heads]
    parts = [view.inputs[0] if view is not None else None for view in views]
    split = producer(parts[0], "Split")
    return split.inputs[0] if split is not None and list(split.outputs) == parts else None


def _by_rows(heads: ir.Value | None) -> ir.Value | None:
    """The value ``[B,T,heads,D]`` whose transposition ``[B,heads,T,D]`` is ``heads``; None without."""
    turned = producer(heads, "Transpose")
    if turned is None or list(turned.attributes.get_ints("perm", [])) != _SWAP_HEADS:
        return None
    return turned.inputs[0]


def _rank(value: ir.Value | None) -> int:
    return -1 if value is None or value.shape is None else len(value.shape)
