"""Bundles whose target ranks share, and which processes run those."""

import os
from pathlib import Path
from typing import Any

from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from tests.checkpoints import make_checkpoint


def split_bundle(root: Path, family: str, ranks: int, precision: str = "fp32", **options: Any) -> Path:
    """A bundle of a family's target, which so many ranks share, with a draft; both checkpoints are in ``root`` too."""
    bundle, target, draft = root / f"{family}-{ranks}-{precision}", root / family, root / f"{family}-draft"
    if not target.exists():
        make_checkpoint(target, family, num_key_value_heads=4)
        make_checkpoint(draft, family, seed=1)
    if not bundle.exists():
        methods = ({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3},)
        build(BuildOptions(str(target), bundle, methods, ranks, max_batch_size=2, precision=precision, **options))
    return bundle


def followers(parent: int | None = None) -> list[int]:
    """Processes that a process has started to run ranks."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if above == (parent or os.getpid()) and b"specexport.runtime.backends.follower" in words:
            pids.append(int(folder.name))
    return pids
