"""Builds whose drafts are exported by a second process: the same bundles, the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specexport.contract.errors import BuildError
from specexport.contract.methods import read_methods
from specexport.contract.reading import read_manifest
from specexport.exporter import second_process
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.exporter.second_process import SecondProcess
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.exporter


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_process, "_cores", 2)


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    target = make_checkpoint(tmp_path / "target", "llama")
    draft = make_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1, max_position_embeddings=256)
    return {
        "target": str(target),
        "methods": read_methods(({"method": "draft_model", "model": str(draft)}, {"method": "lookahead"})),
        "max_seq_len": 192,
        "max_batch_size": 1,
    }


def _files(bundle: Path) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in read_manifest(bundle).files}


def test_the_bundle_is_the_same(asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(BuildOptions(output=tmp_path / "alone", **asked))
    steps: list[str] = []
    with SecondProcess(asked["methods"]) as second, monkeypatch.context() as patch:
        patch.setattr("specexport.exporter.methods.draft_model.write_draft", None)  # this process exports no draft
        build(BuildOptions(output=tmp_path / "both", **asked), lambda name, *_: steps.append(name), second=second)
    assert _files(tmp_path / "both") == _files(tmp_path / "alone")
    assert {"tracing the target", "tracing the draft", "writing the draft's weights (int8)"} <= {*steps}


def test_what_it_leaves_undone_is_done_here(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with SecondProcess(asked["methods"]) as second:
        build(BuildOptions(output=tmp_path / "out", **asked), second=second)
    assert any(name.startswith("draft/") for name in _files(tmp_path / "out"))


def test_what_it_refuses_is_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    asked["max_seq_len"] = 300
    with (
        pytest.raises(BuildError, match="was made for 256 positions; pass --max-seq-len 256"),
        SecondProcess(asked["methods"]) as second,
    ):
        build(BuildOptions(output=tmp_path / "out", **asked), second=second)
    assert {path.name for path in tmp_path.iterdir()} == {"target", "draft"}


def test_nothing_is_started_for_methods_without_a_graph() -> None:
    assert SecondProcess(read_methods(({"method": "ngram"},)))._process is None
