"""An EAGLE-3 draft in a bundle: its propose graph, and what the checkpoint says, run plainly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import onnx_ir as ir
import torch

from specexport.checkpoints import eagle3
from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS
from specexport.contract.methods.eagle3 import Eagle3
from specexport.contract.model import CacheLayer, LoweredAs
from specexport.exporter import trace
from specexport.exporter.compose import propose_graph
from specexport.exporter.methods import Suggestion, TargetOutline, Wanted
from specexport.exporter.methods.states import StatesDraftExporter
from specexport.graphs.attention import TwoPartLowering, lowering
from specexport.graphs.eagle3 import Eagle3Draft


class Eagle3Exporter(StatesDraftExporter[Eagle3]):
    """A layer that goes on from states between the target's layers."""

    stage: ClassVar[str | None] = "eagle3"
    title: ClassVar[str] = "EAGLE-3 draft"
    read = staticmethod(eagle3.read_eagle3)
    require_fit = staticmethod(eagle3.require_fit)
    load = staticmethod(eagle3.load_eagle3)

    def outline(self, method: Eagle3, target: TargetOutline) -> Eagle3:
        hidden = self.read(method.model).layer.hidden_size
        return msgspec.structs.replace(super().outline(method, target), draft_hidden=hidden)

    def trace(self, draft: Eagle3Draft, cache: Sequence[CacheLayer], kind: LoweredAs) -> ir.Model:
        first, one_pass = trace.trace_eagle3(draft, cache, kind)
        return propose_graph(one_pass, cache, kind, first)

    def said(
        self, draft: Eagle3Draft, text: list[int], states: torch.Tensor, drafted: list[int]
    ) -> Sequence[torch.Tensor]:
        """See :class:`StatesDraftExporter`; all rows are made again for every token."""
        config: Any = draft.shape.config
        hidden, ids, said = draft.fused(states), [*text[1:], *drafted], []
        empty = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim)
        for _ in drafted:
            rows = torch.arange(hidden.shape[1])
            seen = (rows[None, :] <= rows[:, None])[None]
            whole = TwoPartLowering([(empty, empty)] * len(draft.layers), torch.zeros(1).long(), seen, rows[None])
            with lowering(whole):
                state, output = draft(torch.tensor([ids[: len(rows)]]), hidden, rows[None])
            said.append(draft.lm_head(output[0, -1]))
            hidden = torch.cat([hidden, state[:, -1:]], 1)
        return said

    def suggest(self, kind: type[Eagle3], wanted: Wanted) -> Suggestion | None:
        why = (
            "one layer over the target's own states, which agrees with it more often than heads do; published for many "
            "targets (SafeAILab, speculators)"
        )
        return Suggestion("eagle3", f"K = {DEFAULT_DRAFT_TOKENS}", why, 1)


EXPORTER = Eagle3Exporter()
