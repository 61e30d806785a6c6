"""Graphs in which views, gathered rows and sums take the place of what a GPU would launch more for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from specexport.exporter.passes.fewer_launches import use_fewer_launches

pytestmark = pytest.mark.exporter

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
def test_rows_are_gathered_whole(sizes: dict[str, int], operators: list[str]) -> None:
    nodes = [
        helper.make_node("Expand", ["at", "c_shape"], ["places"]),
        helper.make_node("GatherElements", ["x", "places"], ["y"], axis=1),
    ]
    inputs = {"x": ROWS, "at": np.array([[[3], [1]]]), "c_shape": np.array([1, 1, 4])}
    operators_after, before, after = both(nodes, inputs, ["B", 2, 4], sizes)
    assert operators_after == operators
    np.testing.assert_array_equal(after, before)


def test_a_token_is_gathered_in_its_outputs_shape() -> None:
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


def test_an_output_is_no_view_of_what_has_its_shape() -> None:
    nodes = [
        helper.make_node("Neg", ["ids"], ["x"]),
        helper.make_node("Squeeze", ["x", "c_axes"], ["z"]),
        helper.make_node("Unsqueeze", ["z", "c_axes"], ["y"]),
    ]
    operators_after, before, after = both(nodes, {"ids": IDS, "c_axes": np.array([1])}, ["B", 1, 6], {"B": 1})
    assert operators_after == ["Neg"]
    np.testing.assert_array_equal(after, before)


def test_the_sum_before_a_number_is_one_operator() -> None:
    nodes = [helper.make_node("CumSum", ["x", "c_axis"], ["through"]), helper.make_node("Sub", ["through", "x"], ["y"])]
    operators_after, before, after = both(nodes, {"x": ROWS, "c_axis": np.array(-1)}, ["B", 5, 4], {})
    assert operators_after == ["CumSum"]
    np.testing.assert_allclose(after, before, atol=1e-6)
