"""Traces are decomposed where an operator has no translation, and are the same graphs where that is spared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch._higher_order_ops.scan import scan

from specexport.exporter import trace
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.fast_trace import fast_trace
from specexport.graphs.rotary import take_one_position_row
from specexport.graphs.step import StepModule
from tests.checkpoints import make_checkpoint, make_model

pytestmark = pytest.mark.exporter

Trace = Callable[[str], ir.Model]


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[torch.export.ExportedProgram]:
    """Programs that were decomposed."""
    programs: list[torch.export.ExportedProgram] = []
    decompose = torch.export.ExportedProgram.run_decompositions

    def noted(program: torch.export.ExportedProgram, *arguments: Any, **named: Any) -> torch.export.ExportedProgram:
        programs.append(program)
        return decompose(program, *arguments, **named)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", noted)
    return programs


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """The step graph of a family's model, traced anew each time."""
    monkeypatch.setattr(trace, "cached_trace", lambda module, about, make: make())

    def traced(family: str) -> ir.Model:
        checkpoint = load_checkpoint(str(make_checkpoint(tmp_path / family, family, num_hidden_layers=1)))
        return trace.trace_step(StepModule(checkpoint.model), checkpoint.cache)

    return traced


def _nodes(model: ir.Model) -> list[tuple[str, list[str | None]]]:
    """Operators and what they return, numbers of constants aside."""
    return [(node.op_type, [f"{value.dtype} {value.shape}" for value in node.outputs]) for node in model.graph]


def _said(module: torch.nn.Module, x: torch.Tensor, shapes: Any) -> Callable[[torch.Tensor], np.ndarray]:
    """Runs the graph of a module, which is traced for inputs like ``x``."""
    with fast_trace():
        program = torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = ort.InferenceSession(program.model_proto.SerializeToString())
    return lambda x: session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def test_decomposing_would_change_nothing(
    step: Trace, decomposed: list[torch.export.ExportedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    spared = step("llama")
    assert not decomposed
    monkeypatch.setattr(trace, "fast_trace", contextlib.nullcontext)
    assert _nodes(step("llama")) == _nodes(spared)
    assert decomposed


class Changes(torch.nn.Module):
    """Writes into a tensor of its own, as routers of experts do, or through a view of it."""

    def __init__(self, through_view: bool) -> None:
        super().__init__()
        self.through_view = through_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x)
        before = mask + x
        (mask.view(-1, 5) if self.through_view else mask).scatter_(1, x.argmax(1, keepdim=True), 1)
        scaled = x * 2
        scaled /= scaled.sum(1, keepdim=True)
        largest, _ = x.topk(5, 1)
        largest /= largest.sum(1, keepdim=True)
        return before + mask + scaled + largest.square()


@pytest.mark.parametrize("through_view", [False, True])
def test_only_writes_through_views_are_decomposed(
    decomposed: list[torch.export.ExportedProgram], through_view: bool
) -> None:
    # Positive rows: a sum near zero would magnify the rounding of its order, which differs between processors.
    module, x = Changes(through_view), torch.rand(2, 5)
    run = _said(module, x, ({0: torch.export.Dim("B")},))
    assert len(decomposed) == through_view
    x = torch.rand(3, 5)
    np.testing.assert_allclose(run(x), module(x).numpy(), rtol=1e-5)


class Sums(torch.nn.Module):
    """A loop whose body writes, converts and composes operators, as those of recurrent layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def add(total: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            half, other = row.contiguous().to(torch.float32).chunk(2, -1)
            total = total + half
            total += other
            return total, total.unflatten(-1, (1, 2)).flatten(-2) * 2

        return scan(add, x[0, :2] * 0, x)[1]


def test_bodies_of_loops_are_translated_whole(decomposed: list[torch.export.ExportedProgram]) -> None:
    module = Sums()
    run = _said(module, torch.randn(2, 4), ({0: torch.export.Dim("T")},))
    assert not decomposed
    x = torch.randn(5, 4)
    np.testing.assert_allclose(run(x), 2 * (x[:, :2] + x[:, 2:]).cumsum(0).numpy(), rtol=1e-5)


class Angles(torch.nn.Module):
    """A model's rotary embedding at the positions of a text."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rotary = model.model.rotary_emb

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.rotary(positions, positions)[0]


@pytest.mark.parametrize("grad", [False, True])
def test_equal_rows_of_positions_are_not_merged(decomposed: list[torch.export.ExportedProgram], grad: bool) -> None:
    """Where gradients are recorded, torch's own code turns them off in a body, which is to be taken apart."""
    model, positions = make_model("qwen3_5_text"), torch.arange(6.0)[None]
    module = Angles(model)
    expected = module(positions)
    take_one_position_row(model)
    with torch.set_grad_enabled(grad):
        run = _said(module, positions[:, :3], ({1: torch.export.Dim("T")},))
    assert len(decomposed) == grad
    np.testing.assert_allclose(run(positions), expected.numpy(), rtol=1e-5, atol=1e-6)


class Parts(torch.nn.Module):
    """Operators composed of others; five rows in ``chunks`` are two, two and one."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.dropout = torch.nn.Dropout().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *_, last = (
            x.unflatten(2, (2, x.shape[2] // 2)).flatten(0, 1).flatten(1).unflatten(0, (-1, 5)).chunk(self.chunks, 1)
        )
        return torch.cat([self.dropout(first).narrow(1, 1, 1), last], 1)


@pytest.mark.parametrize(("chunks", "whole"), [(3, True), (4, False)])
def test_composite_operators_are_translated_whole(
    decomposed: list[torch.export.ExportedProgram], chunks: int, whole: bool
) -> None:
    module = Parts(chunks)
    run = _said(module, torch.randn(2, 5, 6), ({0: torch.export.Dim("B"), 2: 2 * torch.export.Dim("half")},))
    assert len(decomposed) == (not whole)
    for batch, width in ((2, 6), (3, 8)):
        x = torch.randn(batch, 5, width)
        np.testing.assert_array_equal(run(x), module(x).numpy())
