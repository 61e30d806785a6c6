"""The order of passes: each finds what it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
import pytest

from specexport.exporter import pipeline
from specexport.exporter.pipeline import Form, Pass, run_passes

pytestmark = pytest.mark.exporter


def form_after(passes: Iterable[Pass], form: Form) -> Form:
    for step in passes:
        missing = step.needs & ~form
        assert not missing, f"{step.rewrite} needs {missing}"
        form |= step.ensures
    return form


def store(*_: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize("lowering", ["native", "portable"])
def test_passes_are_in_an_order_in_which_each_gets_what_it_needs(lowering: Any) -> None:
    master = form_after((*pipeline.export_passes({}), *pipeline.trace_passes(lowering)), Form.EXPORTED)
    stored = form_after(pipeline.write_passes(store, branches=True), master)
    assert Form.STORED | Form.STANDARD | Form.PRODUCTS in stored
    for compiled in (False, True):
        for ranks in (0, 2):
            propose = pipeline.device_passes("fp16", 1, {}, store, compiled=compiled, ranks=ranks)
            assert Form.STRAIGHT in form_after(propose, stored)
            step = pipeline.device_passes("bf16", 0, {}, store, compiled=compiled, ranks=ranks)
            form_after(step, stored | Form.STRAIGHT)  # a step graph has no loop
    assert len(pipeline.trace_passes("native")) == len(pipeline.trace_passes("portable")) + 1


def test_passes_in_another_order_do_not() -> None:
    with pytest.raises(AssertionError, match="SIMPLE"):
        form_after(reversed(pipeline.export_passes({})), Form.EXPORTED)


def test_passes_rewrite_in_place() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], name="g"), ir_version=10)
    names: list[str | None] = []
    run_passes(model, (Pass(lambda m: names.append(m.graph.name), Form.NONE),) * 2)
    assert names == ["g", "g"]
