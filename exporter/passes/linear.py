"""Canonicalizes products with weights to ``MatMul(x, W)`` with an initializer ``W [K,N]``.

Products with the same input are joined: query, key and value projections; gate and up projections.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from specexport.contract import tensors
from specexport.exporter.passes.editing import constant, needed_only_for, op

FORM = "form"
"""Metadata key of a weight's form (see :class:`~specexport.exporter.checkpoints.stored.StoredTensor`)."""


def canonical_weights(model: ir.Model) -> None:
    """Turns Gemm into MatMul and Add, and ``Transpose(weight)`` into the transposed weight under the same name.

    A weight is read and transposed only when it is written. A weight with several readers (an embedding tied to the
    head) keeps its Transpose, so that it is stored once.
    """
    for node in list(model.graph):
        if node.op_type == "Gemm":
            _split_gemm(model.graph, node)
    for node in list(model.graph):
        weight = node.inputs[0] if transposes_weight(node) else None
        if weight is not None and weight.const_value is not None and len(weight.uses()) == 1:
            weight.const_value = _transposed(weight.const_value)
            weight.shape = ir.Shape(weight.const_value.shape)
            node.outputs[0].replace_all_uses_with(weight)
            model.graph.remove(node, safe=True)


def _transposed(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    *stack, rows, columns = tensor.shape.numpy()
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy().swapaxes(-1, -2), name=tensor.name),
        dtype=tensor.dtype,
        shape=ir.Shape([*stack, columns, rows]),
        name=tensor.name,
    )


def transposes_weight(node: ir.Node) -> bool:
    """Whether a node transposes a constant matrix, or each matrix of a constant stack."""
    weight = node.inputs[0] if node.op_type == "Transpose" else None
    if weight is None or weight.const_value is None:
        return False
    perm = node.attributes.get("perm")
    return len(weight.const_value.shape) == 2 or (perm is not None and list(perm.as_ints()) == [0, 2, 1])


def _split_gemm(graph: ir.Graph, node: ir.Node) -> None:
    """Replaces a Gemm with ``alpha = beta = 1`` and an untransposed first input with MatMul, Transpose and Add."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0 or attributes.get("transA", 0):
        return
    name, (x, weight, *bias) = node.outputs[0].name, node.inputs
    nodes = []
    if attributes.get("transB", 0):
        nodes.append(op("Transpose", [weight], f"{name}.weight", perm=[1, 0]))
        weight = nodes[-1].outputs[0]
    nodes.append(op("MatMul", [x, weight], f"{name}.product"))
    if bias and bias[0] is not None:
        nodes.append(op("Add", [nodes[-1].outputs[0], bias[0]], f"{name}.sum"))
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, nodes[-1].outputs)


def merge_linear(model: ir.Model) -> None:
    """Joins ``MatMul(x, W1), MatMul(x, W2), ...`` into ``Split(MatMul(x, [W1 W2 ...]))``.

    A step with few tokens consists of many short products: starting each of them takes time, and so does quantizing
    the same ``x`` for each of them. Matrices that a checkpoint stores in different forms stay separate, so that they
    can be stored unchanged.
    """
    # Medusa heads read the same input as the model's head, but are stored separately, perhaps in fewer bits.
    of_heads = needed_only_for(model.graph, tensors.CANDIDATES)
    readers: dict[tuple[ir.Value, bool, str], list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        x = node.inputs[0] if node.op_type == "MatMul" else None
        weight = node.inputs[1] if x is not None else None
        if x is not None and weight is not None and _is_weight(weight):
            readers[x, node.outputs[0] in of_heads, weight.meta.get(FORM, "")].append(node)
    for (x, *_), nodes in readers.items():
        if len(nodes) > 1:
            _join(model.graph, x, nodes)


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a value is a matrix of the checkpoint with a single reader."""
    if value is None or value.const_value is None:
        return False
    return value.is_initializer() and len(value.uses()) == 1 and len(value.const_value.shape) == 2


def _join(graph: ir.Graph, x: ir.Value, nodes: list[ir.Node]) -> None:
    weights = [weight for node in nodes if (weight := node.inputs[1]) is not None]
    name = joined_name([str(weight.name) for weight in weights])
    parts = [weight.const_value for weight in weights if weight.const_value is not None]
    shapes = [part.shape.numpy() for part in parts]
    widths = [width for _, width in shapes]
    joined = ir.LazyTensor(
        # Joined only when it is written: memory never holds a second copy of the model.
        lambda: ir.Tensor(np.concatenate([part.numpy() for part in parts], axis=1), name=name),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape([shapes[0][0], sum(widths)]),
        name=name,
    )
    weight = ir.val(name, const_value=joined)
    graph.register_initializer(weight)
    product = op("MatMul", [x, weight], f"{name}.product")
    sizes = constant(graph, f"{name}.widths", np.array(widths, np.int64))
    split = ir.node("Split", [*product.outputs, sizes], {"axis": -1}, num_outputs=len(nodes), name=f"{name}.split")
    old = [node.outputs[0] for node in nodes]
    first = next(node for node in graph if node in nodes)
    ir.convenience.replace_nodes_and_values(graph, first, nodes, [product, split], old, split.outputs)
    for value in weights:
        del graph.initializers[str(value.name)]


def joined_name(names: list[str]) -> str:
    """The name of several matrices joined: ``layers.0.mlp.{gate_proj,up_proj}.weight``."""
    parts = [name.split(".") for name in names]
    head = _common(zip(*parts, strict=False))
    tail = _common(zip(*(part[len(head) :][::-1] for part in parts), strict=False))[::-1]
    differing = ",".join(".".join(part[len(head) : len(part) - len(tail)]) for part in parts)
    return ".".join([*head, f"{{{differing}}}", *tail])


def names_in(name: str) -> list[str]:
    """The names of the matrices of a joined one; the inverse of :func:`joined_name`."""
    head, brace, behind = name.partition("{")
    differing, _, tail = behind.partition("}")
    return [f"{head}{part}{tail}" for part in differing.split(",")] if brace else [name]


def _common(columns: Iterable[tuple[str, ...]]) -> list[str]:
    """The longest common prefix of names, given as columns of their parts."""
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
