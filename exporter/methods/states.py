"""What drafts have in common that go on from states between the target's layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import onnx_ir as ir
import torch

from specexport.checkpoints.checkpoint import Checkpoint
from specexport.checkpoints.drafts import as_checkpoint
from specexport.checkpoints.locate import locate
from specexport.checkpoints.reference import load_reference, reference_logits
from specexport.contract.methods.draft_model import StatesDraft
from specexport.contract.model import CacheLayer, LoweredAs
from specexport.exporter.drafts import traced
from specexport.exporter.methods import Agreement, Build, TargetOutline, Verification
from specexport.exporter.methods.draft_model import ChainDraftExporter
from specexport.exporter.writing import Part, write_models
from specexport.graphs.layers import noted_states
from specexport.graphs.medusa import MedusaHeads
from specexport.graphs.propose import MAX_CANDIDATES

S = TypeVar("S", bound=StatesDraft)


class StatesDraftExporter(ChainDraftExporter[S]):
    """A draft of the target's whose rows are made of states between its layers."""

    title: ClassVar[str]
    """What it is, in words."""

    @abstractmethod
    def read(self, source: str) -> Any:
        """The outline of a checkpoint, without its weights: :class:`~specexport.checkpoints.drafts.DraftOutline`."""

    @abstractmethod
    def require_fit(self, outline: Any, *, hidden: int, vocab: int, layers: int) -> None:
        """Refuses a draft of another target, or whose tensors are not what its configuration says."""

    @abstractmethod
    def load(self, outline: Any, target: Path, layers: int, positions: int) -> Any:
        """The draft of an outline, for a target of so many layers and the longest text."""

    @abstractmethod
    def trace(self, draft: Any, cache: Sequence[CacheLayer], kind: LoweredAs) -> ir.Model:
        """Its propose graph."""

    @abstractmethod
    def said(self, draft: Any, text: list[int], states: torch.Tensor, drafted: list[int]) -> Sequence[torch.Tensor]:
        """What a draft says of each drafted token, ``[draft_vocab]``, made anew without a cache.

        Args:
            draft: as :meth:`load` gives it.
            text: N tokens.
            states: the target's at all of them but the last, ``[1,N-1,n*H]``.
            drafted: tokens that were drafted behind it.
        """

    # --- the build ----------------------------------------------------------------------------------------------------
    def outline(self, method: S, target: TargetOutline) -> S:
        found = self.read(method.model)
        return msgspec.structs.replace(
            method,
            states=found.seen(target.layers),
            hidden=found.target_hidden,
            candidates=min(MAX_CANDIDATES, found.draft_vocab),
        )

    def plan(self, method: S, target: TargetOutline) -> S:
        planned = super().plan(method, target)
        return msgspec.structs.replace(planned, rows=1 + max(tree.depth for tree in planned.token_trees()))

    def heads(self, method: S, target: Checkpoint) -> MedusaHeads | None:
        """See :class:`MethodExporter`; it adds none, but must fit."""
        hidden = target.model.config.get_text_config().hidden_size
        self.require_fit(self.read(method.model), hidden=hidden, vocab=target.vocab_size, layers=len(target.cache))
        return None

    def export(self, method: S, build: Build) -> S:
        build.progress(f"loading the {self.title}", 0, 1)
        outline, positions = self.read(method.model), build.target.max_positions
        draft = self.load(outline, locate(build.options.target), len(build.target.cache), positions)
        checkpoint = as_checkpoint(outline, method.role, method.model, draft, positions)
        build.progress(f"loading the {self.title}", 1, 1)
        build.progress(f"tracing the {self.title}", 0, 1)
        graph = traced(checkpoint, lambda: self.trace(draft, checkpoint.cache, build.options.lowering))
        part = Part("propose", graph, self.points(method, build.plan), checkpoint.cache, checkpoint.parameters)
        build.progress(f"tracing the {self.title}", 1, 1)
        folder, stored = build.folder / method.role, build.options.proposing
        (model,) = write_models(folder, [part], checkpoint, stored, None, build.options.lowering, build.progress)
        return msgspec.structs.replace(method, draft=model, model=model.source)

    # --- verify -------------------------------------------------------------------------------------------------------
    def compare(self, method: S, run: Verification) -> tuple[str, Agreement] | None:
        """See :class:`MethodExporter`; each token must be the one that the draft, run over the whole text, says."""
        manifest, (model,) = run.bundle.manifest, method.models.values()
        target, source = run.source(None), run.source(method)
        made = run.recorded(method)
        outline, layers = self.read(str(source)), len(manifest.target.cache)
        original = load_reference(target, manifest.target)
        draft = self.load(outline, target, layers, manifest.target.max_positions)
        agreement = run.agreement(manifest.target.precision.weights, model.precision.weights)
        ids = torch.arange(outline.draft_vocab) if draft.target_ids is None else draft.target_ids
        for text, drafted in made:
            with noted_states(original, method.states) as noted:
                reference_logits(original, np.array(text[:-1]))
            states = torch.cat([noted[count] for count in method.states], -1).float()
            with torch.no_grad():
                said = torch.stack(list(self.said(draft, text, states, drafted.tolist())))
            chosen = (ids[None, :] == torch.from_numpy(drafted)[:, None]).int().argmax(1)
            agreement.count(said.numpy(), chosen.numpy())
        return "the draft's graph proposes the original draft's own token", agreement
