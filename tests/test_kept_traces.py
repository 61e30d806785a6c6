"""Traces are kept: a second build needs none, and makes the same bundle; what is damaged or altered is traced anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.exporter import kept_traces, trace
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from tests.checkpoints import make_checkpoint, make_eagle3
from tests.test_streamed import hashes

pytestmark = pytest.mark.exporter

Make = Callable[..., dict[str, str]]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_traces, "cache_folder", lambda: tmp_path / "cache")
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
        return hashes(
            build(
                BuildOptions(
                    target=str(target), output=tmp_path / name, methods=methods, precision=precision, max_seq_len=64
                )
            )
        )

    return made


def small(folder: Path, **sizes: Any) -> Path:
    """A checkpoint of one layer, which is traced in half the time."""
    return make_checkpoint(folder, "llama", num_hidden_layers=1, **sizes)


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
    target = small(tmp_path / "target", vocab_size=4096)
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


def test_damaged_files_are_rewritten(tmp_path: Path, kept: Path, traced: list[str], make: Make) -> None:
    target = small(tmp_path / "target")
    first = make("first", target)
    (path,) = kept.glob("*.onnx")
    whole = path.read_bytes()
    for number, harmed in enumerate((whole[:-9], b"", b"0" + whole[1:]), start=2):
        path.write_bytes(harmed)
        assert make(f"build {number}", target) == first and len(traced) == number
        assert path.read_bytes() == whole


def test_nothing_is_kept_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: list[str], make: Make
) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    monkeypatch.setattr(kept_traces, "cache_folder", lambda: tmp_path / "cache")
    target = small(tmp_path / "target")
    assert make("first", target) == make("second", target) and len(traced) == 2


def test_the_oldest_go_first(tmp_path: Path, kept: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_traces, "MOST", 2)
    for size in (32, 64, 96):
        make(f"b{size}", small(tmp_path / f"c{size}", intermediate_size=size))
    assert len(list(kept.glob("*.onnx"))) == 2
