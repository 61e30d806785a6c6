"""Makes a graph compute in half precision: what a strongly typed compiler is given, as it decides no types itself.

Matrices, attention, the residual stream and the KV cache take the narrow type. What loses too much there stays float32:
norms, softmax, rotary angles, and everything that comes of the sampling parameters. A node computes in float32 if an
operand does, until the next matrix multiplication; so only a few casts are needed.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.contract.errors import BuildError

_FLOAT = ir.DataType.FLOAT
_NARROW = {"MatMul", "Attention", "TensorScatter", "RotaryEmbedding", "Gather", "ConstantOfShape"}
_WIDE = {
    "RMSNormalization", "LayerNormalization", "Pow", "ReduceMean", "ReduceSum", "Sqrt", "Reciprocal", "Softmax", "Exp",
    "Log", "Cos", "Sin", "CumSum",
}  # fmt: skip
_TYPES: dict[ir.DataType, npt.DTypeLike] = {ir.DataType.FLOAT16: np.float16, ir.DataType.BFLOAT16: ml_dtypes.bfloat16}

Store = Callable[[str, ir.DataType, npt.NDArray[np.generic]], ir.TensorProtocol]
"""Keeps a converted constant: its name, type and content."""


def compute_in(model: ir.Model, narrow: ir.DataType, caches: set[str], store: Store) -> None:
    """Lets a float32 graph without inner graphs compute in ``narrow``.

    Args:
        model: changed in place.
        narrow: ``FLOAT16`` or ``BFLOAT16``.
        caches: the inputs and outputs that become narrow; all others keep their types.
        store: called with each constant that has to be converted.

    Raises:
        BuildError: a weight does not fit ``narrow``.
    """
    passes.ShapeInferencePass()(model)
    _Rewriter(model.graph, narrow, store).run(caches)
    passes.RemoveUnusedNodesPass()(model)
    interface = {*model.graph.inputs, *model.graph.outputs}
    for node in model.graph:
        for value in node.outputs:
            if value not in interface:
                value.type = value.shape = None
    passes.ShapeInferencePass()(model)


class _Rewriter:
    def __init__(self, graph: ir.Graph, narrow: ir.DataType, store: Store) -> None:
        self._graph = graph
        self._narrow = narrow
        self._store = store
        self._constant = _constants(graph)
        self._angles = _angles(graph)
        self._is_narrow: dict[ir.Value, bool] = {}
        """Of every float value that depends on an input, and of constants made narrow."""
        self._converted: dict[tuple[ir.Value, bool], ir.Value] = {}

    def run(self, caches: set[str]) -> None:
        for value in self._graph.inputs:
            if value.dtype == _FLOAT:
                self._is_narrow[value] = value.name in caches
                if value.name in caches:
                    value.dtype = self._narrow
        for node in list(self._graph):
            if not any(value in self._constant for value in node.outputs):
                self._rewrite(node)
        for index, value in enumerate(list(self._graph.outputs)):
            if value in self._is_narrow:
                self._finish(index, value, value.name in caches)

    def _rewrite(self, node: ir.Node) -> None:
        floats = [index for index, value in enumerate(node.inputs) if value is not None and value.dtype == _FLOAT]
        # Whether narrow was written into the value's type already tells nothing: ask what was decided.
        floats += [i for i, value in enumerate(node.inputs) if value in self._is_narrow and i not in floats]
        makes_floats = [value for value in node.outputs if value.dtype == _FLOAT]
        if not floats and not makes_floats:
            return
        narrow = self._decide(node, floats)
        for index in floats:
            value = node.inputs[index]
            assert value is not None
            wanted = self._as(value, narrow, node)
            if wanted is not value:
                node.replace_input_with(index, wanted)
        for value in makes_floats:
            self._is_narrow[value] = narrow
        if narrow and node.op_type == "ConstantOfShape":
            node.attributes["value"] = ir.AttrTensor(
                "value", ir.tensor(np.zeros(1, _TYPES[self._narrow]), self._narrow)
            )

    def _decide(self, node: ir.Node, floats: list[int]) -> bool:
        """Whether a node computes in the narrow type."""
        if node.op_type in _WIDE or any(value in self._angles for value in node.outputs):
            return False
        if node.op_type in _NARROW:
            return True
        if node.op_type == "Cast":
            return False  # of an integer or a truth value
        for index in floats:
            value = node.inputs[index]
            assert value is not None
            if value in self._constant:
                tensor = ir.convenience.get_const_tensor(value)
                if tensor is not None and tensor.size == 1 and not self._fits(tensor.numpy()):
                    return False
            elif not self._is_narrow[value]:
                return False
        return True

    def _fits(self, array: npt.NDArray[np.generic]) -> bool:
        largest = float(ml_dtypes.finfo(_TYPES[self._narrow]).max)
        finite = array[np.isfinite(array)] if array.dtype == np.float32 else array
        return bool(np.abs(finite.astype(np.float32)).max(initial=0.0) <= largest)

    def _as(self, value: ir.Value, narrow: bool, before: ir.Node) -> ir.Value:
        """A float value in the type a node wants."""
        if value in self._constant:
            return self._narrow_constant(value, before) if narrow else value
        if self._is_narrow[value] == narrow:
            return value
        if (value, narrow) not in self._converted:
            dtype = self._narrow if narrow else _FLOAT
            cast = self._node("Cast", [value], f"{value.name}.{dtype.name.lower()}", {"to": dtype.value})
            producer = value.producer()
            if producer is not None:
                self._graph.insert_after(producer, cast)
            else:
                self._graph.insert_before(self._graph[0], cast)
            self._converted[value, narrow] = cast.outputs[0]
            self._is_narrow[cast.outputs[0]] = narrow
        return self._converted[value, narrow]

    def _narrow_constant(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """The narrow twin of a constant: of an initializer, or of what nodes make of some."""
        if value.dtype != _FLOAT:
            return value
        if (value, True) in self._converted:
            return self._converted[value, True]
        node = value.producer()
        if node is None:
            twin = self._narrow_initializer(value)
        elif node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype == self._narrow:
            twin = node.inputs[0]  # stored narrow, and widened only for backends that compute wide
        else:
            attributes = dict(node.attributes)
            if node.op_type == "Cast":
                self._require_fit(node.inputs[0])
                attributes["to"] = ir.AttrInt64("to", self._narrow.value)
                inputs = list(node.inputs)
            else:
                inputs = [one if one is None else self._narrow_constant(one, node) for one in node.inputs]
            copy = ir.node(node.op_type, inputs, attributes=attributes, name=f"{node.name}.narrow")
            copy.outputs[0].name = f"{value.name}.narrow"
            copy.outputs[0].dtype = self._narrow
            self._graph.insert_after(node, copy)
            twin = copy.outputs[0]
        self._constant.add(twin)
        self._converted[value, True] = twin
        return twin

    def _narrow_initializer(self, value: ir.Value) -> ir.Value:
        assert value.const_value is not None and value.name is not None
        array = value.const_value.numpy()
        self._require_fit(value)
        name = f"{value.name}.{self._narrow.name.lower()}"
        tensor = self._store(name, self._narrow, array.astype(_TYPES[self._narrow]))
        twin = ir.Value(name=name, type=ir.TensorType(self._narrow), shape=value.shape, const_value=tensor)
        self._graph.register_initializer(twin)
        return twin

    def _require_fit(self, value: ir.Value | None) -> None:
        array = value.const_value.numpy() if value is not None and value.const_value is not None else None
        if value is not None and array is not None and not self._fits(array):
            raise BuildError(
                f"{value.name}: its largest weight, {float(np.abs(array).max()):.3g}, does not fit "
                f"{self._narrow.name.lower()}; compile with --compute bf16 or fp32 instead"
            )

    def _finish(self, index: int, value: ir.Value, narrow: bool) -> None:
        """Gives an output the type it is to have, under its own name."""
        if narrow:
            value.dtype = self._narrow
        if self._is_narrow[value] == narrow:
            return
        name, dtype = value.name, self._narrow if narrow else _FLOAT
        value.name = f"{name}.computed"
        value.dtype = _FLOAT if narrow else self._narrow
        cast = self._node("Cast", [value], f"{name}.cast", {"to": dtype.value})
        last = cast.outputs[0]
        last.name, last.type, last.shape = name, ir.TensorType(dtype), value.shape
        self._graph.append(cast)
        self._graph.outputs[index] = last

    def _node(self, op_type: str, inputs: list[ir.Value | None], name: str, attributes: dict[str, int]) -> ir.Node:
        # TensorRT wants nodes to have other names than weights.
        node = ir.node(op_type, inputs, attributes=attributes, name=f"{name}.node")
        node.outputs[0].name = name
        return node


def _constants(graph: ir.Graph) -> set[ir.Value]:
    """The initializers, and what nodes make of nothing else."""
    found = set(graph.initializers.values())
    for node in graph:
        if node.inputs and all(value is None or value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def _angles(graph: ir.Graph) -> set[ir.Value]:
    """Sines, cosines and all they are made of: positions times frequencies need every bit of a float32."""
    found: set[ir.Value] = set()
    waiting: list[ir.Value | None] = [node.outputs[0] for node in graph if node.op_type in ("Cos", "Sin")]
    while waiting:
        value = waiting.pop()
        if value is None or value in found:
            continue
        found.add(value)
        producer = value.producer()
        if producer is not None:
            waiting += producer.inputs
    return found
