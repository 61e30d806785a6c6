"""Lowers a graph to half precision, for strongly typed compilers, which choose no types themselves.

Matrices, attention, the residual stream and the KV cache get the narrow type. Operations that would lose too much stay
in float32: softmax, rotary angles, the choice of experts, everything computed from sampling parameters, and norms,
unless the backend itself sums those in float32. A node computes in float32 if one of its operands does, up to the next
matrix multiplication, so that few casts are needed.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.contract.errors import BuildError
from specexport.contract.tensors import CACHES, COLLECTIVE_DOMAIN
from specexport.exporter.dequantize import routers
from specexport.exporter.passes.editing import ancestors, op

_FLOAT = ir.DataType.FLOAT
_NARROW_OPS = {"MatMul", "Attention", "TensorScatter", "RotaryEmbedding"}
_NORM_OPS = {"RMSNormalization", "LayerNormalization"}
_WIDE_OPS = {"Pow", "ReduceMean", "ReduceSum", "Sqrt", "Reciprocal", "Softmax", "Exp", "Log", "Cos", "Sin", "CumSum"}
HALF_TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
"""The 16-bit types, by their names in options."""

Store = Callable[[str, ir.DataType, npt.NDArray[np.generic]], ir.TensorProtocol]
"""Stores a converted constant, given its name, type and content."""


def compute_in(model: ir.Model, narrow: ir.DataType, store: Store, *, narrow_norms: bool = False) -> None:
    """Makes a float32 graph without subgraphs compute in ``narrow``, caches included; other inputs stay float32.

    Args:
        store: called with each constant that has to be converted.
        narrow_norms: whether norms read and write the narrow type, for backends whose kernels sum in float32 anyway
            (ONNX Runtime's on GPUs); otherwise they compute in float32 between two casts.
    """
    passes.ShapeInferencePass()(model)
    wide = _WIDE_OPS if narrow_norms else _WIDE_OPS | _NORM_OPS
    narrowing = _Narrowing(model.graph, narrow, wide, store)
    interface = (str(value.name) for value in (*model.graph.inputs, *model.graph.outputs))
    narrowing.run({name for name in interface if name.startswith(CACHES)})
    passes.RemoveUnusedNodesPass()(model)
    split = any(node.domain == COLLECTIVE_DOMAIN for node in model.graph)
    for node in model.graph:
        for value in node.outputs:
            if split and value in narrowing.is_narrow:  # shape inference stops where ranks combine their parts
                value.dtype = narrow if narrowing.is_narrow[value] else _FLOAT
            elif not split and not value.is_graph_output():
                value.type = value.shape = None
    passes.ShapeInferencePass()(model)


class _Narrowing:
    def __init__(self, graph: ir.Graph, narrow: ir.DataType, wide: set[str], store: Store) -> None:
        self._graph = graph
        self._narrow = narrow
        self._wide = wide
        self._store = store
        self._constant = _constants(graph)
        self._routers = routers(graph)
        # Positions times frequencies need the full precision of float32.
        self._angles = ancestors(node.outputs[0] for node in graph if node.op_type in ("Cos", "Sin"))
        self.is_narrow: dict[ir.Value, bool] = {}
        """Whether a value is narrow: float values that depend on an input, and converted constants."""
        self._converted: dict[tuple[ir.Value, bool], ir.Value] = {}

    def run(self, caches: set[str]) -> None:
        for value in self._graph.inputs:
            if value.dtype == _FLOAT:
                self.is_narrow[value] = value.name in caches
                if value.name in caches:
                    value.dtype = self._narrow
        for node in list(self._graph):
            if not any(value in self._constant for value in node.outputs):
                self._convert(node)
        for index, value in enumerate(list(self._graph.outputs)):
            if value in self.is_narrow:
                self._finish(index, value, value.name in caches)

    def _convert(self, node: ir.Node) -> None:
        # The value's own type may be narrow already: only the recorded decision counts.
        floats = [
            (index, value)
            for index, value in enumerate(node.inputs)
            if value is not None and (value.dtype == _FLOAT or value in self.is_narrow)
        ]
        makes_floats = [value for value in node.outputs if value.dtype == _FLOAT]
        if not floats and not makes_floats:
            return
        narrow = self._decide(node, [value for _, value in floats])
        for index, value in floats:
            node.replace_input_with(index, self._as(value, narrow))
        self.is_narrow |= dict.fromkeys(makes_floats, narrow)
        if narrow and node.op_type == "ConstantOfShape":
            fill = ir.tensor(_fill(node).astype(self._narrow.numpy()), self._narrow)
            node.attributes["value"] = ir.AttrTensor("value", fill)
        elif narrow and node.op_type == "Cast":
            node.attributes["to"] = ir.AttrInt64("to", self._narrow.value)

    def _decide(self, node: ir.Node, floats: list[ir.Value]) -> bool:
        if node.op_type in self._wide or any(value in self._angles for value in node.outputs):
            return False
        if any(value in self._routers for value in node.inputs):
            return False  # half precision cannot rank scores of 0 to 1 to which a correction of, say, 8 is added
        if node.op_type in _NARROW_OPS:
            return True
        if node.op_type == "ConstantOfShape":
            return self._fits(_fill(node))
        if node.op_type == "Cast":
            # The narrow types hold quantized weights exactly, but not other integers.
            return node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.INT8
        return all(self._allows(value) for value in floats)

    def _allows(self, value: ir.Value) -> bool:
        """Whether a value allows its readers the narrow type: it is narrow, or a constant that fits."""
        if value not in self._constant:
            return self.is_narrow[value]
        tensor = ir.convenience.get_const_tensor(value)
        return tensor is None or tensor.size != 1 or self._fits(tensor.numpy())

    def _fits(self, array: npt.NDArray[np.generic]) -> bool:
        largest = float(ml_dtypes.finfo(self._narrow.numpy()).max)
        finite = array[np.isfinite(array)] if array.dtype == np.float32 else array
        return bool(np.abs(finite.astype(np.float32)).max(initial=0.0) <= largest)

    def _as(self, value: ir.Value, narrow: bool) -> ir.Value:
        """A float value in the type that its reader needs."""
        if value in self._constant:
            return self._narrow_constant(value) if narrow else value
        if self.is_narrow[value] == narrow:
            return value
        if (value, narrow) not in self._converted:
            dtype = self._narrow if narrow else _FLOAT
            cast = op("Cast", [value], f"{value.name}.{dtype.name.lower()}", to=dtype.value)
            producer = value.producer()
            if producer is not None:
                self._graph.insert_after(producer, cast)
            else:
                self._graph.insert_before(self._graph[0], cast)
            self._converted[value, narrow] = cast.outputs[0]
            self.is_narrow[cast.outputs[0]] = narrow
        return self._converted[value, narrow]

    def _narrow_constant(self, value: ir.Value) -> ir.Value:
        """The narrow copy of a constant: an initializer, or a value computed from initializers alone."""
        if value.dtype != _FLOAT:
            return value
        if (value, True) not in self._converted:
            node = value.producer()
            twin = self._narrow_initializer(value) if node is None else self._narrow_result(value, node)
            self._constant.add(twin)
            self._converted[value, True] = twin
        return self._converted[value, True]

    def _narrow_result(self, value: ir.Value, node: ir.Node) -> ir.Value:
        attributes, inputs = dict(node.attributes), list(node.inputs)
        if node.op_type == "Cast":
            stored = node.inputs[0]
            if stored is not None and stored.dtype == self._narrow:
                return stored  # already narrow; the Cast is for backends that compute in float32
            self._require_fit(stored)
            attributes["to"] = ir.AttrInt64("to", self._narrow.value)
        else:
            inputs = [value if value is None else self._narrow_constant(value) for value in node.inputs]
        copy = op(node.op_type, inputs, f"{value.name}.narrow", **attributes)
        copy.outputs[0].dtype = self._narrow
        self._graph.insert_after(node, copy)
        return copy.outputs[0]

    def _narrow_initializer(self, value: ir.Value) -> ir.Value:
        assert value.const_value is not None
        self._require_fit(value)
        name = f"{value.name}.{self._narrow.name.lower()}"
        tensor = self._store(name, self._narrow, value.const_value.numpy().astype(self._narrow.numpy()))
        twin = ir.val(name, const_value=tensor)
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
        """Casts an output to its final type, under its own name."""
        if narrow:
            value.dtype = self._narrow
        if self.is_narrow[value] == narrow:
            return
        name, dtype = value.name, self._narrow if narrow else _FLOAT
        value.name = f"{name}.computed"
        value.dtype = _FLOAT if narrow else self._narrow
        cast = op("Cast", [value], str(name), to=dtype.value)
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
        self._graph.append(cast)
        self._graph.outputs[index] = cast.outputs[0]


def _fill(node: ir.Node) -> npt.NDArray[np.float32]:
    """The number that a ConstantOfShape of float32 repeats, ``[1]``."""
    value = node.attributes.get("value")
    return np.zeros(1, np.float32) if value is None else value.as_tensor().numpy()


def _constants(graph: ir.Graph) -> set[ir.Value]:
    """The initializers, and values computed from them alone."""
    constants = set(graph.initializers.values())
    for node in graph:
        if node.inputs and all(value is None or value in constants for value in node.inputs):
            constants.update(node.outputs)
    return constants
