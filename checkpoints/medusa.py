"""Medusa checkpoints: those of ``FasterDecoding/Medusa``, and our own, which may share the model's head.

A folder holds ``config.json`` with ``medusa_num_heads`` and ``medusa_num_layers``, and the heads in
``medusa_lm_head.safetensors`` or ``medusa_lm_head.pt``; or it is a full model trained together with its heads
(Medusa-2), whose safetensors hold them under ``medusa_head.``. Ours say ``tie_lm_head: true`` where the heads end in
the model's own projection, so that ``{i}.{layers}.weight`` is ``[H,H]`` instead of ``[V,H]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors.torch import save_file

from specexport.checkpoints.stored import StoredTensors, stored_names
from specexport.contract.errors import BuildError
from specexport.contract.tree import TokenTree
from specexport.graphs.medusa import MAX_TOP_K, MedusaHeads

CONFIG = "config.json"
WEIGHTS = "medusa_lm_head"
COMPATIBLE = "fasterdecoding"
"""Subfolder with the heads as ``FasterDecoding/Medusa`` reads them."""

_PREFIX = "medusa_head."
_KEY = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_MAX_CONFIG = 1 << 20
_MAX_HEADS, _MAX_LAYERS = 16, 16


_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOP_K)]


class _Config(msgspec.Struct):
    """What is read of ``config.json``; other keys, such as a full model's, are left alone."""

    medusa_num_heads: int | None = None
    medusa_num_layers: int | None = None
    base_model_name_or_path: str | None = None
    tie_lm_head: bool = False
    medusa_choices: list[list[int]] | None = None
    head_accuracy: list[list[_Share]] | None = None
    path_accuracy: list[tuple[list[_Rank], _Share]] | None = None


@dataclass(frozen=True)
class HeadAccuracy:
    """How often heads are right over text they were not trained on.

    Attributes:
        ranks: share of tokens that are each head's rank-r candidate, ``[heads][ranks]``.
        paths: the most frequent paths of ranks, each with the share of positions after which its first heads were right
            with those ranks, all of them: what token trees are chosen by. Heads are right together and wrong together,
            so that products of ``ranks`` would misjudge them.
    """

    ranks: Sequence[Sequence[float]]
    paths: Mapping[tuple[int, ...], float]


@dataclass(frozen=True)
class HeadsOutline:
    """What a checkpoint says of its heads.

    Attributes:
        path: the folder.
        count: how many.
        layers: residual blocks of each.
        tied: whether they end in the model's own head.
        tree: the tree the checkpoint asks for, if it names one.
        accuracy: how often they are right, if training measured it.
    """

    path: Path
    count: int
    layers: int
    tied: bool
    tree: TokenTree | None
    accuracy: HeadAccuracy | None


def read_outline(folder: Path) -> HeadsOutline:
    """Reads what heads a folder holds, without reading the heads.

    Raises:
        BuildError: something is missing or malformed; names the file.
    """
    return _outline(folder, *_open(folder))


def _outline(folder: Path, weights: StoredTensors, path: Path) -> HeadsOutline:
    config = _read_config(folder)
    keys = {_stripped(name): _KEY.fullmatch(_stripped(name)) for name in weights.names()}
    wrong = sorted(name for name, match in keys.items() if match is None)
    if wrong:
        raise BuildError(
            f"{path}: tensor {wrong[0]!r} is no part of Medusa heads; expected names such as '0.0.linear.weight' and "
            "'0.1.weight'"
        )
    in_file = 1 + max((int(match[1]) for match in keys.values() if match is not None), default=-1)
    heads = config.medusa_num_heads if config.medusa_num_heads is not None else in_file
    layers = config.medusa_num_layers if config.medusa_num_layers is not None else _layers(keys)
    if not 1 <= heads <= _MAX_HEADS or not 0 <= layers <= _MAX_LAYERS:
        raise BuildError(
            f"{folder / CONFIG}: {heads} heads of {layers} layers; expected 1 to {_MAX_HEADS} heads of 0 to "
            f"{_MAX_LAYERS} layers"
        )
    if heads > in_file:
        raise BuildError(f"{folder / CONFIG}: medusa_num_heads is {heads}, but {path} holds {in_file} heads")
    return HeadsOutline(
        folder, heads, layers, config.tie_lm_head, _tree(folder, config, heads), _accuracy(folder, config, heads)
    )


def load_medusa(folder: Path, *, hidden: int, vocab: int) -> MedusaHeads:
    """Reads heads for a model, in fp32 and for evaluation.

    Nothing in the files is run: a ``.pt`` is read with ``weights_only=True``, and shapes are checked before anything
    is allocated for them.

    Args:
        folder: see the module.
        hidden: the model's hidden size.
        vocab: width of its logits.

    Raises:
        BuildError: something is missing, malformed, or made for another model; names the file and the tensor.
    """
    weights, path = _open(folder)
    outline = _outline(folder, weights, path)
    found = {_stripped(name): name for name in weights.names()}
    with torch.device("meta"):
        made = MedusaHeads(outline.count, outline.layers, hidden, vocab, tied=outline.tied)
    state = {}
    for name, wanted in made.state_dict().items():
        if name not in found:
            raise BuildError(
                f"{path}: no tensor {name!r}; {folder / CONFIG} says {outline.count} heads of {outline.layers} layers"
                + (" that share the model's head" if outline.tied else "")
            )
        shape = weights.shape(found[name])
        if shape != tuple(wanted.shape):
            raise BuildError(
                f"{path}: tensor {name!r} is {list(shape)}, expected {list(wanted.shape)} for a model of hidden size "
                f"{hidden} and {vocab} tokens; these heads were trained for another model"
            )
        state[name] = weights.read(found[name]).to(torch.float32)
    bad = next((name for name, tensor in state.items() if not bool(tensor.isfinite().all())), None)
    if bad is not None:
        raise BuildError(f"{path}: tensor {bad!r} holds numbers that are not finite; train the heads again")
    made.load_state_dict(state, assign=True)
    return made.eval().requires_grad_(False)


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise BuildError(f"{folder}: no such folder; expected Medusa heads ({CONFIG} and {WEIGHTS}.safetensors or .pt)")


def _read_config(folder: Path) -> _Config:
    path = folder / CONFIG
    if not path.is_file():
        raise BuildError(f"{folder}: no {CONFIG}; expected Medusa heads ({CONFIG} and {WEIGHTS}.safetensors or .pt)")
    if path.stat().st_size > _MAX_CONFIG:
        raise BuildError(f"{path}: {path.stat().st_size} bytes; expected at most {_MAX_CONFIG}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except msgspec.MsgspecError as error:
        raise BuildError(f"{path}: not a configuration of Medusa heads: {error}") from error


def _tree(folder: Path, config: _Config, heads: int) -> TokenTree | None:
    if config.medusa_choices is None:
        return None
    try:
        tree = TokenTree.from_choices(config.medusa_choices)
    except Exception as error:
        raise BuildError(f"{folder / CONFIG}: medusa_choices: {error}") from error
    if int(tree.depths.max()) > heads:
        raise BuildError(f"{folder / CONFIG}: medusa_choices go {int(tree.depths.max())} deep, with {heads} heads")
    return tree


def _accuracy(folder: Path, config: _Config, heads: int) -> HeadAccuracy | None:
    if config.head_accuracy is None or config.path_accuracy is None:
        return None
    paths = {tuple(path): share for path, share in config.path_accuracy}
    if len(config.head_accuracy) != heads or any(not 1 <= len(path) <= heads for path in paths):
        raise BuildError(
            f"{folder / CONFIG}: head_accuracy and path_accuracy: expected shares of {heads} heads, and of paths that "
            "are at most as long"
        )
    return HeadAccuracy(config.head_accuracy, paths)


def accuracy_config(accuracy: HeadAccuracy) -> dict[str, Any]:
    """What ``config.json`` says of it."""
    return {
        "head_accuracy": [[round(float(share), 5) for share in row] for row in accuracy.ranks],
        "path_accuracy": [[list(path), round(float(share), 5)] for path, share in accuracy.paths.items()],
    }


def _stripped(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _layers(keys: Mapping[str, re.Match[str] | None]) -> int:
    """Residual blocks of head 0."""
    return len([name for name in keys if name.startswith("0.") and name.endswith(".linear.weight")])


class _Loaded(StoredTensors):
    """Tensors of a ``.pt``; mapped, so that what is not asked for is not read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _open(folder: Path) -> tuple[StoredTensors, Path]:
    """The heads' tensors and the file to name when something is wrong with them."""
    _require_folder(folder)
    single, pickled = folder / f"{WEIGHTS}.safetensors", folder / f"{WEIGHTS}.pt"
    if single.is_file():
        return StoredTensors(dict.fromkeys(stored_names(single), single)), single
    if pickled.is_file():
        return _Loaded(_unpickled(pickled)), pickled
    files = {
        name: path
        for path in sorted(folder.glob("*.safetensors"))
        for name in stored_names(path)
        if name.startswith(_PREFIX)
    }
    if not files:
        raise BuildError(
            f"{folder}: no Medusa heads; expected {WEIGHTS}.safetensors, {WEIGHTS}.pt, or a full model whose "
            f"safetensors hold tensors named {_PREFIX}*"
        )
    return StoredTensors(files), folder


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle and zip errors of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BuildError(
            f"{path}: refused: only plain tensors are read from a .pt, as anything else could run code ({reason}). "
            "Convert it to safetensors where you trust it"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise BuildError(f"{path}: holds {type(loaded).__name__}; expected a dictionary of tensors by name")
    return loaded


def save_medusa(
    folder: Path,
    heads: MedusaHeads,
    lm_head: torch.Tensor,
    *,
    base: str,
    accuracy: HeadAccuracy | None = None,
    choices: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype = torch.float16,
    compatible: bool = True,
) -> None:
    """Writes heads, both as we read them and, in a subfolder, as ``FasterDecoding/Medusa`` does.

    Args:
        folder: made if it is not there.
        heads: the heads.
        lm_head: weight of the model's own head, ``[V,H]``, which tied heads are multiplied with in compatible files.
        base: name or folder of the model they were trained for.
        accuracy: of the heads, if it was measured.
        choices: the tree to use by default.
        dtype: of the stored tensors.
        compatible: write the subfolder, which for tied heads is many times larger than the rest.
    """
    own: dict[str, Any] = {"tie_lm_head": heads.tied}
    if accuracy is not None:
        own |= accuracy_config(accuracy)
    if choices is not None:
        own["medusa_choices"] = [list(path) for path in choices]
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().to(dtype).contiguous() for name, tensor in heads.state_dict().items()}
    save_file(state, folder / f"{WEIGHTS}.safetensors", metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_described(heads, base) | own, indent=2) + "\n", encoding="utf-8")
    if compatible:
        save_compatible(folder / COMPATIBLE, heads, lm_head, base=base, dtype=dtype)


def save_compatible(
    folder: Path, heads: MedusaHeads, lm_head: torch.Tensor, *, base: str, dtype: torch.dtype = torch.float16
) -> None:
    """Writes heads as ``FasterDecoding/Medusa`` reads them, each with its own projection; see :func:`save_medusa`."""
    full = {name: tensor.detach().to(dtype).contiguous() for name, tensor in heads.state_dict().items()}
    if heads.tied:
        for head in range(len(heads)):
            name = f"{head}.{heads.layers}.weight"
            factor = heads.state_dict()[name].float()
            full[name] = (lm_head.detach().float() @ factor).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(full, folder / f"{WEIGHTS}.pt")
    (folder / CONFIG).write_text(json.dumps(_described(heads, base), indent=2) + "\n", encoding="utf-8")


def _described(heads: MedusaHeads, base: str) -> dict[str, Any]:
    """What every form of the heads' ``config.json`` says."""
    return {
        "model_type": "medusa",
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "base_model_name_or_path": base,
        "hidden_size": heads.hidden,
        "vocab_size": heads.vocab,
    }
