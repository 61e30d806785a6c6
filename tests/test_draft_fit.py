"""A draft that does not fit is refused by its configuration, before the target is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specexport.contract.errors import BuildError
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from tests.checkpoints import make_checkpoint, make_heads
from tests.ways import ways

DEMO = Path(__file__).resolve().parents[1] / "examples" / "models"
pytestmark = pytest.mark.exporter


@pytest.mark.parametrize("way", ["draft", "universal_draft", "draft_medusa"])
def test_a_draft_for_shorter_texts(tmp_path: Path, way: str) -> None:
    draft = make_checkpoint(tmp_path / "draft", "llama", seed=1, max_position_embeddings=128)
    methods: dict[str, Any] = {way: draft}
    if way == "draft_medusa":
        methods = {"draft": draft, way: make_heads(tmp_path / "heads", draft, 2, tied=True)}
    refused(tmp_path, f"is 256, but the draft {draft} was made for 128 positions", **methods)


@pytest.mark.parametrize(("folder", "flag"), [("eagle3", "--eagle3"), ("dflash", "--dflash"), ("medusa", "--medusa")])
def test_what_another_method_drafts_with(tmp_path: Path, folder: str, flag: str) -> None:
    refused(tmp_path, f"what another method drafts with; pass the folder with {flag}", draft=DEMO / f"demo-{folder}")


def test_heads_of_another_draft(tmp_path: Path) -> None:
    draft, other = (
        make_checkpoint(tmp_path / name, "llama", seed=1, hidden_size=size) for name, size in (("a", 64), ("b", 32))
    )
    heads = make_heads(tmp_path / "heads", other, 2, tied=True)
    refused(tmp_path, "heads of other sizes were trained for another model", draft=draft, draft_medusa=heads)


def refused(tmp_path: Path, message: str, **methods: Any) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", seed=0)
    steps: list[str] = []
    options = BuildOptions(target=str(target), output=tmp_path / "out", methods=ways(**methods), max_seq_len=256)
    with pytest.raises(BuildError, match=message):
        build(options, lambda step, done, total: steps.append(step))
    assert set(steps) <= {"loading the target"}
    assert not (tmp_path / "out").exists()
