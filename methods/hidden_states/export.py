"""Exports drafts over the target's states, with or without a state of the draft."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import onnx_ir as ir
import torch

from specexport.contract import tensors
from specexport.contract.model import CacheLayer, LoweredAs
from specexport.contract.signature import caches
from specexport.contract.tensors import Tensor
from specexport.exporter import trace
from specexport.exporter.build_state import Build
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_reference, reference_logits
from specexport.exporter.checkpoints.config import sizes_of
from specexport.exporter.checkpoints.sizes import ModelSizes
from specexport.exporter.compose import propose_graph
from specexport.exporter.method import Array, MetaDraft, MethodExporter, TargetInfo, Verification
from specexport.graphs.attention import TwoPartLowering, lowering
from specexport.graphs.layers import recorded_states
from specexport.graphs.propose import MAX_CANDIDATES
from specexport.methods.hidden_states import OwnStateDraft, StatesDraft, StatesDraftOptions, own_state_inputs
from specexport.methods.hidden_states.checkpoint import DraftOutline, load_draft
from specexport.methods.hidden_states.graph import OwnStateModule, OwnStatePass, OwnStateStart

S = TypeVar("S", bound=StatesDraft)
O = TypeVar("O", bound=OwnStateDraft)


class StatesDraftExporter(MethodExporter[StatesDraftOptions, S]):
    """Exports a draft that computes its rows from states between the target's layers.

    Args:
        kind: the method's entry in a bundle.
        read: reads a draft's configuration from a folder or hub id, without its weights.
    """

    def __init__(self, kind: type[S], read: Callable[[str], DraftOutline]) -> None:
        self.kind = kind
        self.read = read

    def source(self, method: StatesDraftOptions | S, target: str) -> str:
        """The folder or hub id of the draft."""
        return str(getattr(method, "model", target))

    @abstractmethod
    def own_fields(self, outline: Any) -> dict[str, Any]:
        """The fields of the method's entry that other such drafts lack, from a draft's configuration."""

    @abstractmethod
    def reference_logits(
        self, draft: Checkpoint, text: list[int], states: torch.Tensor, drafted: list[int]
    ) -> Sequence[torch.Tensor]:
        """The draft's logits ``[draft_vocab]`` for each drafted token, computed without a cache.

        Args:
            text: N tokens.
            states: the target's states at all tokens but the last, ``[1,N-1,n*H]``.
        """

    # --- the build ----------------------------------------------------------------------------------------------------
    def resolve(self, options: StatesDraftOptions, target: TargetInfo) -> S:
        outline = self.read(self.source(options, str(target.path)))
        outline.require_fit(hidden=target.hidden, vocab=target.vocab, layers=target.layers)
        named = {key: getattr(options, key) for key in self.kind.sources}
        return self.kind(
            **named,
            **self.own_fields(outline),
            trees=(),
            dynamic_tree=options.dynamic_tree,
            states=outline.seen(target.layers),
            hidden=outline.target_hidden,
            rows=1,
            candidates=min(MAX_CANDIDATES, outline.draft_vocab),
        )

    def plan(self, options: StatesDraftOptions, target: TargetInfo) -> S:
        planned = super().plan(options, target)
        return msgspec.structs.replace(planned, rows=1 + max(tree.depth for tree in planned.token_trees()))

    def load(self, method: S, build: Build) -> Checkpoint:
        source, positions = self.source(method, build.options.target), build.max_positions
        with build.during(f"loading the {method.draft_name}"):
            draft = load_draft(self.read(source), build.source, positions, family=method.role, source=source)
        # Tied only if the target stores the same. At int4 rows to look up have 8 bits, twice as much to read.
        kind = build.options.draft_storage.kind
        if kind == "int4" or kind != build.options.target_storage.kind:
            draft.model.lm_head.weight = torch.nn.Parameter(draft.model.lm_head.weight.clone(), requires_grad=False)
        return draft

    def meta_draft(self, options: StatesDraftOptions, target: str, sizes: ModelSizes) -> MetaDraft:
        source = self.source(options, target)
        read = self.read(source)
        read.require_fit(hidden=sizes.hidden, vocab=sizes.vocab, layers=sizes.layers)
        draft = read.make(sizes.layers)
        with torch.device("meta"):
            cache = draft.cache()
        row = sum(2 * layer.heads * (layer.key_size + layer.value_size) for layer in cache)
        meta = dataclasses.replace(sizes_of(draft, read.layer), row=row)
        return MetaDraft(f"{source}, {options.name}", meta)

    # --- verify -------------------------------------------------------------------------------------------------------
    def compare(self, method: S, run: Verification) -> Iterator[tuple[Array, Array]]:
        """See :class:`MethodExporter`; each token must be the original draft's choice when it reads the whole text."""
        manifest = run.bundle.manifest
        target = run.source(None)
        source = run.source(method) if method.sources else target
        recorded = run.recorded(method)
        outline, positions = self.read(str(source)), manifest.target.max_positions
        original = load_reference(target, manifest.target)
        draft = load_draft(outline, target, positions, family=method.role, source=str(source))
        ids = torch.arange(outline.draft_vocab) if draft.model.target_ids is None else draft.model.target_ids
        for text, drafted in recorded:
            with recorded_states(original, method.states) as by_layer:
                reference_logits(original, np.array(text[:-1]))
            states = torch.cat([by_layer[count] for count in method.states], -1).float()
            with torch.no_grad():
                expected = torch.stack(list(self.reference_logits(draft, text, states, drafted.tolist())))
            chosen = (ids[None, :] == torch.from_numpy(drafted)[:, None]).int().argmax(1)
            yield expected.numpy(), chosen.numpy()


class OwnStateExporter(StatesDraftExporter[O]):
    """Exports a draft that reads its own state at tokens that the target has not read yet."""

    def own_fields(self, outline: Any) -> dict[str, Any]:
        return {"draft_hidden": outline.layer.hidden_size}

    def trace(self, method: O, draft: Checkpoint, build: Build) -> ir.Model:
        first, one_pass = trace_own_state(draft.model, draft.cache, build.options.lowering)
        return propose_graph(one_pass, draft.cache, build.options.lowering, first)

    def reference_logits(
        self, draft: Checkpoint, text: list[int], states: torch.Tensor, drafted: list[int]
    ) -> Sequence[torch.Tensor]:
        """See :class:`StatesDraftExporter`; recomputes all rows for every token."""
        model, logits = draft.model, []
        hidden, ids = model.fuse(states), [*text[1:], *drafted]
        empty = [
            (torch.zeros(1, layer.heads, 0, layer.key_size), torch.zeros(1, layer.heads, 0, layer.value_size))
            for layer in draft.cache
        ]
        for _ in drafted:
            rows = torch.arange(hidden.shape[1])
            seen = (rows[None, :] <= rows[:, None])[None]
            with lowering(TwoPartLowering(empty, torch.zeros(1).long(), seen, rows[None])):
                state, output = model(torch.tensor([ids[: len(rows)]]), hidden, rows[None])
            logits.append(model.lm_head(output[0, -1]))
            hidden = torch.cat([hidden, state[:, -1:]], 1)
        return logits


def trace_own_state(
    draft: OwnStateModule, shapes: Sequence[CacheLayer], lowering: LoweredAs
) -> tuple[ir.Model, ir.Model]:
    """Traces the computation of the first pass's inputs, and a pass as the loop's body.

    See :class:`~specexport.methods.hidden_states.graph.OwnStatePass`.
    """
    attention = draft.layers[0].get_submodule("self_attn")
    states = own_state_inputs(draft.states_width, draft.hidden)
    first = trace.trace_module(OwnStateStart(draft), states, ["hidden", "real"], lowering)
    hidden = Tensor("hidden", "float32", ("B", "T", draft.hidden), "states that a pass reads")
    real = Tensor("real", "float32", ("B", "R"), "which earlier rows are not padding")
    rows = trace.row_inputs(shapes)
    inputs: trace.Inputs = [*trace.PASS_INPUTS, hidden, real, tensors.SAMPLING, caches(shapes), rows]
    outputs = [*tensors.DRAFTED, "hidden.next", "real.next", *(f"{name}.grown" for name in rows)]
    return first, trace.trace_module(OwnStatePass(draft), inputs, outputs, lowering, rotary=attention)
