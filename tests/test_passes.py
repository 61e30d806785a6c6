"""Passes over graphs: invariants leave loops, products of one input are joined, and GPUs launch less."""

from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from specexport.exporter.compose import hoist_invariants
from specexport.exporter.passes.fewer_launches import use_fewer_launches
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


def test_nodes_that_no_pass_changes_run_once_and_give_the_same():
    expected = run_loop(loop_model()[0])
    model, loop = loop_model()
    hoist_invariants(model.graph, loop)
    outside = [node.outputs[0].name for node in model.graph]
    assert outside[-1] == loop.outputs[0].name
    assert {"doubled", "squared", "enough"} <= set(outside)
    for outputs, wanted in zip(run_loop(model), expected, strict=True):
        np.testing.assert_array_equal(outputs, wanted)


def test_weights_and_fused_operators_stay_in_the_loop():
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


def test_joined_products_give_the_same_outputs():
    x = np.random.default_rng(1).random((2, 3, 8), np.float32)
    expected = run_products(products_model(), x)
    model = products_model()
    merge_linear(model)
    assert [node.op_type for node in model.graph].count("MatMul") == 3
    for outputs, wanted in zip(run_products(model, x), expected, strict=True):
        np.testing.assert_allclose(outputs, wanted, atol=1e-6)


def test_a_weight_that_two_products_read_is_left_alone():
    model = products_model()
    merge_linear(model)
    assert "shared" in model.graph.initializers
    assert "w_a" not in model.graph.initializers


# --- fewer launches ---------------------------------------------------------------------------------------------------


RANDOM = np.random.default_rng(0)
ROWS = RANDOM.standard_normal((1, 5, 4)).astype(np.float32)
IDS = RANDOM.integers(0, 99, (1, 1, 6))


def both(
    nodes: list[Any], inputs: dict[str, Any], shape: list[Any], sizes: dict[str, int]
) -> tuple[list[str], Any, Any]:
    """The operators of a graph afterwards, and what it computes before and after."""
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), ["B", *array.shape[1:]])
        for name, array in inputs.items()
        if not name.startswith("c_")
    ]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in inputs.items() if name.startswith("c_")]
    last = TensorProto.INT64 if nodes[-1].op_type == "Unsqueeze" else TensorProto.FLOAT
    graph = helper.make_graph(nodes, "graph", given, [helper.make_tensor_value_info("y", last, shape)], constants)
    master = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]))
    model = ir.from_proto(master)
    use_fewer_launches(model, sizes)
    feeds = {name: array for name, array in inputs.items() if not name.startswith("c_")}
    before, after = (
        onnx.reference.ReferenceEvaluator(each).run(None, feeds)[0] for each in (master, ir.to_proto(model))
    )
    return [node.op_type for node in model.graph], before, after


@pytest.mark.parametrize(
    ("sizes", "operators"), [({"B": 1}, ["Reshape", "Gather"]), ({}, ["Expand", "GatherElements"])]
)
def test_rows_are_gathered_whole(sizes, operators):
    nodes = [
        helper.make_node("Expand", ["at", "c_shape"], ["places"]),
        helper.make_node("GatherElements", ["x", "places"], ["y"], axis=1),
    ]
    inputs = {"x": ROWS, "at": np.array([[[3], [1]]]), "c_shape": np.array([1, 1, 4])}
    operators_after, before, after = both(nodes, inputs, ["B", 2, 4], sizes)
    assert operators_after == operators
    np.testing.assert_array_equal(after, before)


def test_a_token_is_gathered_in_its_outputs_shape():
    nodes = [
        helper.make_node("GatherElements", ["ids", "choice"], ["tokens"], axis=2),
        helper.make_node("Gather", ["tokens", "c_zero"], ["one"], axis=2),
        helper.make_node("Squeeze", ["one", "c_one"], ["token"]),
        helper.make_node("Unsqueeze", ["token", "c_axes"], ["y"]),
    ]
    inputs = {
        "ids": IDS,
        "choice": np.array([[[4]]]),
        "c_zero": np.array(0),
        "c_one": np.array([1]),
        "c_axes": np.array([0]),
    }
    operators_after, before, after = both(nodes, inputs, [1, "B"], {"B": 1})
    assert operators_after == ["Reshape", "Reshape", "Gather"]
    np.testing.assert_array_equal(after, before)


def test_an_output_is_no_view_of_what_has_its_shape():
    nodes = [
        helper.make_node("Neg", ["ids"], ["x"]),
        helper.make_node("Squeeze", ["x", "c_axes"], ["z"]),
        helper.make_node("Unsqueeze", ["z", "c_axes"], ["y"]),
    ]
    operators_after, before, after = both(nodes, {"ids": IDS, "c_axes": np.array([1])}, ["B", 1, 6], {"B": 1})
    assert operators_after == ["Neg"]
    np.testing.assert_array_equal(after, before)


def test_the_sum_before_a_number_is_one_operator():
    nodes = [helper.make_node("CumSum", ["x", "c_axis"], ["through"]), helper.make_node("Sub", ["through", "x"], ["y"])]
    operators_after, before, after = both(nodes, {"x": ROWS, "c_axis": np.array(-1)}, ["B", 5, 4], {})
    assert operators_after == ["CumSum"]
    np.testing.assert_allclose(after, before, atol=1e-6)
