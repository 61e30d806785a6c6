"""A DFlash draft in a bundle: its propose graph, and what the checkpoint says, run plainly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import onnx_ir as ir
import torch

from specexport.checkpoints import dflash
from specexport.checkpoints.checkpoint import Checkpoint
from specexport.checkpoints.outline import ModelOutline
from specexport.contract.methods.dflash import DFlash
from specexport.contract.model import CacheLayer, LoweredAs
from specexport.exporter import trace
from specexport.exporter.methods import MetaDraft, TargetOutline
from specexport.exporter.methods.states import StatesDraftExporter
from specexport.graphs.attention import lowering
from specexport.graphs.dflash import DFlashDraft, block_lowering


class DFlashExporter(StatesDraftExporter[DFlash]):
    """A few layers that draft a block in one pass."""

    stage: ClassVar[str | None] = "dflash"
    title: ClassVar[str] = "DFlash draft"
    read = staticmethod(dflash.read_dflash)

    def outline(self, method: DFlash, target: TargetOutline) -> DFlash:
        block = self.read(method.model).block_size
        return msgspec.structs.replace(super().outline(method, target), block_size=block)

    def meta_draft(self, method: DFlash, target: str, outline: ModelOutline) -> MetaDraft:
        block = self.read(method.model).block_size - 1
        return dataclasses.replace(super().meta_draft(method, target, outline), block=block)

    def trace(self, method: DFlash, draft: DFlashDraft, cache: Sequence[CacheLayer], kind: LoweredAs) -> ir.Model:
        return trace.trace_dflash(draft, cache, kind)

    def said(
        self, draft: Checkpoint, text: list[int], states: torch.Tensor, drafted: list[int]
    ) -> Sequence[torch.Tensor]:
        """See :class:`StatesDraftExporter`; the context's rows are made again for every block."""
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


EXPORTER = DFlashExporter()
