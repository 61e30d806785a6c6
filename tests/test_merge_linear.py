"""Products of one input with several matrices are joined into one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specexport.exporter.passes.linear import merge_linear

pytestmark = pytest.mark.exporter

TEXT = """<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,T,8] x) => (float[B,T,4] a, float[B,T,6] b, float[B,T,8] c, float[B,T,8] d) {
        a = MatMul(x, w_a)
        b = MatMul(x, w_b)
        c = MatMul(x, shared)
        y = Sqrt(x)
        d = MatMul(y, shared)
    }"""
WIDTHS = {"w_a": 4, "w_b": 6, "shared": 8}


def _model() -> ir.Model:
    model = ir.from_onnx_text(TEXT)
    rng = np.random.default_rng(0)
    values = {v.name: v for node in model.graph for v in node.inputs if v is not None}
    for name, width in WIDTHS.items():
        for node in model.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name:
                    node.replace_input_with(index, values[name])
        array = rng.standard_normal((8, width)).astype(np.float32)
        values[name].const_value = ir.Tensor(array, name=name)
        values[name].shape, values[name].type = ir.Shape(array.shape), ir.TensorType(ir.DataType.FLOAT)
        model.graph.register_initializer(values[name])
    return model


def _run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    return ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": x})


def test_joined_products_give_the_same_outputs() -> None:
    x = np.random.default_rng(1).random((2, 3, 8), np.float32)
    expected = _run(_model(), x)
    model = _model()
    assert merge_linear(model) == 2
    assert [node.op_type for node in model.graph].count("MatMul") == 3
    for outputs, wanted in zip(_run(model, x), expected, strict=True):
        np.testing.assert_allclose(outputs, wanted, atol=1e-6)


def test_a_weight_that_two_products_read_is_left_alone() -> None:
    model = _model()
    merge_linear(model)
    assert "shared" in model.graph.initializers
    assert "w_a" not in model.graph.initializers
