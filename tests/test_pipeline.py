"""The order of a build: stages and passes find what they need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
import pytest

from specexport.exporter import build, pipeline, target
from specexport.exporter.build_state import Build
from specexport.exporter.pipeline import Form, Pass, Stage, run_passes, run_stages
from specexport.exporter.target import TargetBuild

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


def test_stages_are_in_an_order_in_which_each_gets_what_it_needs() -> None:
    lists = ((build.STAGES, Build, set()), (target.STAGES, TargetBuild, set()))
    for stages, state, known in lists:
        for stage in stages:
            assert {*stage.needs} <= known, stage.run
            known |= {*stage.ensures}
        unset = {name for name, entry in state.__dataclass_fields__.items() if not entry.init}
        assert known == unset


def test_stages_run_in_turn_and_report_theirs() -> None:
    seen: list[Any] = []
    first = Stage[list[int]](lambda state: state.append(1), title="one")
    stages = (first, Stage[list[int]](lambda state: state.append(2)))
    assert run_stages([], stages, lambda *report: seen.append(report)) == [1, 2]
    assert seen == [("one", 0, 1), ("one", 1, 1)]


def test_passes_rewrite_in_place() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], name="g"), ir_version=10)
    names: list[str | None] = []
    run_passes(model, (Pass(lambda m: names.append(m.graph.name), Form.NONE),) * 2)
    assert names == ["g", "g"]
