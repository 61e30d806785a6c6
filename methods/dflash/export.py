"""Export of DFlash drafts: the propose graph and a reference implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import onnx_ir as ir
import torch

from specexport.contract import tensors
from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS
from specexport.contract.model import CacheLayer, LoweredAs
from specexport.contract.signature import cache_outputs, caches
from specexport.contract.tree import TokenTree
from specexport.exporter import trace
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.checkpoints.outline import ModelOutline
from specexport.exporter.method import MetaDraft
from specexport.graphs.attention import lowering
from specexport.methods.dflash.checkpoint import read_dflash
from specexport.methods.dflash.graph import DFlashDraft, DFlashModule, block_lowering
from specexport.methods.dflash.spec import DFlash, DFlashOptions, block_inputs
from specexport.methods.hidden_states.export import StatesDraftExporter


class DFlashExporter(StatesDraftExporter[DFlashOptions, DFlash]):
    """Exports a few layers that draft a block in one pass."""

    stage: ClassVar[str | None] = "dflash"
    title: ClassVar[str] = "DFlash draft"
    default_sizes: ClassVar[tuple[int, ...]] = (
        DEFAULT_DRAFT_TOKENS,
        7,
        15,
    )  # up to its block size; measured costs choose
    read = staticmethod(read_dflash)

    def built(self, options: DFlashOptions, outline: Any, **fields: Any) -> DFlash:
        return DFlash(model=options.model, block_size=outline.block_size, **fields)

    def default_trees(self, method: DFlash) -> tuple[TokenTree, ...]:
        sizes = [size for size in self.default_sizes if size < method.block_size] or [method.block_size - 1]
        return tuple(TokenTree.chain(size + 1) for size in sizes)

    def meta_draft(self, options: DFlashOptions, target: str, outline: ModelOutline) -> MetaDraft:
        block = self.read(options.model).block_size - 1
        return dataclasses.replace(super().meta_draft(options, target, outline), block=block)

    def trace(self, method: DFlash, draft: DFlashDraft, cache: Sequence[CacheLayer], kind: LoweredAs) -> ir.Model:
        return trace_dflash(draft, cache, kind)

    def reference_logits(
        self, draft: Checkpoint, text: list[int], states: torch.Tensor, drafted: list[int]
    ) -> Sequence[torch.Tensor]:
        """See :class:`StatesDraftExporter`; recomputes the context's rows for every block."""
        model: DFlashDraft = draft.model
        config: Any = model.shape.config
        empty = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim)
        past, count = torch.zeros(1).long(), torch.tensor([len(drafted) + 1])
        caches = [(empty, empty)] * len(model.layers)
        active, block_positions, positions = block_lowering(
            model.shape.causal, caches, past, torch.tensor([len(text) - 2]), count, len(text) - 1, len(drafted) + 1
        )
        with lowering(active):
            block = model.block(torch.tensor([text[-1]]), len(drafted) + 1)
            output = model(block, model.context(states), block_positions, positions)
        return list(model.logits(output[0, 1:]))


def trace_dflash(draft: DFlashDraft, shapes: Sequence[CacheLayer], lowering: LoweredAs) -> ir.Model:
    """The propose graph of a DFlash draft (:class:`~specexport.methods.dflash.graph.DFlashModule`)."""
    inputs: trace.Inputs = [*block_inputs(draft.fc.in_features), caches(shapes)]
    outputs = [*tensors.DRAFTED, *cache_outputs(shapes, (), lowering, "F")]
    attention = draft.layers[0].get_submodule("self_attn")
    traced = trace.trace_module(attention, DFlashModule(draft, lowering), inputs, outputs, lowering)
    for value in traced.graph.outputs:
        dims = list(value.shape or ())
        if value.name in tensors.DRAFTED:
            value.shape = ir.Shape(["K", "B", *dims[2:]])
        elif lowering == "portable":
            value.shape = ir.Shape([*dims[:2], "F", dims[3]])  # T + K - 1
    return traced


EXPORTER = DFlashExporter()
