"""The step program of one slot on a device: the host writes what is asked, launches, and reads what was accepted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import CATCH_UP_TOKENS
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, write_sampling
from specexport.runtime.cuda.graph import DeviceGraph
from specexport.runtime.cuda.kinds import READ_BACK, Kinds
from specexport.runtime.cuda.steps import DeviceStep, Kind, Steps
from specexport.runtime.cuda.stream import Stream
from specexport.runtime.proposers import Proposal, SlotView
from specexport.runtime.proposers.draft_model import DraftModelProposer
from specexport.runtime.step import ROOT, HostProgram, Outcome, Speculation, Step, padded_mask

_NEVER = np.float32(1.0)
"""Noise with which a draft token of q = 1 never stays."""
_BELOW_ONE = np.nextafter(_NEVER, np.float32(0.0))


class DeviceProgram(HostProgram):
    """Steps of one slot that stay on the device; see ``runtime.step.StepProgram``.

    A step is one launch and one wait: a draft proposes, the target verifies, acceptance is decided and the rows of the
    accepted path are put together before the host reads what was accepted. Where the host proposes (by looking in text,
    from heads, or with a draft lowered portably) it writes the draft tokens, and the rest is the same.

    Steps that the host has to look into are driven from there, over the same graphs and caches: those of requests
    with a schema, log-probabilities or relaxed acceptance, and of lookahead decoding, which reads all logits.

    Args:
        manifest: the bundle's.
        target: its target's graph.
        speculations: the ways to propose, by the name of their method.
        execution: how steps driven from the host reach the device.
        stream: does the work.
        kinds: the steps the device can take.
        steps: those, ready.
    """

    def __init__(
        self,
        manifest: Manifest,
        target: DeviceGraph,
        speculations: Mapping[str, Speculation],
        execution: str,
        stream: Stream,
        kinds: Kinds,
        steps: Steps,
    ) -> None:
        super().__init__(manifest, target, speculations, execution)
        self._device = target
        self._stream = stream
        self._kinds = kinds
        self._steps = steps

    def step(self, sequences: Sequence[SlotView]) -> Step:
        """See :class:`~specexport.runtime.step.StepProgram`."""
        one = sequences[0]
        if not self._kinds.serves(one):
            return super().step(sequences)
        start = time.perf_counter()
        kind, drafter, proposal = self._kinds.drafted(one), self._drafter(one), None
        if kind is None or drafter is None:
            drafter, proposal = None, self._propose(sequences).get(one.slot)
            tree = ROOT if proposal is None else proposal.tree
            kind = self._kinds.verified(one.params, tree, None if proposal is None else proposal.q)
        else:
            tree = one.tree
        step = self._steps[kind]
        self._ask(kind, step, one, tree, proposal, drafter)
        asked = time.perf_counter()
        step.launches[self._device.cache.rows]()
        self._stream.synchronize()
        outcome = self._take(kind, step, one, tree, drafter)
        return Step([outcome], asked - start, time.perf_counter() - asked, 0.0, self._steps.execution)

    def _drafter(self, view: SlotView) -> DraftModelProposer | None:
        """The draft that can propose for a slot right now."""
        proposer = self._proposer(view.method) if view.method is not None and len(view.tree) > 1 else None
        return proposer if isinstance(proposer, DraftModelProposer) and proposer.is_ready(view) else None

    def _ask(
        self,
        kind: Kind,
        step: DeviceStep,
        one: SlotView,
        tree: TokenTree,
        proposal: Proposal | None,
        drafter: DraftModelProposer | None,
    ) -> None:
        """Writes everything a step is to be given."""
        self._device.reserve(len(one.tokens) - 1 + kind.tokens)
        given = self._device.inputs(kind.tokens, kind.tokens)
        self._write(given, 0, one, tree, proposal.tokens if proposal is not None else None)
        if drafter is not None and kind.drafting is not None:
            drafts, _ = drafter.ask([one])
            kind.drafting.graph.begin(CATCH_UP_TOKENS, drafts=drafts)
        self._device.begin(kind.tokens, kind.tokens)
        given = step.inputs.host
        given[tensors.PARENTS][0] = _parents(tree, kind.nodes)
        given[tensors.TREE_MASK][0] = padded_mask(tree, kind.nodes)
        write_sampling(given, 0, one.params)
        if kind.accept.rule == "typical":
            given[tensors.UNIFORM][0] = one.random.random()
            given[tensors.THRESHOLD][0] = one.params.posterior_threshold
            given[tensors.ALPHA][0] = one.params.posterior_alpha
        else:
            noise = np.zeros(len(tree)) if one.params.greedy else one.random.random(len(tree))
            _write_noise(given[tensors.UNIFORM][0], noise)
        if kind.drafting is None:
            _write_drafted(given, proposal)

    def _take(
        self, kind: Kind, step: DeviceStep, one: SlotView, tree: TokenTree, drafter: DraftModelProposer | None
    ) -> Outcome:
        """Reads what a step accepted, and tells those who go on from it."""
        accepted = int(step.outputs.host[tensors.NUM_ACCEPTED][0])
        path = step.outputs.host[tensors.PATH][0, 1 : accepted + 1].tolist()
        new = step.outputs.host[tensors.TOKENS][0, : accepted + 1].tolist()
        past = len(one.tokens) - 1
        if step.commits:
            self._device.committed(one.slot, past + 1 + accepted)
        else:
            self._device.commit(one.slot, past, [0, *path])
        if drafter is not None:
            fed = [token for node, token in zip(path, new, strict=False) if tree.ranks[node] == 0]
            drafter.keep(one, fed[: tree.depth - 1])
        if one.method is not None:
            outputs = self._device.width(kind.tokens, kind.tokens).outputs.host
            seen = {name: outputs[name][0] for name in READ_BACK & outputs.keys()}
            self._proposer(one.method).observe(one.slot, seen, path[-1] if path else 0)
        return Outcome(new, len(tree) - 1, tree.depth)


@lru_cache(maxsize=256)
def _parents(tree: TokenTree, nodes: int) -> npt.NDArray[np.int64]:
    """Parents int64 ``[N]``; a node after the tree's last is its own, so that none of the tree's leads to it."""
    parents = np.arange(nodes)
    parents[: len(tree)] = tree.parents
    return parents


def _write_noise(uniform: Array, noise: npt.NDArray[np.float64]) -> None:
    """Noise of the tree's draft tokens, then of those that are none, then of the final draw."""
    uniform[:] = _NEVER
    uniform[: len(noise) - 1] = np.minimum(noise[:-1].astype(np.float32), _BELOW_ONE)
    uniform[-1] = min(np.float32(noise[-1]), _BELOW_ONE)


def _write_drafted(given: Mapping[str, Array], proposal: Proposal | None) -> None:
    """Draft tokens that the host knows, and q of each: 1 where they were chosen without drawing."""
    tokens = given[tensors.DRAFT_TOKENS][0]
    tokens[:] = 0
    if proposal is not None:
        tokens[: len(proposal.tokens)] = proposal.tokens
    if tensors.DRAFT_IDS not in given:
        return
    ids, probs = given[tensors.DRAFT_IDS][0], given[tensors.DRAFT_PROBS][0]
    rows, support = np.arange(len(tokens)), ids.shape[1]
    at = np.where(tokens < support, tokens, 0)  # all ids of a row are different
    ids[:] = np.arange(support)
    ids[rows, at] = tokens
    probs[:] = 0.0
    probs[rows, at] = 1.0
    if proposal is not None and proposal.q is not None:
        ids[: len(proposal.tokens)] = proposal.q.ids
        probs[: len(proposal.tokens)] = proposal.q.probs
