"""An EAGLE-3 draft in a bundle: its propose graph, and that graph compared with the checkpoint run plainly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from specexport.checkpoints.checkpoint import Checkpoint
from specexport.checkpoints.eagle3 import as_checkpoint, load_eagle3, read_eagle3, require_fit
from specexport.checkpoints.locate import locate
from specexport.checkpoints.reference import load_reference, reference_logits
from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS
from specexport.contract.methods.eagle3 import Eagle3
from specexport.exporter import trace
from specexport.exporter.compose import propose_graph
from specexport.exporter.drafts import traced
from specexport.exporter.methods import Agreement, Build, Suggestion, TargetOutline, Verification, Wanted
from specexport.exporter.methods.draft_model import ChainDraftExporter
from specexport.exporter.writing import Part, write_models
from specexport.graphs.attention import TwoPartLowering, lowering
from specexport.graphs.eagle3 import Eagle3Draft
from specexport.graphs.layers import noted_states
from specexport.graphs.medusa import MedusaHeads
from specexport.graphs.propose import MAX_CANDIDATES


class Eagle3Exporter(ChainDraftExporter[Eagle3]):
    """A layer that goes on from states between the target's layers."""

    stage: ClassVar[str | None] = "eagle3"

    def outline(self, method: Eagle3, target: TargetOutline) -> Eagle3:
        found = read_eagle3(method.model)
        return msgspec.structs.replace(
            method,
            states=found.seen(target.layers),
            hidden=found.target_hidden,
            draft_hidden=found.layer.hidden_size,
            candidates=min(MAX_CANDIDATES, found.draft_vocab),
        )

    def plan(self, method: Eagle3, target: TargetOutline) -> Eagle3:
        planned = super().plan(method, target)
        return msgspec.structs.replace(planned, rows=1 + max(tree.depth for tree in planned.token_trees()))

    def heads(self, method: Eagle3, target: Checkpoint) -> MedusaHeads | None:
        """See :class:`MethodExporter`; it adds none, but must fit."""
        text = target.model.config.get_text_config()
        outline = read_eagle3(method.model)
        require_fit(outline, hidden=text.hidden_size, vocab=target.vocab_size, layers=len(target.cache))
        return None

    def export(self, method: Eagle3, build: Build) -> Eagle3:
        build.progress("loading the EAGLE-3 draft", 0, 1)
        outline, positions = read_eagle3(method.model), build.target.max_positions
        draft = load_eagle3(outline, locate(build.options.target), len(build.target.cache), positions)
        checkpoint = as_checkpoint(outline, method.model, draft, positions)
        build.progress("loading the EAGLE-3 draft", 1, 1)
        build.progress("tracing the EAGLE-3 draft", 0, 1)
        kind, cache = build.options.lowering, checkpoint.cache

        def tracer() -> Any:
            first, one_pass = trace.trace_eagle3(draft, cache, kind)
            return propose_graph(one_pass, cache, kind, first)

        part = Part(
            "propose", traced(checkpoint, tracer), self.points(method, build.plan), cache, checkpoint.parameters
        )
        build.progress("tracing the EAGLE-3 draft", 1, 1)
        folder, stored = build.folder / "eagle3", build.options.proposing
        (model,) = write_models(folder, [part], checkpoint, stored, None, kind, build.progress)
        return msgspec.structs.replace(method, draft=model, model=model.source)

    def suggest(self, kind: type[Eagle3], wanted: Wanted) -> Suggestion | None:
        why = (
            "one layer over the target's own states, which agrees with it more often than heads do; published for many "
            "targets (SafeAILab, speculators)"
        )
        return Suggestion("eagle3", f"K = {DEFAULT_DRAFT_TOKENS}", why, 1)

    def compare(self, method: Eagle3, run: Verification) -> tuple[str, Agreement] | None:
        """See :class:`MethodExporter`; each token must be the one that the draft, run over the whole text, says."""
        manifest, (model,) = run.bundle.manifest, method.models.values()
        target, source = run.source(None), run.source(method)
        made = run.recorded(method)
        outline, layers = read_eagle3(str(source)), len(manifest.target.cache)
        original = load_reference(target, manifest.target)
        draft = load_eagle3(outline, target, layers, manifest.target.max_positions)
        agreement = run.agreement(manifest.target.precision.weights, model.precision.weights)
        ids = torch.arange(outline.draft_vocab) if draft.target_ids is None else draft.target_ids
        for text, drafted in made:
            with noted_states(original, method.states) as noted:
                reference_logits(original, np.array(text[:-1]))
            states = torch.cat([noted[count] for count in method.states], -1).float()
            said = torch.stack(list(_said(draft, text, states, drafted.tolist())))
            chosen = (ids[None, :] == torch.from_numpy(drafted)[:, None]).int().argmax(1)
            agreement.count(said.numpy(), chosen.numpy())
        return "the draft's graph proposes the original draft's own token", agreement


def _said(draft: Eagle3Draft, text: list[int], states: torch.Tensor, drafted: list[int]) -> Iterator[torch.Tensor]:
    """What a draft says after a text and after each drafted token but the last, ``[draft_vocab]``.

    All rows are made again for every token, without a cache; ``states`` are the target's, ``[1,N-1,n*H]``.
    """
    config: Any = draft.shape.config
    hidden, ids = draft.fused(states), [*text[1:], *drafted]
    empty = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim)
    for _ in drafted:
        rows = torch.arange(hidden.shape[1])
        seen = (rows[None, :] <= rows[:, None])[None]
        whole = TwoPartLowering([(empty, empty)] * len(draft.layers), torch.zeros(1).long(), seen, rows[None])
        with torch.no_grad(), lowering(whole):
            state, output = draft(torch.tensor([ids[: len(rows)]]), hidden, rows[None])
        yield draft.lm_head(output[0, -1])
        hidden = torch.cat([hidden, state[:, -1:]], 1)


EXPORTER = Eagle3Exporter()
