"""DFlash checkpoints in the layouts of ``z-lab`` and of the ``speculators`` library.

A folder holds ``config.json`` and safetensors: ``fc.weight``, ``hidden_norm.weight``, ``norm.weight`` and a Qwen3's
decoder layers ``layers.{i}.*``; see :mod:`specexport.methods.hidden_states.checkpoint` for the rest. Embedding and head
are the target's; a draft with a smaller vocabulary has its own head.

z-lab describes the layers at the top level of the configuration, and the block there or in ``dflash_config``;
speculators describes the layers in ``transformer_layer_config``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from msgspec import Meta
from safetensors.torch import save_file

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.documents import CONFIG, SINGLE, read_config
from specexport.exporter.checkpoints.locate import locate
from specexport.methods.dflash.graph import DFlashDraft, DFlashShape
from specexport.methods.dflash.spec import MAX_BLOCK
from specexport.methods.hidden_states.checkpoint import (
    EMBEDDING,
    HEAD,
    Layer,
    OwnFilesOutline,
    Size,
    States,
    layer_config,
)

_BLOCK = 16
"""The default block size in tokens."""
_Block = Annotated[int, Meta(ge=2, le=MAX_BLOCK)]
_Token = Annotated[int, Meta(ge=0, le=2**24)]
_Above = Annotated[float, Meta(gt=0.0, le=1e6)]


class _Drafting(msgspec.Struct, kw_only=True):
    """Fields of z-lab's configurations, in ``dflash_config`` or at the top level."""

    block_size: _Block | None = None
    mask_token_id: _Token | None = None
    target_layer_ids: States | None = None
    input_embedding_scale: _Above | None = None
    output_multiplier: _Above | None = None
    final_logit_softcapping: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None


class _Nested(_Drafting, kw_only=True):
    causal: bool | None = None
    use_swa: bool = False
    use_aux_hidden_state: bool = True


class _Config(_Drafting, kw_only=True):
    """The fields read from ``config.json``, except those of the layers; other keys are ignored."""

    dflash_config: _Nested | None = None
    transformer_layer_config: Layer | None = None
    speculators_model_type: str | None = None
    aux_hidden_state_layer_ids: States | None = None
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    is_causal: bool | None = None
    sliding_window_non_causal: bool = False
    projector_type: str = "dflash"
    sample_from_anchor: bool = False
    shift_label: bool | None = None


@dataclass(frozen=True)
class DFlashOutline(OwnFilesOutline):
    """A DFlash checkpoint's configuration.

    Attributes:
        block_size: tokens of the longest block, including its root.
        mask_token: placeholder for a token to draft.
        causal: per layer, whether a row of a block sees only itself and the rows before it.
        embedding_scale: see :class:`~specexport.methods.dflash.graph.DFlashShape`.
        logit_scale: likewise.
        logit_softcap: likewise.
    """

    block_size: int
    mask_token: int
    causal: tuple[bool, ...]
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None

    what: ClassVar[str] = (
        f"a DFlash draft as {CONFIG} describes it; expected names such as 'fc.weight' or "
        "'layers.0.self_attn.q_proj.weight'"
    )
    keys: ClassVar[str] = "target_layer_ids or aux_hidden_state_layer_ids"

    def usual_states(self, layers: int) -> tuple[int, ...]:
        return usual_states(self.layer.num_hidden_layers, layers)

    def make(self, layers: int) -> DFlashDraft:
        shape = DFlashShape(
            config=self.layer,
            target_hidden=self.target_hidden,
            states=len(self.seen(layers)),
            draft_vocab=self.draft_vocab,
            block_size=self.block_size,
            mask_token=self.mask_token,
            causal=self.causal,
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
        )
        with torch.device("meta"):
            return DFlashDraft(shape)


def usual_states(draft_layers: int, layers: int) -> tuple[int, ...]:
    """The layer counts after which a draft reads the target's residual stream by default (z-lab)."""
    if draft_layers == 1:
        return (layers // 2 + 1,)
    apart = (layers - 4) / (draft_layers - 1)
    return tuple(round(1 + at * apart) + 1 for at in range(draft_layers))


def read_dflash(source: str) -> DFlashOutline:
    """Reads a draft's configuration from a folder or hub id, without its weights.

    Raises:
        BuildError: a field is missing, malformed or unsupported; names the file and the field.
    """
    folder = locate(source)
    path, what = folder / CONFIG, "a DFlash draft"
    config = read_config(path, _Config, what)
    layer, kind = config.transformer_layer_config, config.speculators_model_type
    if kind not in (None, "dflash") or (layer is None) != (kind is None):
        raise BuildError(
            f"{path}: speculators_model_type is {kind!r}; expected 'dflash' with a transformer_layer_config, or neither"
        )
    # Their layers are Qwen3's, whatever model_type says.
    kinds = {"qwen3"} if layer is None else {"llama", "qwen3"}
    layer = layer or read_config(path, Layer, what)
    nested = config.dflash_config or _Nested()
    _refuse_variants(path, config, nested)
    known = {name: _first(getattr(nested, name), getattr(config, name)) for name in _Drafting.__struct_fields__}
    block, mask = known["block_size"] or _BLOCK, known["mask_token_id"]
    if mask is None or mask >= layer.vocab_size:
        raise BuildError(f"{path}: mask_token_id is {mask}; expected a token below vocab_size, {layer.vocab_size}")
    types = layer.layer_types or ["full_attention"] * layer.num_hidden_layers
    sliding = "sliding_attention" in types
    if sliding and layer.sliding_window is not None and layer.sliding_window < block:
        raise BuildError(
            f"{path}: sliding_window is {layer.sliding_window}; expected at least the block_size, which is {block}"
        )
    causal = _first(config.is_causal, nested.causal, False if config.sliding_window_non_causal else None)
    # z-lab numbers the layer that outputs the state, speculators counts the layers before it.
    ids, more = (known["target_layer_ids"], 1) if kind is None else (config.aux_hidden_state_layer_ids, 0)
    return DFlashOutline(
        path=folder,
        layer=layer_config(path, layer, kinds, "qwen3"),
        vocab=layer.vocab_size,
        draft_vocab=config.draft_vocab_size or layer.vocab_size,
        target_hidden=config.target_hidden_size or layer.hidden_size,
        states=None if ids is None else tuple(kind_ + more for kind_ in ids),
        tied=False,
        block_size=block,
        mask_token=mask,
        causal=tuple(kind_ == "sliding_attention" if causal is None else causal for kind_ in types),
        embedding_scale=known["input_embedding_scale"] or 1.0,
        logit_scale=known["output_multiplier"] or 1.0,
        logit_softcap=known["final_logit_softcapping"] or None,
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _refuse_variants(path: Path, config: _Config, nested: _Nested) -> None:
    """Refuses variants that propose differently from DFlash."""
    for field, value, expected in (
        ("projector_type", config.projector_type, "dflash"),
        ("sample_from_anchor", config.sample_from_anchor, False),
        ("shift_label", config.shift_label or False, False),
        ("dflash_config.use_swa", nested.use_swa, False),
        ("dflash_config.use_aux_hidden_state", nested.use_aux_hidden_state, True),
    ):
        if value != expected:
            raise BuildError(
                f"{path}: {field} is {value!r}; expected {expected!r}, as of a DFlash draft whose root proposes nothing"
            )


def save_dflash(
    folder: Path, draft: DFlashDraft, states: Sequence[int], layers: int, *, dtype: torch.dtype = torch.float16
) -> None:
    """Writes a draft in z-lab's layout, without the embedding and head, which are the target's.

    Args:
        folder: created if missing.
        draft: with full attention and the target's whole vocabulary.
        states: layer counts, each at least 1, after which it reads the target's residual stream.
        layers: number of the target's layers.
        dtype: dtype of the stored tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape, layer = draft.shape, draft.shape.config.to_dict()
    config = {
        "architectures": ["DFlashDraftModel"],
        **{name: layer[name] for name in Layer.__struct_fields__ if name in layer},
        "rope_theta": layer["rope_parameters"]["rope_theta"],
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token,
            "target_layer_ids": [count - 1 for count in states],
        },
        "num_target_layers": layers,
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
    }
    state = {
        name: tensor.detach().to(dtype) for name, tensor in draft.named_parameters() if name not in (EMBEDDING, HEAD)
    }
    save_file(state, folder / SINGLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
