"""Speculation by a smaller model with the target's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import TrainError
from specexport.contract.manifest import Manifest
from specexport.contract.methods.base import CHECKPOINT, DEFAULT_DRAFT_TOKENS, CheckpointOptions, DraftingMethod, Flag
from specexport.contract.methods.suggestion import SMALLER, Suggestion, TargetProfile
from specexport.contract.shapes import CATCH_UP_TOKENS, window
from specexport.contract.signature import GraphSignature, propose_signature
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Graph, RunShape, write_sampling
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import (
    DeviceDraft,
    Ints,
    Opening,
    Proposal,
    ReadingProposer,
    SlotView,
    drawn,
    fill,
    most_probable_tree,
)
from specexport.training.options import Divergence, DraftRunOptions, Report, Training, draft_option

_GPU_DRAFT_TOKENS = 5


class ChainDraft(DraftingMethod, frozen=True, kw_only=True):
    """A model drafts a chain, with a pass per token (Leviathan 2023, Chen 2023); a tree may add less probable tokens
    beside each token of the chain.
    """

    role = "draft"
    branching: ClassVar[Literal[0, 1, 2]] = 1
    default_sizes = (DEFAULT_DRAFT_TOKENS, 6, 8)  # measured costs decide among them

    @property
    def support(self) -> int:
        return self.candidates

    @property
    def signature(self) -> GraphSignature:
        """See :class:`Method`: the propose graph, first a pass over T tokens, then one of a single token each."""
        return propose_signature(self.candidates, () if self.draft is None else self.draft.states)

    def validate_tree(self, tree: TokenTree) -> str | None:
        spine = "only the most probable token of each depth can have children"
        return super().validate_tree(tree) or (None if tree.has_spine else spine)

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        return self.catch_up, tree.depth

    def drafted_lengths(self) -> frozenset[int] | None:
        return frozenset(point.drafts for point in self.draft.graph.points) if self.draft is not None else None


class DraftModelOptions(CheckpointOptions, frozen=True, kw_only=True, tag="draft_model"):
    """Options of a draft model."""

    flag = Flag("--draft", "model", "smaller model with the same tokenizer", "DIR_OR_ID")


class DraftModel(ChainDraft, frozen=True, kw_only=True, tag="draft_model"):
    """A smaller model with the target's tokenizer drafts."""

    model: str

    options = DraftModelOptions
    sources = CHECKPOINT
    needs_training = "a smaller model"
    whole_model = True

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        K = DEFAULT_DRAFT_TOKENS if target.device == "cpu" else _GPU_DRAFT_TOKENS
        least, most = SMALLER
        if not target.drafts:
            low, high = target.parameters / most / 1e6, target.parameters / least / 1e6
            why = (
                f"look for a model of the same family and tokenizer with {low:,.2g} to {high:,.2g} million parameters, "
                "and pass it with --draft; 'specexport train draft' makes it agree with this target more often"
            )
            return Suggestion("draft_model", f"K = {K}", why, 0)
        name, ratio = target.drafts[0]
        why = f"{ratio:.1f} times smaller, the same tokenizer"
        if not least <= ratio <= most:
            why += f"; {least:g} to {most:g} times would be better"
        flags = ("--draft", name, "--num-speculative-tokens", str(K))
        return Suggestion("draft_model", f"{name}, K = {K}", why, 0, flags)


class DraftTraining(DraftRunOptions, frozen=True, kw_only=True):
    """Options of ``specexport train draft``.

    Attributes:
        draft: model to start from, with the target's tokenizer (default: a new Llama).
        layers: layers of a new Llama; required without --draft (default: none).
        hidden: hidden size of a new Llama; required without --draft (default: none).
        divergence: divergence between the target's and the draft's next-token distributions to minimize.
        samples: what to learn: texts of the target, texts of the draft at that step (on-policy), or the data; prompts
            are cut from the data.
        texts: number of texts sampled from the target.
    """

    draft: Annotated[str | None, draft_option("DIR_OR_ID")] = None
    layers: Annotated[int | None, draft_option("N", ge=1, le=64)] = None
    hidden: Annotated[int | None, draft_option("H", ge=32, le=8192)] = None
    divergence: Annotated[Divergence, draft_option()] = "forward_kl"
    samples: Annotated[Literal["target", "draft", "data"], draft_option()] = "target"
    texts: Annotated[int, draft_option("N", ge=1)] = 1024

    def check(self) -> None:
        super().check()
        new = [f"--{name}" for name in ("layers", "hidden") if getattr(self, name) is not None]
        if self.draft is not None and new:
            raise TrainError(f"--draft was given together with {new[0]}, which is for a new draft")
        if self.draft is None and len(new) < 2:
            raise TrainError("no draft to train; expected --draft, or --layers and --hidden for a new one")

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        if self.samples != "target":
            yield "texts", f"with --samples {self.samples}, which samples none beforehand"


def _report(record: dict[str, Any]) -> Report:
    from specexport.tables import Table  # running a bundle needs none

    options, acceptance = record["options"], record["acceptance"]
    table = Table("", ("draft tokens a step", *map(str, range(1, 7))))
    for name in acceptance["after"]:
        for when in ("before", "after"):
            table.add_row(f"{name}, {when}", *(f"{length:.2f}" for length in acceptance[when][name]))
    yield f"{options['output']}: a draft of {options['target']}; acceptance length over held-out prompts"
    yield table


TRAINING = Training("draft", "Distil a target into a draft model.", DraftTraining, _report, " --layers 4 --hidden 512")


# --- proposing --------------------------------------------------------------------------------------------------------
Dynamic = Literal["spine", "any"]
"""The nodes of a dynamic tree that may have children: only the drafted chain's, or any."""
_TOGETHER = 8
"""Most unread tokens per slot that a run of several slots reads while it drafts."""


class DraftModelProposer(ReadingProposer):
    """A smaller model drafts a chain of tokens in one graph call.

    Its cache holds rows of the text and of draft tokens, all committed after the run. Rows of accepted draft tokens
    stay valid, others are overwritten; a comparison with the slot's tokens tells them apart.
    """

    def __init__(self, graph: Graph, manifest: Manifest) -> None:
        super().__init__(graph, manifest.prefill_chunk)
        self.reads_along = self._chunk if graph.any_width else CATCH_UP_TOKENS

    @property
    def device_draft(self) -> DeviceDraft:
        return self

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; leaves out texts of one token.

        It also leaves out slots whose draft lags far behind, as after plain steps, and reads a chunk in one of these.
        """
        # A run is as wide as its slot with the most unread tokens.
        limit = self.reads_along if len(views) == 1 else min(self.reads_along, _TOGETHER)
        waiting = self._catch_up({view.slot: view.tokens[:-limit] for view in views})
        pending = [view for view in views if len(view.tokens) >= CATCH_UP_TOKENS and view.slot not in waiting]
        proposals: dict[int, Proposal] = {}
        while pending:  # runs once, unless a text is shorter than the unread part of another
            T = self._width(pending)
            proposals |= self._draft([view for view in pending if len(view.tokens) >= T], T)
            pending = [view for view in pending if len(view.tokens) < T]
        return proposals

    def _width(self, views: Sequence[SlotView]) -> int:
        """T of a run that reads all unread tokens: a power of 2 if possible, so that there are few shapes."""
        missing = max(map(self._missing, views))
        rounded = min(1 << (missing - 1).bit_length(), self.reads_along)
        return rounded if all(len(view.tokens) >= rounded for view in views) else missing

    def _missing(self, view: SlotView) -> int:
        return len(view.tokens) - self._known(view.slot, view.tokens[:-CATCH_UP_TOKENS])

    def _draft(self, ready: Sequence[SlotView], T: int) -> dict[int, Proposal]:
        K = max(view.tree.depth for view in ready)
        slots = self.write_inputs(ready, T, K)
        outputs = self.graph.run(RunShape(T, drafts=K, slots=slots))
        proposals = {}
        for view in ready:
            at = view.slot - slots.start
            drafted = outputs[tensors.DRAFT_TOKENS][: view.tree.depth, at].tolist()
            self._keep(view, T, drafted[:-1])
            proposals[view.slot] = chain_proposal(view, outputs, at)
        return proposals

    def is_ready(self, view: SlotView) -> bool:
        """See :class:`DeviceDraft`; whether one run can read all unread tokens."""
        return self._missing(view) == CATCH_UP_TOKENS

    def write_inputs(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        slots = window([view.slot for view in views], self.graph.sizes)
        shape = RunShape(tokens, drafts=drafts, slots=slots)
        inputs = self.graph.prepare(shape, max(len(view.tokens) for view in views) + drafts - 1)
        for view in views:
            at = view.slot - slots.start
            inputs[tensors.INPUT_IDS][at] = view.tokens[-tokens:]
            inputs[tensors.PAST_LENGTH][at] = len(view.tokens) - tokens
            inputs[tensors.LAST_ROW][at] = tokens - 1
            if tensors.KNOWN_TOKENS in inputs:
                inputs[tensors.KNOWN_TOKENS][at] = 0  # the last two are read again
            write_drafting(inputs, at, view)
        return slots

    def rows(self, tree: TokenTree, tokens: int) -> Ints:
        return chain_rows(tree)

    def commit(self, view: SlotView, drafted: Sequence[int]) -> None:
        """See :class:`DeviceDraft`; ``drafted`` are the accepted tokens that were inputs of the run."""
        self._keep(view, CATCH_UP_TOKENS, drafted)

    def _keep(self, view: SlotView, T: int, drafted: Sequence[int]) -> None:
        self.graph.commit(view.slot, len(view.tokens) - T, range(T + len(drafted)))
        self._texts[view.slot] = [*view.tokens, *drafted]

    def prefill(self, view: SlotView, max_deferred: int = 0) -> bool:
        """See :class:`Proposer`; leaves at least the last two tokens."""
        return self._read(view.slot, view.tokens[: -max(CATCH_UP_TOKENS, max_deferred)])

    def _read_chunk(self, slot: int, tokens: list[int], past: int) -> None:
        T = self.graph.chunk(self._chunk, len(tokens))
        shape = RunShape(T, drafts=1, slots=range(slot, slot + 1))
        inputs = self.graph.prepare(shape, past + T)
        inputs[tensors.INPUT_IDS][0, : len(tokens)] = tokens
        inputs[tensors.PAST_LENGTH][0] = past
        inputs[tensors.LAST_ROW][0] = len(tokens) - 1
        if tensors.KNOWN_TOKENS in inputs:
            inputs[tensors.KNOWN_TOKENS][0] = len(tokens)
        self.graph.run(shape)
        self.graph.commit(slot, past, range(len(tokens)))


def write_drafting(inputs: Mapping[str, Array], at: int, view: SlotView, probabilities: bool = False) -> None:
    """Writes the sampling parameters and noise with which a slot's draft draws tokens.

    ``probabilities`` says that q is needed even for greedy requests, which draw nothing.
    """
    if not view.params.greedy:
        write_sampling(inputs, at, view.params)
        # Only as much noise as the tree needs, so that results of a seed do not depend on the rest of the batch.
        inputs[tensors.UNIFORM][at, : view.tree.depth] = view.random.random(view.tree.depth, np.float32)
    elif probabilities:
        # Without noise the most probable token is drawn; top-k of 1 would hide the other probabilities.
        write_sampling(inputs, at, SamplingParams())
        inputs[tensors.UNIFORM][at] = 0.0
    else:
        write_sampling(inputs, at, view.params)


def chain_rows(tree: TokenTree) -> Ints:
    """For each node but the root, the row of a drafted chain that holds its q: its depth - 1, int64 ``[N-1]``."""
    return tree.depths[1:] - 1


def chain_proposal(view: SlotView, outputs: Mapping[str, Array], at: int, dynamic: Dynamic | None = None) -> Proposal:
    """The proposal from a propose graph's outputs, for the slot at index ``at`` of the window.

    Nodes beside the drafted chain get other likely tokens. The nodes of a dynamic tree are chosen anew in each step:
    with "any" by q, independently of the drawn tokens; with "spine" only nodes of the chain have children. See
    docs/trees.md.
    """
    tree = view.tree
    ids = outputs[tensors.DRAFT_IDS][: tree.depth, at].astype(np.int64)
    probs = outputs[tensors.DRAFT_PROBS][: tree.depth, at].astype(np.float32)
    drafted = outputs[tensors.DRAFT_TOKENS][: tree.depth, at].astype(np.int64)
    if dynamic == "any":
        tree = most_probable_tree(tree, probs, spine=False)
    elif dynamic == "spine":
        order = np.argsort(ids != drafted[:, None], axis=1, kind="stable")  # the ranks that drawn() uses
        tree = most_probable_tree(tree, np.take_along_axis(probs, order, 1), spine=True)
    if view.params.greedy:
        return Proposal(fill(tree, ids), tree, None, ids)
    deep = tree.depth  # a dynamic tree may be less deep than what was drafted
    tokens, q, candidates = drawn(tree, chain_rows(tree), drafted[:deep], ids[:deep], probs[:deep])
    return Proposal(tokens, tree, q, candidates)


def open_proposer(method: ChainDraft, opening: Opening) -> DraftModelProposer:
    return DraftModelProposer(opening.graph(method), opening.bundle.manifest)
