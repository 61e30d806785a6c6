"""Traces are kept and made fast: a second build needs none; what is damaged or altered is traced anew."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file
from torch._higher_order_ops.scan import scan

from specexport.exporter import trace, trace_cache
from specexport.exporter.build import build
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.fast_trace import fast_trace
from specexport.exporter.options import BuildOptions
from specexport.graphs.rotary import take_one_position_row
from specexport.graphs.step import StepModule
from tests.checkpoints import changed, make_checkpoint, make_eagle3, make_model
from tests.test_weights import hashes

pytestmark = pytest.mark.exporter

Make = Callable[..., dict[str, str]]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trace_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "traces"


@pytest.fixture
def traced(spy: Callable[..., list[str]]) -> list[str]:
    """Modules that were traced, in order."""
    return spy(torch.onnx, "export", lambda module, *_, **__: type(module).__name__)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Builds a bundle; the hashes of its files."""

    def made(name: str, target: Path, *methods: dict[str, Any], precision: Any = "fp32") -> dict[str, str]:
        where: dict[str, Any] = {"target": str(target), "output": tmp_path / name}
        return hashes(build(BuildOptions(**where, methods=methods, precision=precision, max_seq_len=64)))

    return made


def altered(folder: Path, to: Path, name: str) -> Path:
    """The checkpoint with other numbers in the tensors whose names end so."""
    state = load_file(folder / "model.safetensors")
    changed(copytree(folder, to), {key: 1.5 * tensor for key, tensor in state.items() if key.endswith(name)})
    return to


def test_a_second_build_traces_nothing_and_makes_the_same(tmp_path, kept, traced, make):
    target = make_checkpoint(tmp_path / "target", "gemma2", vocab_size=4096)  # its embedding is above the limit
    first = make("first", target, {"method": "self_draft", "layers": 1})
    times = len(traced)
    assert times == 2
    assert make("second", target, {"method": "self_draft", "layers": 1}) == first
    make("int8", target, {"method": "self_draft", "layers": 1}, precision="int8")
    assert len(traced) == times
    make("another method", target, {"method": "draft_model", "model": str(target)})
    assert traced[times:] == ["DraftPass"]


def test_loops_are_the_same_from_a_file(tmp_path, kept, traced, make):
    target = make_checkpoint(tmp_path / "target", "llama")
    eagle3 = {"method": "eagle3", "model": str(make_eagle3(tmp_path / "draft", target))}
    first = make("first", target, eagle3, precision="int4")
    times = len(traced)
    assert make("second", target, eagle3, precision="int4") == first and len(traced) == times


def test_small_weights_are_a_part_of_a_trace_and_large_ones_are_read(tmp_path, kept, traced, make):
    target = make_checkpoint(tmp_path / "target", "llama", num_hidden_layers=1, vocab_size=4096)
    make("first", target)
    assert traced == ["StepModule"]
    other = altered(target, tmp_path / "embeds", "embed_tokens.weight")
    from_file = make("from a file", other)
    assert traced == ["StepModule"]
    make("other norms", altered(target, tmp_path / "norms", "norm.weight"))
    assert traced == ["StepModule"] * 2
    for path in kept.iterdir():
        path.unlink()
    assert make("anew", other) == from_file and len(traced) == 3


class Small:
    """A module whose graph adds its only weight; counts how often it is traced."""

    def __init__(self) -> None:
        self.module = torch.nn.Module()
        self.module.weight = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.times = 0

    def graph(self, *about: object) -> bytes:
        return ir.to_proto(trace_cache.cached_trace(self.module, about, self._trace)).SerializeToString()

    def _trace(self) -> ir.Model:
        self.times += 1
        return ir.from_onnx_text(
            '<ir_version: 10, opset_import: ["" : 23]> g (float[4] x) => (float[4] y)'
            " <float[4] weight = {0, 1, 2, 3}> { y = Add(x, weight) }"
        )


def test_damaged_files_are_rewritten(kept):
    small = Small()
    first = small.graph()
    (path,) = kept.glob("*.onnx")
    whole = path.read_bytes()
    assert small.graph() == first and small.times == 1
    for number, harmed in enumerate((whole[:-9], b"", b"0" + whole[1:]), start=2):
        path.write_bytes(harmed)
        assert small.graph() == first and small.times == number
        assert path.read_bytes() == whole


def test_nothing_is_kept_where_nothing_can_be_written(kept):
    kept.parent.write_text("a file", encoding="utf-8")
    small = Small()
    assert small.graph() == small.graph() and small.times == 2


def test_the_oldest_go_first(kept, monkeypatch):
    monkeypatch.setattr(trace_cache, "MOST", 2)
    small = Small()
    for about in (1, 2, 3):
        small.graph(about)
        time.sleep(0.01)  # times of files are as coarse as the kernel's clock
    small.graph(3), small.graph(2)
    assert small.times == 3
    small.graph(1)
    assert small.times == 4 and len(list(kept.glob("*.onnx"))) == 2


# --- decomposing ------------------------------------------------------------------------------------------------------


Trace = Callable[[str], ir.Model]


@pytest.fixture
def decomposed(spy: Callable[..., list[Any]]) -> list[torch.export.ExportedProgram]:
    """Programs that were decomposed."""
    return spy(torch.export.ExportedProgram, "run_decompositions", lambda program, *_, **__: program)


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


def test_decomposing_would_change_nothing(step, decomposed, monkeypatch):
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
def test_only_writes_through_views_are_decomposed(decomposed, through_view):
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


def test_bodies_of_loops_are_translated_whole(decomposed):
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
def test_equal_rows_of_positions_are_not_merged(decomposed, grad):
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
def test_composite_operators_are_translated_whole(decomposed, chunks, whole):
    module = Parts(chunks)
    run = _said(module, torch.randn(2, 5, 6), ({0: torch.export.Dim("B"), 2: 2 * torch.export.Dim("half")},))
    assert len(decomposed) == (not whole)
    for batch, width in ((2, 6), (3, 8)):
        x = torch.randn(batch, 5, width)
        np.testing.assert_array_equal(run(x), module(x).numpy())
