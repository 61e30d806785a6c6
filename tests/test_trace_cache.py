"""Traces are kept: a second build needs none, and makes the same bundle; what is damaged or altered is traced anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.exporter import trace, trace_cache
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from tests.checkpoints import make_checkpoint, make_eagle3
from tests.test_streamed import hashes

pytestmark = pytest.mark.exporter

Make = Callable[..., dict[str, str]]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trace_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "traces"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules that were traced, in order."""
    actual: list[str] = []
    export = torch.onnx.export

    def noted(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        actual.append(type(module).__name__)
        return export(module, *arguments, **named)

    monkeypatch.setattr(trace.torch.onnx, "export", noted)
    return actual


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Builds a bundle; the hashes of its files."""

    def made(name: str, target: Path, *methods: dict[str, Any], precision: Any = "fp32") -> dict[str, str]:
        where: dict[str, Any] = {"target": str(target), "output": tmp_path / name}
        return hashes(build(BuildOptions(**where, methods=methods, precision=precision, max_seq_len=64)))

    return made


def altered(folder: Path, to: Path, name: str) -> Path:
    """The checkpoint with other numbers in the tensors whose names end so."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    state = load_file(folder / "model.safetensors")
    state |= {key: 1.5 * tensor for key, tensor in state.items() if key.endswith(name)}
    save_file(state, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_second_build_traces_nothing_and_makes_the_same(
    tmp_path: Path, kept: Path, traced: list[str], make: Make
) -> None:
    target = make_checkpoint(tmp_path / "target", "gemma2", vocab_size=4096)  # its embedding is above the limit
    first = make("first", target, {"method": "self_draft", "layers": 1})
    times = len(traced)
    assert times == 2
    assert make("second", target, {"method": "self_draft", "layers": 1}) == first
    make("int8", target, {"method": "self_draft", "layers": 1}, precision="int8")
    assert len(traced) == times
    make("another method", target, {"method": "draft_model", "model": str(target)})
    assert traced[times:] == ["DraftPass"]


def test_loops_are_the_same_from_a_file(tmp_path: Path, kept: Path, traced: list[str], make: Make) -> None:
    target = make_checkpoint(tmp_path / "target", "llama")
    eagle3 = {"method": "eagle3", "model": str(make_eagle3(tmp_path / "draft", target))}
    first = make("first", target, eagle3, precision="int4")
    times = len(traced)
    assert make("second", target, eagle3, precision="int4") == first and len(traced) == times


def test_small_weights_are_a_part_of_a_trace_and_large_ones_are_read(
    tmp_path: Path, kept: Path, traced: list[str], make: Make
) -> None:
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


def test_damaged_files_are_rewritten(kept: Path) -> None:
    small = Small()
    first = small.graph()
    (path,) = kept.glob("*.onnx")
    whole = path.read_bytes()
    assert small.graph() == first and small.times == 1
    for number, harmed in enumerate((whole[:-9], b"", b"0" + whole[1:]), start=2):
        path.write_bytes(harmed)
        assert small.graph() == first and small.times == number
        assert path.read_bytes() == whole


def test_nothing_is_kept_where_nothing_can_be_written(kept: Path) -> None:
    kept.parent.write_text("a file", encoding="utf-8")
    small = Small()
    assert small.graph() == small.graph() and small.times == 2


def test_the_oldest_go_first(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "MOST", 2)
    small = Small()
    for about in (1, 2, 3):
        small.graph(about)
        time.sleep(0.01)  # times of files are as coarse as the kernel's clock
    small.graph(3), small.graph(2)
    assert small.times == 3
    small.graph(1)
    assert small.times == 4 and len(list(kept.glob("*.onnx"))) == 2
