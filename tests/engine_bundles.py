"""Small bundles for TensorRT-RTX: ``precision-lowering-method``, written without engines and compiled by the tests."""

from pathlib import Path
from typing import Any

from filelock import FileLock

from specexport.contract.tree import TokenTree
from specexport.exporter.options import BuildOptions
from tests.checkpoints import make_checkpoint, make_heads
from tests.make_bundles import built_once

SPINE = TokenTree.from_choices([[0], [1], [0, 0]])

# One layer, and heads as large as fused kernels know: compiling takes seconds.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}


def make(name: str, root: Path) -> Path:
    """The bundle of a name in ``root``, which processes may share; made if it is not there yet."""
    return built_once(root / name, lambda: _options(name, root))


def _options(name: str, root: Path) -> BuildOptions:
    precision, lowering, method = name.split("-")
    target, heads = root / "target", root / "heads"
    with FileLock(root / ".checkpoints.lock"):
        if not heads.exists():
            make_heads(heads, make_checkpoint(target, "qwen3", **SMALL), 2, tied=True)
    draft: dict[str, Any] = {"method": "draft_model", "model": str(target)}
    methods: dict[str, Any] = {
        "draft": {**draft, "trees": [SPINE]},
        "medusa": f"medusa:{heads},num_speculative_tokens=4",
        "ngram": "ngram:3",
        "both": ({**draft, "num_speculative_tokens": 3}, f"medusa:{heads},num_speculative_tokens=3"),
        "batch": {**draft, "trees": [SPINE]},
        "plain": (),
    }
    return BuildOptions(
        str(target),
        root / name,
        methods=methods[method],
        precision=precision,
        draft_precision=precision,
        lowering=lowering,
        max_seq_len=192,
        max_batch_size=4 if method == "batch" else 1,
        backend="tensorrt-rtx",
    )
