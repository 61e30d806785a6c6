"""The benchmark-size pair and its bundles, created once and kept in a cache folder."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.inflate import DRAFT_WIDTH_PER_LAYER, WIDTH_PER_LAYER, inflate, inflate_heads
from specexport.building import damage, progress_bars
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions

TARGET_PARAMETERS, DRAFT_PARAMETERS = 290e6, 25e6
MAX_POSITIONS = 8192
"""Positions of the inflated models; rotary embeddings need no table, so a long context costs nothing."""


Inflate = Callable[[Path, Path, Path, Path], None]
Sizes = Mapping[str, tuple[float, int]]
"""Parameters and width per layer of the enlarged models, by the name of the small one."""
SIZES: Sizes = {
    "demo-target": (TARGET_PARAMETERS, WIDTH_PER_LAYER),
    "demo-draft": (DRAFT_PARAMETERS, DRAFT_WIDTH_PER_LAYER),
}


def inflated_pair(models: Path, work: Path, seed: int = 0, sizes: Sizes = SIZES) -> tuple[Path, Path]:
    """The demo pair, enlarged to benchmark size without changing what it computes; see ``benchmarks.inflate``.

    Args:
        models: holds ``demo-target`` and ``demo-draft``.
        work: where the large models are kept, under the digest of the small ones.
        seed: of the added weights.
        sizes: of the large ones.
    """
    folders = []
    for name, (parameters, width_per_layer) in sizes.items():
        digest = hashlib.sha256((models / name / "model.safetensors").read_bytes()).hexdigest()[:12]
        out = work / f"{name}-{parameters / 1e6:.0f}M-w{width_per_layer}-{digest}"
        if not (out / "done").exists():
            print(f"inflating {models / name} to {parameters / 1e6:.0f} M parameters", file=sys.stderr)
            inflate(models / name, out, params=parameters, seed=seed, width_per_layer=width_per_layer)
            config = json.loads((out / "config.json").read_text())
            config["max_position_embeddings"] = MAX_POSITIONS
            (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (out / "done").touch()
        folders.append(out)
    return folders[0], folders[1]


def _digest(*folders: Path) -> str:
    """A name for the content of checkpoints: their configurations, and both ends of their weights."""
    digest = hashlib.sha256()
    for folder in folders:
        digest.update((folder / "config.json").read_bytes())
        with (folder / "model.safetensors").open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(-min(1 << 20, file.seek(0, 2)), 2)
            digest.update(file.read())
    return digest.hexdigest()[:8]


def inflated_heads(models: Path, name: str, large: Path, work: Path) -> Path:
    """The Medusa heads of a demo model, enlarged with it.

    Args:
        models: holds the heads and ``demo-target`` or ``demo-draft``, whose name the enlarged model's begins with.
        name: of the heads' folder.
        large: the enlarged model.
        work: where they are kept.
    """
    digest = hashlib.sha256((models / name / "medusa_lm_head.safetensors").read_bytes()).hexdigest()[:12]
    out = work / f"{name}-{large.name.partition('-w')[0].rpartition('-')[2]}-{digest}"
    if not (out / "config.json").exists():
        inflate_heads(models / name, out, models / "-".join(large.name.split("-")[:2]), large)
    return out


def inflated_draft(source: Path, models: Path, large: Path, work: Path, inflate: Inflate) -> Path:
    """A draft of the demo target, enlarged with it.

    Args:
        source: its folder.
        models: holds ``demo-target``.
        large: that, enlarged.
        work: where it is kept.
        inflate: of ``benchmarks.inflate``, for an MLP speculator or an EAGLE-3 or DFlash draft.
    """
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()[:12]
    out = work / f"{source.name}-{large.name.partition('-w')[0].rpartition('-')[2]}-{digest}"
    if not (out / "config.json").exists():
        inflate(source, out, models / "demo-target", large)
    return out


def bundle(
    target: Path,
    draft: Path,
    work: Path,
    precision: str,
    choices: tuple[int, ...],
    max_seq_len: int,
    block_size: int = 128,
    draft_precision: str | None = None,
) -> Path:
    """A bundle of the pair, with chains of draft tokens, built if it does not exist; floats have no blocks."""
    name = f"{target.name}-{_digest(target, draft)}"
    weights = f"{precision}-{draft_precision}" if draft_precision else precision
    out = work / f"{name}.{weights}.b{block_size}.k{'-'.join(map(str, choices))}.s{max_seq_len}.x8"
    return built(
        out,
        target,
        methods=({"method": "draft_model", "model": str(draft), "num_speculative_tokens": choices},),
        precision=precision,
        draft_precision=draft_precision,
        max_seq_len=max_seq_len,
        block_size=block_size if precision in ("int8", "int4") else None,
    )


def built(out: Path, target: Path, **options: Any) -> Path:
    """A bundle with these options, built unless there is an intact one of this version's format."""
    if damage(out, check_hashes=False):
        print(f"building {out}", file=sys.stderr)
        with progress_bars() as progress:
            build(BuildOptions(target=str(target), output=out, overwrite=True, **options), progress)
    return out
