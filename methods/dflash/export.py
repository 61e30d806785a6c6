"""Reads, writes and exports DFlash checkpoints in the layouts of ``z-lab`` and the ``speculators`` library.

A folder holds ``config.json`` and safetensors: ``fc.weight``, ``hidden_norm.weight``, ``norm.weight`` and a Qwen3's
decoder layers ``layers.{i}.*``; see :mod:`specexport.methods.hidden_states.checkpoint` for the rest. Embedding and head
are the target's; a draft with a smaller vocabulary has its own head. z-lab describes the block at the top level of the
configuration or in ``dflash_config``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import onnx_ir as ir
import torch
from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.methods.suggestion import Device
from specexport.contract.model import CacheLayer, LoweredAs
from specexport.contract.signature import cache_outputs, caches
from specexport.contract.tree import TokenTree
from specexport.exporter import trace
from specexport.exporter.build_state import Build
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.checkpoints.documents import CONFIG, read_config
from specexport.exporter.checkpoints.sizes import ModelSizes
from specexport.exporter.checkpoints.stored import save_head_tensors
from specexport.exporter.method import MetaDraft
from specexport.graphs.attention import lowering
from specexport.methods.dflash import MAX_BLOCK, DFlash, block_inputs
from specexport.methods.dflash.graph import BlockSettings, DFlashDraft, DFlashModule, block_lowering
from specexport.methods.hidden_states import StatesDraftOptions
from specexport.methods.hidden_states.checkpoint import (
    EMBEDDING,
    HEAD,
    DraftOutline,
    Layer,
    States,
    layer_config,
    read_draft,
)
from specexport.methods.hidden_states.export import StatesDraftExporter

_BLOCK = 16
"""The default block size in tokens."""
_Block = Annotated[int, Meta(ge=2, le=MAX_BLOCK)]
_Token = Annotated[int, Meta(ge=0, le=2**24)]
_Above = Annotated[float, Meta(gt=0.0, le=1e6)]


class _Drafting(msgspec.Struct, kw_only=True):
    """Fields of z-lab's configuration, in ``dflash_config`` or at the top level."""

    block_size: _Block | None = None
    mask_token_id: _Token | None = None
    target_layer_ids: States | None = None
    input_embedding_scale: _Above | None = None
    output_multiplier: _Above | None = None
    final_logit_softcapping: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None


class _Nested(_Drafting, kw_only=True):
    causal: bool | None = None
    use_swa: bool = False
    projector_type: str | None = None
    shift_label: bool | None = None
    use_aux_hidden_state: bool = True


class _Config(_Drafting, kw_only=True):
    """The fields of ``config.json`` that are specific to DFlash; other keys are ignored."""

    dflash_config: _Nested | None = None
    aux_hidden_state_layer_ids: States | None = None
    is_causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    projector_type: str = "dflash"
    sample_from_anchor: bool = False
    shift_label: bool | None = None


@dataclass(frozen=True)
class DFlashOutline(BlockSettings, DraftOutline):
    """A DFlash checkpoint's configuration."""

    what = (
        f"a DFlash draft as {CONFIG} describes it, with names such as 'fc.weight' or 'layers.0.self_attn.q_proj.weight'"
    )
    keys = "target_layer_ids or aux_hidden_state_layer_ids"

    @staticmethod
    def default_states(draft_layers: int, layers: int) -> tuple[int, ...]:
        if draft_layers == 1:
            return (layers // 2 + 1,)
        spacing = (layers - 4) / (draft_layers - 1)
        return tuple(round(1 + at * spacing) + 1 for at in range(draft_layers))

    def make(self, layers: int) -> DFlashDraft:
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(BlockSettings)}
        width = len(self.seen(layers)) * self.target_hidden
        with torch.device("meta"):
            return DFlashDraft(self.layer, BlockSettings(**settings), width, self.draft_vocab)


def read_dflash(source: str) -> DFlashOutline:
    """Reads a draft's configuration from a folder or hub id, without its weights."""
    layer, of_speculators, fields = read_draft(source, "dflash", "a DFlash draft", {"DFlashDraftModel": "qwen3"})
    path = fields["path"] / CONFIG
    config = read_config(path, _Config, "a DFlash draft")
    nested = config.dflash_config or _Nested()
    _refuse_variants(path, config, nested)
    drafting = {name: _first(getattr(nested, name), getattr(config, name)) for name in _Drafting.__struct_fields__}
    block, mask = drafting["block_size"] or _BLOCK, drafting["mask_token_id"]
    if mask is None or mask >= layer.vocab_size:
        raise BuildError(f"{path}: mask_token_id is {mask}; expected a token below vocab_size, {layer.vocab_size}")
    types = layer.layer_types or ["full_attention"] * layer.num_hidden_layers
    sliding = "sliding_attention" in types
    if sliding and layer.sliding_window is not None and layer.sliding_window < block:
        raise BuildError(
            f"{path}: sliding_window is {layer.sliding_window}; expected at least the block_size, which is {block}"
        )
    # vLLM reads speculators' drafts without the field as bidirectional.
    both_ways = _first(config.sliding_window_non_causal, of_speculators)
    causal = _first(config.is_causal, nested.causal, False if both_ways else None)
    # z-lab numbers the layer that outputs the state, speculators counts the layers before it.
    ids, offset = (config.aux_hidden_state_layer_ids, 0) if of_speculators else (drafting["target_layer_ids"], 1)
    if not ids:  # they are chosen in training, so no default is right for all drafts
        raise BuildError(
            f"{path}: no {'aux_hidden_state_layer_ids' if of_speculators else 'target_layer_ids'}; expected "
            "the layers that the draft was trained to see"
        )
    return DFlashOutline(
        **fields,
        # The layers of speculators' drafts are Qwen3's, whatever model_type says.
        layer=layer_config(path, layer, {"llama", "qwen3"} if of_speculators else {"qwen3"}, "qwen3"),
        states=tuple(index + offset for index in ids),
        tied=False,
        block_size=block,
        mask_token=mask,
        causal=tuple(kind == "sliding_attention" if causal is None else causal for kind in types),
        embedding_scale=drafting["input_embedding_scale"] or 1.0,
        logit_scale=drafting["output_multiplier"] or 1.0,
        logit_softcap=drafting["final_logit_softcapping"] or None,
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _refuse_variants(path: Path, config: _Config, nested: _Nested) -> None:
    for field, value, expected in (
        ("projector_type", nested.projector_type or config.projector_type, "dflash"),
        ("sample_from_anchor", config.sample_from_anchor, False),
        ("shift_label", config.shift_label or nested.shift_label or False, False),
        ("dflash_config.use_swa", nested.use_swa, False),
        ("dflash_config.use_aux_hidden_state", nested.use_aux_hidden_state, True),
    ):
        if value != expected:
            raise BuildError(
                f"{path}: {field} is {value!r}; expected {expected!r}, as of a DFlash draft whose root proposes nothing"
            )


def save_dflash(folder: Path, draft: DFlashDraft, states: Sequence[int], layers: int) -> None:
    """Writes a draft in z-lab's layout, without the embedding and head, which are the target's.

    It has full attention and the target's whole vocabulary. ``states`` are the numbers of layers, each at least 1,
    after which it reads the residual stream of the target, which has ``layers`` layers.
    """
    layer = draft.config.to_dict()
    config = {
        "architectures": ["DFlashDraftModel"],
        **{name: layer[name] for name in Layer.__struct_fields__ if name in layer},
        "rope_theta": layer["rope_parameters"]["rope_theta"],
        "block_size": draft.settings.block_size,
        "dflash_config": {
            "mask_token_id": draft.settings.mask_token,
            "target_layer_ids": [count - 1 for count in states],
        },
        "num_target_layers": layers,
        "tie_word_embeddings": True,
        "dtype": str(draft.fc.weight.dtype).removeprefix("torch."),
    }
    state = {name: tensor.detach() for name, tensor in draft.named_parameters() if name not in (EMBEDDING, HEAD)}
    save_head_tensors(folder, config, state)


class DFlashExporter(StatesDraftExporter[DFlash]):
    """Exports a few layers that draft a block in one pass."""

    def own_fields(self, outline: Any) -> dict[str, Any]:
        return {"block_size": outline.block_size}

    def default_trees(self, method: DFlash, device: Device) -> tuple[TokenTree, ...]:
        sizes = [size for size in method.default_sizes if size < method.block_size] or [method.block_size - 1]
        return tuple(TokenTree.chain(size + 1) for size in sizes)

    def meta_draft(self, options: StatesDraftOptions, target: str, sizes: ModelSizes) -> MetaDraft:
        block = read_dflash(self.source(options, target)).block_size - 1
        return dataclasses.replace(super().meta_draft(options, target, sizes), block=block)

    def trace(self, method: DFlash, draft: Checkpoint, build: Build) -> ir.Model:
        return trace_dflash(draft.model, draft.cache, build.options.lowering)

    def reference_logits(
        self, draft: Checkpoint, text: list[int], states: torch.Tensor, drafted: list[int]
    ) -> Sequence[torch.Tensor]:
        """See :class:`StatesDraftExporter`; recomputes the context's rows."""
        model: DFlashDraft = draft.model
        empty = torch.zeros(1, model.config.num_key_value_heads, 0, model.config.head_dim)
        past, count = torch.zeros(1).long(), torch.tensor([len(drafted) + 1])
        caches = [(empty, empty)] * len(model.layers)
        active, block_positions, positions = block_lowering(
            model.settings.causal, caches, past, torch.tensor([len(text) - 2]), count, len(text) - 1, len(drafted) + 1
        )
        with lowering(active):
            block = model.block(torch.tensor([text[-1]]), len(drafted) + 1)
            output = model(block, model.context(states), block_positions, positions)
        return list(model.logits(output[0, 1:]))


def trace_dflash(draft: DFlashDraft, shapes: Sequence[CacheLayer], lowering: LoweredAs) -> ir.Model:
    """The propose graph of a DFlash draft (:class:`~specexport.methods.dflash.graph.DFlashModule`)."""
    inputs: trace.Inputs = [*block_inputs(draft.fc.in_features), tensors.SAMPLING, caches(shapes)]
    outputs = [*tensors.DRAFTED, *cache_outputs(shapes, (), lowering, "F")]
    attention = draft.layers[0].get_submodule("self_attn")
    traced = trace.trace_module(DFlashModule(draft, lowering), inputs, outputs, lowering, rotary=attention)
    for value in traced.graph.outputs:
        dims = list(value.shape or ())
        if value.name in tensors.DRAFTED:
            value.shape = ir.Shape(["K", "B", *dims[2:]])
        elif lowering == "portable":
            value.shape = ir.Shape([*dims[:2], "F", dims[3]])  # T + K - 1
    return traced


EXPORTER = DFlashExporter(DFlash, read_dflash)
