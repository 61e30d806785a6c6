"""What is the same in every pass of a loop is computed before it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specexport.exporter.compose import hoist_invariants

pytestmark = pytest.mark.exporter

TEXT = """<ir_version: 10, opset_import: ["" : 24]>
    g (int64 trips, bool always, float[N] x, float[N] given) => (float[N] last, float[K,N] seen) {
        last, seen = Loop (trips, always, x) <body = pass (int64 at, bool going, float[N] state)
            => (bool go_on, float[N] next, float[N] out) <float[1] small = {4}, float[WIDTH] large = {LARGE}> {
            go_on = Identity(going)
            doubled = Mul(given, small)
            squared = Mul(doubled, doubled)
            own = Sqrt(small)
            wide = Mul(given, large)
            turned = Transpose(given)
            sum = Add(state, squared)
            more = Add(sum, own)
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


def _model() -> tuple[ir.Model, ir.Node]:
    large = ", ".join(map(str, range(WIDTH)))
    model = ir.from_onnx_text(TEXT.replace("WIDTH", str(WIDTH)).replace("LARGE", large))
    return model, next(node for node in model.graph if node.op_type == "Loop")


def _run(model: ir.Model) -> list[np.ndarray]:
    x, inputs = np.random.default_rng(0).random((2, WIDTH), np.float32)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, {"trips": np.array(3), "always": np.array(True), "x": x, "given": inputs})


def test_nodes_that_no_pass_changes_run_once_and_give_the_same() -> None:
    expected = _run(_model()[0])
    model, loop = _model()
    hoist_invariants(model.graph, loop)
    outside = [node.outputs[0].name for node in model.graph]
    assert outside[-1] == loop.outputs[0].name
    assert {"doubled", "squared", "enough"} <= set(outside)
    for outputs, wanted in zip(_run(model), expected, strict=True):
        np.testing.assert_array_equal(outputs, wanted)


def test_weights_and_fused_operators_stay_in_the_loop() -> None:
    model, loop = _model()
    hoist_invariants(model.graph, loop)
    body = loop.attributes["body"].as_graph()
    assert {"own", "wide", "turned", "held"} <= {node.outputs[0].name for node in body}
    assert "large" in body.initializers
    assert "large" not in " ".join(model.graph.initializers)
