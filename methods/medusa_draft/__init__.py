"""Speculation by a smaller model with Medusa heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.methods.base import CheckpointOptions, DraftingMethod, Flag, SourceKind
from specexport.contract.shapes import Size, window
from specexport.contract.signature import GraphSignature, step_signature
from specexport.contract.tensors import CANDIDATES
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Graph, RunShape
from specexport.runtime.proposal import Ints, Opening, Proposal, ReadingProposer, SlotView, fill


class MedusaDraftOptions(CheckpointOptions, frozen=True, kw_only=True, tag="medusa_draft"):
    """Options of a draft with Medusa heads.

    Attributes:
        medusa: folder of its Medusa heads.
    """

    medusa: str

    flag = Flag(
        "--draft-medusa",
        "medusa",
        "Medusa heads of the draft, which then proposes a tree in one pass",
        "DIR",
        claims={"--draft": "model"},
    )


class MedusaDraft(DraftingMethod, frozen=True, kw_only=True, tag="medusa_draft"):
    """A smaller model with Medusa heads proposes a whole tree in one pass.

    Attributes:
        heads: number of heads; a tree is at most one level deeper, as the draft's own head comes first.
    """

    model: str
    medusa: str
    heads: Size

    options = MedusaDraftOptions
    sources: ClassVar[Mapping[str, SourceKind]] = {"model": "checkpoint", "medusa": "folder"}
    needs_training = "a smaller model and its heads"
    role = "draft"
    branching = 1

    @property
    def signature(self) -> GraphSignature:
        """See :class:`Method`: a step graph that returns candidates instead of logits."""
        return step_signature([CANDIDATES.sized(heads=self.heads + 1, M=self.candidates)])

    @property
    def draft_width(self) -> int:
        """Number of tokens that the draft reads in a step: as many as a step can commit."""
        return 1 + max(tree.depth for tree in self.token_trees())

    def describe(self) -> str:
        return f"medusa_draft, {self.heads} heads on the draft"

    def validate_tree(self, tree: TokenTree) -> str | None:
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads + 1 else None
        return super().validate_tree(tree) or deep


# --- proposing --------------------------------------------------------------------------------------------------------
class MedusaDraftProposer(ReadingProposer):
    """Fills a tree with the candidates of a draft's own head (depth 1) and of its Medusa heads (further depths).

    The draft reads only committed tokens, so its cache is always valid. A step commits at most one token more than the
    tree's depth. The draft always reads that many tokens, some of them again.
    """

    def __init__(self, graph: Graph, manifest: Manifest, method: MedusaDraft) -> None:
        super().__init__(graph, manifest.prefill_chunk)
        self._last_position = method.written_draft.max_positions - 1
        self._width = method.draft_width

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; if drafts lag far behind, as after plain steps, it reads a chunk in one slot."""
        texts = {view.slot: view.tokens[: -self._width] for view in views}
        waiting = self._catch_up(texts)
        candidates: dict[int, Ints] = {}
        wide = [view for view in views if len(view.tokens) >= self._width and view.slot not in waiting]
        if wide:
            past = {view.slot: len(view.tokens) - self._width for view in wide}
            candidates = self._run({view.slot: view.tokens[past[view.slot] :] for view in wide}, past, self._width)
        for view in views:
            if len(view.tokens) < self._width:
                candidates |= self._run({view.slot: view.tokens}, {view.slot: 0}, self._chunk)
            if view.slot in candidates:
                self._texts[view.slot] = list(view.tokens)
        return {
            view.slot: Proposal(fill(view.tree, candidates[view.slot]), view.tree, None, candidates[view.slot])
            for view in views
            if view.slot in candidates
        }

    def prefill(self, view: SlotView, max_deferred: int = 0) -> bool:
        """See :class:`Proposer`; leaves the last tokens, which the next step reads."""
        return self._read(view.slot, view.tokens[: -max(self._width, max_deferred)])

    def _read_chunk(self, slot: int, tokens: list[int], past: int) -> None:
        self._run({slot: tokens}, {slot: past}, self._chunk)

    def _run(self, texts: Mapping[int, list[int]], pasts: Mapping[int, int], width: int) -> dict[int, Ints]:
        """Runs the draft over at most ``width`` tokens of each slot; returns its candidates by slot."""
        # Chunks are read in one slot at a time.
        slots = window(texts, self.graph.sizes if width == self._width else (1, self.graph.sizes[-1]))
        shape = RunShape(width, 1, slots=slots)
        inputs = self.graph.prepare(shape, max(pasts.values()) + width)
        for slot, tokens in texts.items():
            at, past = slot - slots.start, pasts[slot]
            inputs[tensors.INPUT_IDS][at, : len(tokens)] = tokens
            inputs[tensors.POSITION_IDS][at] = np.minimum(past + np.arange(width), self._last_position)
            inputs[tensors.PAST_LENGTH][at] = past
            inputs[tensors.LOGITS_ROWS][at] = len(tokens) - 1
        candidates = self.graph.run(shape)[tensors.CANDIDATES]
        for slot, tokens in texts.items():
            self.graph.commit(slot, pasts[slot], range(len(tokens)))
        return {slot: candidates[slot - slots.start, :, 0].copy() for slot in texts}


def open_proposer(method: MedusaDraft, opening: Opening) -> MedusaDraftProposer:
    return MedusaDraftProposer(opening.graph(method), opening.bundle.manifest, method)
