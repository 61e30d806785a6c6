"""The bundles of the dry run: ``kind-precision-lowering``, built for onnxruntime-cuda from tiny checkpoints."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from filelock import FileLock

from specexport.contract.engines import EngineRuntime
from specexport.contract.model import LoweredAs
from specexport.contract.tree import TokenTree
from specexport.exporter.options import BuildOptions, CompileOptions
from tests.checkpoints import (
    GROUPED,
    VOCAB,
    make_checkpoint,
    make_dflash,
    make_eagle3,
    make_heads,
    make_mtp,
    make_speculator,
)
from tests.make_bundles import built_once, reversed_tokenizer, texts, way

BACKEND: EngineRuntime = "onnxruntime-cuda"
SLOTS = (1, 4)
_TREE = TokenTree.from_choices([[0], [1], [0, 0]])
_STAGES = 2
# Heads as wide as fused attention knows; two layers, of which one can draft.
_CONFIG: dict[str, Any] = {"head_dim": 64, "intermediate_size": 128, "max_position_embeddings": 256}

# A mixture of experts, whose checkpoint holds an MTP layer behind its own.
_EXPERTS: dict[str, Any] = {
    **GROUPED,
    **_CONFIG,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
}

_PRECISIONS = ("fp32", "fp16", "int8", "int4")
_MIXED = [pair for pair in itertools.product(_PRECISIONS, get_args(LoweredAs)) if pair != ("int4", "portable")]
"""Every precision with every lowering, but for what cannot be stored."""
CHOSEN: tuple[tuple[str, int], ...] = (
    ("hybrid-fp32-native", 1),
    ("hybrid-fp32-portable", 4),
    ("hybrid-fp16-native", 4),
    ("hybrid-fp16-portable", 1),
    ("hybrid-int8-native", 4),
    ("hybrid-int8-portable", 1),
    ("hybrid-int4-native", 4),
    ("medusa_draft-fp16-native", 1),
    ("medusa_draft-int8-portable", 4),
    ("universal_draft-fp32-portable", 4),
    ("universal_draft-int4-native", 1),
    ("mtp-int8-native", 1),
    ("mtp-int8-native", 4),
    ("split-fp16-native", 4),
    ("split-int4-native", 1),
    ("split-int8-portable", 4),
    ("draft_model-fp32-native", 1),
    ("draft_model-int8-native", 4),
    ("eagle3-int8-native", 1),
    ("dflash-int8-native", 4),
    ("medusa-fp16-portable", 1),
    ("mlp_speculator-int4-native", 4),
    ("self_draft-int8-portable", 1),
    ("plain-fp16-native", 1),
)
"""Bundles and slots. Every precision, lowering, method and number of slots meets every other: the hybrid has
all methods that one bundle can have together, so with every precision and lowering it meets all pairs; of the two
methods that need another draft every precision is there. Bundles of one method have other widths than the hybrid."""


def cells() -> tuple[tuple[str, int], ...]:
    """Those chosen, or with ``SPECEXPORT_DRY_RUN=full`` the whole product."""
    if os.environ.get("SPECEXPORT_DRY_RUN") != "full":
        return CHOSEN
    names = [f"{kind}-{precision}-{lowering}" for kind in KINDS for precision, lowering in _MIXED]
    return tuple(itertools.product(names, SLOTS))


def make(name: str, root: Path) -> Path:
    """The bundle of a name in ``root``, which processes may share; made if it is not there yet."""
    return built_once(root / name, lambda: _options(name, root))


def _options(name: str, root: Path) -> BuildOptions:
    with FileLock(root / ".checkpoints.lock"):
        if not (root / "checkpoints").exists():
            _checkpoints(root)
    kind, precision, lowering = name.split("-")
    return BuildOptions(
        str(root / "checkpoints" / ("experts" if kind == "mtp" else "target")),
        root / name,
        methods=methods(kind, root / "checkpoints"),
        precision=precision,
        lowering=lowering,
        # A draft of its own precision, but for the product's default: int8.
        draft_precision=None if kind == "draft_model" else precision,
        max_seq_len=128,
        max_batch_size=max(SLOTS),
        backend=BACKEND,
        tensor_parallel=2 if kind == "split" else 1,
        engines=CompileOptions(BACKEND),
    )


def _methods(checkpoints: Path) -> dict[str, Sequence[dict[str, Any]]]:
    """What each kind of bundle is built with; ways to look text up are in every bundle."""
    draft, heads, stages, eagle3, dflash = (
        {"model": str(checkpoints / name)} for name in ("draft", "heads", "speculator", "eagle3", "dflash")
    )
    tree = {"trees": [_TREE]}
    return {
        "hybrid": [
            way("draft_model", **draft, **tree),
            way("eagle3", **eagle3, **tree),
            way("dflash", **dflash, **tree),
            way("medusa", **heads, **tree),
            way("mlp_speculator", _STAGES, **stages),
            way("self_draft", 2, layers=1),
            *texts(3),
            way("lookahead", preset="2,2,2"),
        ],
        "medusa_draft": [way("medusa_draft", 3, **draft, medusa=str(checkpoints / "draft-heads"))],
        "universal_draft": [way("universal_draft", 2, model=str(checkpoints / "other"))],
        "draft_model": [way("draft_model", 4, 2, **draft)],
        "eagle3": [way("eagle3", 3, **eagle3)],
        "dflash": [way("dflash", 3, **dflash)],
        "mtp": [way("mtp", 3)],
        "medusa": [way("medusa", _STAGES, **heads)],
        "mlp_speculator": [way("mlp_speculator", **stages, **tree)],
        "self_draft": [way("self_draft", layers=1, **tree)],
        "plain": [],
        "split": [way("draft_model", 3, **draft)],
    }


def methods(kind: str, checkpoints: Path) -> Sequence[dict[str, Any]]:
    """What a kind of bundle is built with."""
    return _methods(checkpoints)[kind]


KINDS = tuple(_methods(Path()))


def _checkpoints(root: Path) -> None:
    part = root / ".checkpoints"
    target = make_checkpoint(part / "target", "qwen3", **_CONFIG)
    make_heads(part / "heads", target, _STAGES, tied=True)
    make_speculator(part / "speculator", target, _STAGES)
    make_eagle3(part / "eagle3", target, states=(0, 1), size=_CONFIG["head_dim"])
    make_dflash(part / "dflash", target, size=_CONFIG["head_dim"])
    make_mtp(part / "experts", "glm4_moe", **_EXPERTS)
    draft = make_checkpoint(part / "draft", "qwen3", seed=1, num_hidden_layers=1, **_CONFIG)
    make_heads(part / "draft-heads", draft, _STAGES, tied=True)
    other = make_checkpoint(part / "other", "qwen3", seed=2, num_hidden_layers=1, **_CONFIG)
    reversed_tokenizer(VOCAB).save_pretrained(other)
    part.rename(root / "checkpoints")
