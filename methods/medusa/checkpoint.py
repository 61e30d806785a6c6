"""Medusa checkpoints in the layout of ``FasterDecoding/Medusa`` and in ours, which may share the model's head.

A folder holds ``config.json`` with ``medusa_num_heads`` and ``medusa_num_layers``, and the heads in
``medusa_lm_head.safetensors`` or ``medusa_lm_head.pt``; or it is a full model trained together with its heads
(Medusa-2), whose safetensors hold them under ``medusa_head.``. Ours set ``tie_lm_head: true`` if the heads end in the
model's own projection; then ``{i}.{layers}.weight`` is ``[H,H]`` instead of ``[V,H]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specexport.contract.errors import BuildError
from specexport.contract.tree import TokenTree
from specexport.exporter.checkpoints.accuracy import HeadAccuracy, MeasuredConfig, accuracy_config
from specexport.exporter.checkpoints.documents import CONFIG, read_config
from specexport.exporter.checkpoints.stored import StoredTensor, pickled_tensors, stored_tensors
from specexport.methods.medusa.graph import MedusaHeads

WEIGHTS = "medusa_lm_head"
COMPATIBLE = "fasterdecoding"
"""Subfolder with the heads in the layout of ``FasterDecoding/Medusa``."""

_PREFIX = "medusa_head."
_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_MAX_HEADS, _MAX_LAYERS = 16, 16


class _Config(MeasuredConfig, kw_only=True):
    """The fields read from ``config.json``; other keys, such as a full model's, are ignored."""

    medusa_num_heads: int | None = None
    medusa_num_layers: int | None = None
    tie_lm_head: bool = False
    medusa_choices: list[list[int]] | None = None


@dataclass(frozen=True)
class HeadsOutline:
    """The configuration of a checkpoint's heads.

    Attributes:
        path: the folder.
        count: number of heads.
        layers: residual blocks of each head.
        tied: whether they end in the model's own head.
        tree: the checkpoint's tree, if it has one.
        accuracy: of the heads, if training measured it.
    """

    path: Path
    count: int
    layers: int
    tied: bool
    tree: TokenTree | None
    accuracy: HeadAccuracy | None


def read_outline(folder: Path) -> HeadsOutline:
    """Reads the configuration of a folder's heads, without their weights.

    Raises:
        BuildError: a part is missing or malformed; names the file.
    """
    return _outline(folder, *_open(folder))


def _outline(folder: Path, stored: Mapping[str, StoredTensor], file: Path) -> HeadsOutline:
    path = folder / CONFIG
    if not path.is_file():
        raise BuildError(f"{folder}: no {CONFIG}; expected Medusa heads ({CONFIG} and {WEIGHTS}.safetensors or .pt)")
    config = read_config(path, _Config, "Medusa heads")
    matches = {name: _NAME.fullmatch(name) for name in stored}
    wrong = sorted(name for name, match in matches.items() if match is None)
    if wrong:
        raise BuildError(
            f"{file}: tensor {wrong[0]!r} is no part of Medusa heads; expected names such as '0.0.linear.weight' and "
            "'0.1.weight'"
        )
    in_file = 1 + max((int(match[1]) for match in matches.values() if match is not None), default=-1)
    of_first = sum(name.startswith("0.") and name.endswith(".linear.weight") for name in stored)
    heads = config.medusa_num_heads if config.medusa_num_heads is not None else in_file
    layers = config.medusa_num_layers if config.medusa_num_layers is not None else of_first
    if not 1 <= heads <= _MAX_HEADS or not 0 <= layers <= _MAX_LAYERS:
        raise BuildError(
            f"{path}: {heads} heads of {layers} layers; expected 1 to {_MAX_HEADS} heads of 0 to {_MAX_LAYERS} layers"
        )
    if heads > in_file:
        raise BuildError(f"{path}: medusa_num_heads is {heads}, but {file} holds {in_file} heads")
    tree, accuracy = _tree(path, config, heads), config.accuracy(path, heads, "heads")
    return HeadsOutline(folder, heads, layers, config.tie_lm_head, tree, accuracy)


def _tree(path: Path, config: _Config, heads: int) -> TokenTree | None:
    if config.medusa_choices is None:
        return None
    try:
        tree = TokenTree.from_choices(config.medusa_choices)
    except Exception as error:
        raise BuildError(f"{path}: medusa_choices: {error}") from error
    if tree.depth > heads:
        raise BuildError(f"{path}: medusa_choices go {tree.depth} deep, with {heads} heads")
    return tree


def load_medusa(folder: Path, *, hidden: int, vocab: int) -> MedusaHeads:
    """Loads heads for a model of this hidden size and vocabulary, in fp32 and evaluation mode.

    No code in the files is run: a ``.pt`` is read with ``weights_only=True``, and shapes are checked before any memory
    is allocated for them.

    Raises:
        BuildError: a tensor is missing, malformed, or of another model's shape; names the file and the tensor.
    """
    heads, stored, file = _fitting(folder, hidden, vocab)
    heads.load_state_dict({name: stored[name].finite(file) for name in heads.state_dict()}, assign=True)
    return heads.eval().requires_grad_(False)


def count_parameters(folder: Path, *, hidden: int, vocab: int) -> int:
    """The number of the heads' parameters, by file headers; refuses another model's heads, as :func:`load_medusa`."""
    heads, *_ = _fitting(folder, hidden, vocab)
    return sum(parameter.numel() for parameter in heads.parameters())


def _fitting(folder: Path, hidden: int, vocab: int) -> tuple[MedusaHeads, dict[str, StoredTensor], Path]:
    """Heads on the meta device, their stored tensors, and the file."""
    stored, file = _open(folder)
    outline = _outline(folder, stored, file)
    with torch.device("meta"):
        heads = MedusaHeads(outline.count, outline.layers, hidden, vocab, tied=outline.tied)
    for name, wanted in heads.state_dict().items():
        if name not in stored:
            raise BuildError(
                f"{file}: no tensor {name!r}; {folder / CONFIG} says {outline.count} heads of {outline.layers} layers"
                + (" that share the model's head" if outline.tied else "")
            )
        if stored[name].shape != tuple(wanted.shape):
            raise BuildError(
                f"{file}: tensor {name!r} is {list(stored[name].shape)}, expected {list(wanted.shape)} for a model of "
                f"hidden size {hidden} and {vocab} tokens; these heads were trained for another model"
            )
    return heads, stored, file


def _open(folder: Path) -> tuple[dict[str, StoredTensor], Path]:
    """The heads' tensors by the names of ``MedusaHeads``, and the file to name in errors."""
    if not folder.is_dir():
        raise BuildError(f"{folder}: no such folder; expected Medusa heads ({CONFIG} and {WEIGHTS}.safetensors or .pt)")
    single, pickled, file = folder / f"{WEIGHTS}.safetensors", folder / f"{WEIGHTS}.pt", folder
    if single.is_file():
        stored, file = stored_tensors(single), single
    elif pickled.is_file():
        stored, file = pickled_tensors(pickled), pickled
    else:
        every = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in stored_tensors(path)]
        stored = [tensor for tensor in every if tensor.name.startswith(_PREFIX)]
    if not stored:
        raise BuildError(
            f"{file}: no Medusa heads; expected {WEIGHTS}.safetensors, {WEIGHTS}.pt, or a full model whose "
            f"safetensors hold tensors named {_PREFIX}*"
        )
    return {tensor.name.removeprefix(_PREFIX): tensor for tensor in stored}, file


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
    """Writes heads in our layout and, in a subfolder, in that of ``FasterDecoding/Medusa``.

    Args:
        folder: created if missing.
        heads: the heads.
        lm_head: weight of the model's own head, ``[V,H]``; the compatible files of tied heads contain its product.
        base: name or folder of the model they were trained for.
        accuracy: of the heads, if measured.
        choices: the default tree.
        dtype: dtype of the stored tensors.
        compatible: write the subfolder, which for tied heads is many times larger than the rest.
    """
    config: dict[str, Any] = {"tie_lm_head": heads.tied, **accuracy_config(accuracy)}
    if choices is not None:
        config["medusa_choices"] = [list(path) for path in choices]
    _write_config(folder, heads, base, config)
    save_file(_state(heads, dtype), folder / f"{WEIGHTS}.safetensors", metadata={"format": "pt"})
    if compatible:
        save_compatible(folder / COMPATIBLE, heads, lm_head, base=base, dtype=dtype)


def save_compatible(
    folder: Path, heads: MedusaHeads, lm_head: torch.Tensor, *, base: str, dtype: torch.dtype = torch.float16
) -> None:
    """Writes heads in the layout of ``FasterDecoding/Medusa``, each with a projection; see :func:`save_medusa`."""
    full = _state(heads, dtype)
    if heads.tied:
        for head in range(len(heads)):
            name = f"{head}.{heads.layers}.weight"
            full[name] = (lm_head.detach().float() @ heads.state_dict()[name].float()).to(dtype)
    _write_config(folder, heads, base, {})
    with (folder / f"{WEIGHTS}.pt").open("wb") as file:
        torch.save(full, file)


def _state(heads: MedusaHeads, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(dtype).contiguous() for name, tensor in heads.state_dict().items()}


def _write_config(folder: Path, heads: MedusaHeads, base: str, more: dict[str, Any]) -> None:
    config = {
        "model_type": "medusa",
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "base_model_name_or_path": base,
        "hidden_size": heads.hidden,
        "vocab_size": heads.vocab,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config | more, indent=2) + "\n", encoding="utf-8")
