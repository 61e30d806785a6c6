"""The roles in which nodes read weights, and the nodes that dequantize a stored matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from specexport.exporter.passes.editing import Nodes, constant, op, producer, replace_value

Role = Literal["matmul", "lookup", "experts", "tied", "other"]
"""The use of a matrix: a product, a look-up of rows, a gather of experts, a product with its transpose (tied heads)."""
GATHERED = ("lookup", "experts")
"""Roles in which rows, or experts, are gathered from the matrix."""


def role_of(node: ir.Node, index: int) -> Role:
    """The role in which a node reads an initializer as its input of this index."""
    if node.op_type == "MatMul" and index == 1:
        return "matmul"
    axis = node.attributes.get("axis")
    if node.op_type == "Gather" and index == 0 and (axis is None or axis.as_int() == 0):
        return "experts" if gathers_experts(node, 3) else "other" if gathers_experts(node, 2) else "lookup"
    if node.op_type == "Transpose" and all(use.op_type == "MatMul" and at == 1 for use, at in node.outputs[0].uses()):
        return "tied"
    return "other"


def gathers_experts(node: ir.Node, rank: int) -> bool:
    """Whether a node gathers experts from a stack of this rank: 3 for their matrices, 2 for their biases."""
    stack, ids = node.inputs[:2] if node.op_type == "Gather" else (None, None)
    if stack is None or ids is None or stack.const_value is None or ids.shape is None:
        return False
    return len(ids.shape) == 1 and len(stack.const_value.shape) == rank


def _gathered_from(node: ir.Node) -> int | None:
    """The number of experts in the stack that a node gathers from, stored in fp32, in blocks or in 16 bits."""
    stack, ids = node.inputs[:2] if node.op_type == "Gather" else (None, None)
    cast = producer(stack, "Cast")
    stored = stack if cast is None else cast.inputs[0]
    if stored is None or stored.const_value is None or ids is None or ids.shape is None or len(ids.shape) != 1:
        return None
    sizes = stored.const_value.shape.numpy()
    return sizes[0] if len(sizes) > 2 else None


def routers(graph: ir.Graph) -> set[ir.Value]:
    """The matrices whose products choose experts; they stay in fp32, as rounding might choose other experts.

    They are the last matrices on the paths to the experts' indices, and have a column for each expert.
    """
    matrices: set[ir.Value] = set()
    experts_by_index: dict[ir.Value | None, int] = {}
    for node in graph:
        count = _gathered_from(node)
        if count is not None:
            experts_by_index[node.inputs[1]] = count
        elif node.op_type == "If" and (split := producer(node.inputs[0], "Split")) is not None:
            of_each = sum(inner.op_type == "If" for inner in node.attributes["then_branch"].as_graph())
            experts_by_index[split.inputs[0]] = len(split.outputs) * max(1, of_each)
    for start, experts in experts_by_index.items():
        visited, waiting = set[ir.Value](), [start]
        while waiting:
            value = waiting.pop()
            origin = value.producer() if value is not None and value not in visited else None
            if value is None or origin is None:
                continue
            visited.add(value)
            weight = origin.inputs[1] if origin.op_type == "MatMul" else None
            if weight is None or weight.const_value is None:
                waiting += origin.inputs
            elif weight.const_value.shape[-1] == experts:
                matrices.add(weight)
    return matrices


@dataclass(frozen=True)
class StoredFactors:
    """Scales or offsets as initializers; see :class:`~specexport.exporter.checkpoints.stored.Factors`.

    Attributes:
        coarse: fp32 or fp16 ``[G,N]``, or ``[S,1,N]`` if there are fine factors; ``[V,S]`` for look-ups.
        fine: int8 ``[S,G/S,N]``; ``[V,G]`` for look-ups.
    """

    coarse: ir.Value
    fine: ir.Value | None = None


@dataclass(frozen=True)
class StoredMatrix:
    """Integers and their scales, as initializers of a graph.

    Attributes:
        numbers: integers ``[K,N]``, or ``[N,K]`` if ``by_rows``; others for :func:`dequantize_lookup`.
        scale: the scales of blocks or columns.
        block: number of neighbours along the summed axis that share a scale; None for one scale per column.
    """

    name: str
    numbers: ir.Value
    scale: StoredFactors
    zero: ir.Value | None = None
    offset: StoredFactors | None = None
    block: int | None = None
    by_rows: bool = False


class _Nodes(Nodes):
    """Nodes that dequantize a matrix."""

    def __init__(self, graph: ir.Graph, name: str) -> None:
        super().__init__(name)
        self.graph = graph

    def reshape(self, value: ir.Value, sizes: list[int], name: str) -> ir.Value:
        return self.op("Reshape", [value, constant(self.graph, f"{self.name}.{name}.sizes", np.array(sizes))], name)

    def wide(self, value: ir.Value, name: str) -> ir.Value:
        if value.dtype == ir.DataType.FLOAT:
            return value
        return self.op("Cast", [value], name, to=ir.DataType.FLOAT.value)

    def factors(self, stored: StoredFactors, name: str, *, transposed: bool) -> ir.Value:
        """The factors ``[G,N]`` in fp32, computed from constants only, so that compilers can fold them."""
        product = self.wide(stored.coarse, f"{name}.coarse_wide")
        if stored.fine is not None:
            product = self.op("Mul", [self.wide(stored.fine, f"{name}.fine_wide"), product], f"{name}.products")
            first, second, third = _shape(stored.fine)
            sizes = [first, second * third] if transposed else [first * second, third]
            product = self.reshape(product, sizes, f"{name}.all")
        return self.op("Transpose", [product], f"{name}.transposed", perm=[1, 0]) if transposed else product

    def rows(self, stored: StoredFactors, ids: ir.Value, name: str) -> ir.Value:
        """The factors of the rows that ``ids`` look up, ``[B,T,G,1]``."""
        coarse = self.op("Gather", [self.wide(stored.coarse, f"{name}.wide"), ids], f"{name}.rows", axis=0)
        _, blocks = _shape(stored.coarse)
        product = self.reshape(coarse, [0, 0, blocks, 1], f"{name}.columns")
        if stored.fine is not None:
            _, count = _shape(stored.fine)
            fine = self.wide(self.op("Gather", [stored.fine, ids], f"{name}.fine_rows", axis=0), f"{name}.fine_wide")
            split = self.reshape(fine, [0, 0, blocks, count // blocks], f"{name}.each")
            product = self.reshape(self.op("Mul", [split, product], f"{name}.both"), [0, 0, count, 1], f"{name}.all")
        return product


def dequantize_product(graph: ir.Graph, matrix: StoredMatrix, product: ir.Node) -> None:
    """Makes a product, ``MatMul(x, W)``, read a stored matrix.

    All weights of a block have the same offset. So a separate product multiplies the sums of blocks of ``x`` by the
    offsets, and compilers can still fuse the product of the integers.
    """
    nodes = _Nodes(graph, matrix.name)
    numbers, axis = matrix.numbers, {"axis": 1} if matrix.block is None else {"axis": 0, "block_size": matrix.block}
    if matrix.by_rows:
        # Compilers fold the transposition of a constant.
        numbers = nodes.op("Transpose", [numbers], "transposed", perm=[1, 0])
    scale = nodes.factors(matrix.scale, "scale", transposed=matrix.by_rows)
    zero = [] if matrix.zero is None else [matrix.zero]
    dequantized = nodes.op("DequantizeLinear", [numbers, scale, *zero], "fp32", **axis)
    x, result = product.inputs[0], product.outputs[0]
    product.replace_input_with(1, dequantized)
    if matrix.offset is not None and matrix.block is not None:
        assert x is not None and x.shape is not None
        offset, block = nodes.factors(matrix.offset, "offset", transposed=matrix.by_rows), matrix.block
        depth = _shape(matrix.numbers)[1 if matrix.by_rows else 0]
        ones = constant(graph, f"ones.{block}", np.ones((block, 1), np.float32))
        leading = [0] * (len(x.shape) - 1)
        blocks = nodes.reshape(x, [*leading, depth // block, block], "blocks")
        sums = nodes.reshape(nodes.op("MatMul", [blocks, ones], "block_sums"), [*leading, depth // block], "sums")
        added = nodes.op("MatMul", [sums, offset], "offsets")
        total = op("Add", [result, added], f"{matrix.name}.total")
        replace_value(result, total.outputs[0])
        total.replace_input_with(0, result)
        graph.insert_after(product, total)
    graph.insert_before(product, nodes.list)


def dequantize_lookup(graph: ir.Graph, gather: ir.Node, matrix: StoredMatrix, *, pairs: bool) -> ir.Value:
    """Gathers integers and their scales, and multiplies them; returns the product.

    Ids ``[B,T]`` gather rows ``[B,T,H]`` of integers ``[V,H/block,block]``; ids ``[L]`` gather experts ``[L,K,N]`` of
    integers ``[E,K/block,block,N]``, or of pairs of four-bit integers ``[E,K/block,block/2,N]``
    (:func:`~specexport.exporter.external_data.pair_int4`), with scales ``[E,K/block,1,N]``.

    DequantizeLinear is not used, as ONNX Runtime's does not support blocks of int8 on GPUs.
    """
    nodes, ids = _Nodes(graph, matrix.name), gather.inputs[1]
    assert ids is not None
    _, blocks, stored_block, *columns = _shape(matrix.numbers)
    wide = nodes.wide(nodes.op("Gather", [matrix.numbers, ids], "rows", axis=0), "wide")
    if pairs:
        sixteen, sixteenth = (constant(graph, f"int4.{n}", np.array(n, np.float32)) for n in (16.0, 1 / 16))
        first = nodes.op("Round", [nodes.op("Mul", [wide, sixteenth], "parts")], "first")
        second = nodes.op("Sub", [wide, nodes.op("Mul", [first, sixteen], "shifted")], "second")
        wide = nodes.op("Concat", [first, second], "both", axis=2)
    if columns:
        scale = nodes.op("Gather", [matrix.scale.coarse, ids], "row_scales", axis=0)
    else:
        scale = nodes.rows(matrix.scale, ids, "scale")
    rows = nodes.op("Mul", [wide, scale], "scaled")
    if matrix.offset is not None:
        rows = nodes.op("Add", [rows, nodes.rows(matrix.offset, ids, "offset")], "moved")
    length = blocks * stored_block * (2 if pairs else 1)
    rows = nodes.reshape(rows, [0, length, *columns] if columns else [0, 0, length], "gathered")
    graph.insert_before(gather, nodes.list)
    return rows


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(map(int, value.const_value.shape.numpy()))
