"""Passes over graphs: invariants leave loops, and products of one input become one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specexport.exporter.compose import hoist_invariants
from specexport.exporter.passes.linear import merge_linear

pytestmark = pytest.mark.exporter

LOOP = """<ir_version: 10, opset_import: ["" : 24]>
    g (int64 trips, bool always, float[N] x, float[N] given) => (float[N] last, float[K,N] seen) {
        last, seen = Loop (trips, always, x) <body = pass (int64 at, bool going, float[N] state)
            => (bool go_on, float[N] next, float[N] out) <float[1] small = {4}, float[WIDTH] large = {LARGE}> {
            go_on = Identity(going)
            doubled = Mul(given, small)
            squared = Mul(doubled, doubled)
            root = Sqrt(small)
            wide = Mul(given, large)
            turned = Transpose(given)
            sum = Add(state, squared)
            more = Add(sum, root)
            next = Add(more, turned)
            chosen = If(going) <then_branch = yes () => (float[N] a) { a = Add(given, state) },
                else_branch = no () => (float[N] b) { b = Identity(given) }>
            least = ReduceMin<keepdims = 0>(given)
            enough = Less(least, least)
            held = If(enough) <then_branch = yes2 () => (float[N] c) { c = Add(given, state) },
                else_branch = no2 () => (float[N] d) { d = Mul(given, state) }>
            both = Add(chosen, held)
            out = Add(wide, both)
        }>
    }"""
WIDTH = 2048


def loop_model() -> tuple[ir.Model, ir.Node]:
    large = ", ".join(map(str, range(WIDTH)))
    model = ir.from_onnx_text(LOOP.replace("WIDTH", str(WIDTH)).replace("LARGE", large))
    return model, next(node for node in model.graph if node.op_type == "Loop")


def run_loop(model: ir.Model) -> list[np.ndarray]:
    x, inputs = np.random.default_rng(0).random((2, WIDTH), np.float32)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, {"trips": np.array(3), "always": np.array(True), "x": x, "given": inputs})


def test_nodes_that_no_pass_changes_run_once_and_give_the_same() -> None:
    expected = run_loop(loop_model()[0])
    model, loop = loop_model()
    hoist_invariants(model.graph, loop)
    outside = [node.outputs[0].name for node in model.graph]
    assert outside[-1] == loop.outputs[0].name
    assert {"doubled", "squared", "enough"} <= set(outside)
    for outputs, wanted in zip(run_loop(model), expected, strict=True):
        np.testing.assert_array_equal(outputs, wanted)


def test_weights_and_fused_operators_stay_in_the_loop() -> None:
    model, loop = loop_model()
    hoist_invariants(model.graph, loop)
    body = loop.attributes["body"].as_graph()
    assert {"root", "wide", "turned", "held"} <= {node.outputs[0].name for node in body}
    assert "large" in body.initializers
    assert "large" not in " ".join(model.graph.initializers)


# --- products ---------------------------------------------------------------------------------------------------------


PRODUCTS = """<ir_version: 10, opset_import: ["" : 24]>
    g (float[B,T,8] x) => (float[B,T,4] a, float[B,T,6] b, float[B,T,8] c, float[B,T,8] d) {
        a = MatMul(x, w_a)
        b = MatMul(x, w_b)
        c = MatMul(x, shared)
        y = Sqrt(x)
        d = MatMul(y, shared)
    }"""
WIDTHS = {"w_a": 4, "w_b": 6, "shared": 8}


def products_model() -> ir.Model:
    model = ir.from_onnx_text(PRODUCTS)
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


def run_products(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    return ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": x})


def test_joined_products_give_the_same_outputs() -> None:
    x = np.random.default_rng(1).random((2, 3, 8), np.float32)
    expected = run_products(products_model(), x)
    model = products_model()
    merge_linear(model)
    assert [node.op_type for node in model.graph].count("MatMul") == 3
    for outputs, wanted in zip(run_products(model, x), expected, strict=True):
        np.testing.assert_allclose(outputs, wanted, atol=1e-6)


def test_a_weight_that_two_products_read_is_left_alone() -> None:
    model = products_model()
    merge_linear(model)
    assert "shared" in model.graph.initializers
    assert "w_a" not in model.graph.initializers
