"""The step program on a device: the host writes what is asked, launches, and reads what was accepted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import CATCH_UP_TOKENS
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, write_sampling
from specexport.runtime.cuda.graph import DeviceGraph
from specexport.runtime.cuda.kinds import StepVariants
from specexport.runtime.cuda.step_kind import StepVariant
from specexport.runtime.cuda.steps import READ_BACK, Steps
from specexport.runtime.cuda.stream import CudaStream
from specexport.runtime.proposers import Proposal, SlotView
from specexport.runtime.proposers.draft_model import DraftModelProposer
from specexport.runtime.step import PLAIN_TREE, HostProgram, Outcome, Speculation, Step, padded_mask

_NEVER = np.float32(1e30)
"""Noise with which no draft token stays: its product with q exceeds every p."""
_BELOW_ONE = np.nextafter(np.float32(1.0), np.float32(0.0))


@dataclass(frozen=True)
class _Part:
    """A slot's part in a step.

    Attributes:
        view: the slot.
        tree: what is verified.
        proposal: how the host filled it; None where it did not, or there is nothing but the root.
        drafter: the draft that fills it on the device; None where none does.
    """

    view: SlotView
    tree: TokenTree
    proposal: Proposal | None
    drafter: DraftModelProposer | None


class DeviceProgram(HostProgram):
    """Steps that stay on the device, each of all slots; see ``runtime.step.StepProgram``.

    A step is waited for once: a draft proposes, the target verifies, acceptance is decided and the rows of the
    accepted path are put together before the host reads what was accepted. Where the host proposes (by looking in text,
    from heads, with an MLP speculator, or with a draft whose rows it has to copy between calls) it writes the draft
    tokens and q of each, and the rest is the same; a model that it asks is a call of its own, with a wait of its own.

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
        stream: CudaStream,
        kinds: StepVariants,
        steps: Steps,
    ) -> None:
        super().__init__(manifest, target, speculations, execution)
        self._device = target
        self._stream = stream
        self._kinds = kinds
        self._steps = steps

    def step(self, sequences: Sequence[SlotView]) -> Step:
        """See :class:`~specexport.runtime.step.StepProgram`."""
        accept = self._kinds.deciding(sequences)
        if accept is None:
            return super().step(sequences)
        start = time.perf_counter()
        drafter, kind = self._drafter(sequences, accept)
        proposals = {} if kind is not None else self._propose(sequences)
        if kind is None:
            kind = self._kinds.verified(accept, [proposal.tree for proposal in proposals.values()] or [PLAIN_TREE])
        parts = [self._part(one, proposals.get(one.slot), drafter) for one in sequences]
        self._ask(kind, parts, drafter)
        asked = time.perf_counter()
        self._steps[kind].launch(self._device.cache.rows)
        self._stream.synchronize()
        outcomes = [self._take(kind, part) for part in parts]
        return Step(outcomes, asked - start, time.perf_counter() - asked, 0.0, self._steps.execution)

    def _drafter(
        self, sequences: Sequence[SlotView], accept: int
    ) -> tuple[DraftModelProposer, StepVariant] | tuple[None, None]:
        """The draft that proposes on the device for all who speculate, and the step; none if the host has to propose.

        It has to where they speculate in several ways, or where a draft is behind in a text.
        """
        asking = [one for one in sequences if one.method is not None and len(one.tree) > 1]
        methods = {one.method for one in asking if one.method is not None}
        if len(methods) == 1:
            (method,) = methods
            drafter = self._proposer(method)
            if isinstance(drafter, DraftModelProposer) and all(map(drafter.is_ready, asking)):
                kind = self._kinds.drafted(accept, method, [one.tree for one in asking])
                if kind is not None:
                    return drafter, kind
        return None, None

    def _part(self, one: SlotView, proposal: Proposal | None, drafter: DraftModelProposer | None) -> _Part:
        if drafter is None or one.method is None or len(one.tree) == 1:
            return _Part(one, PLAIN_TREE if proposal is None else proposal.tree, proposal, None)
        return _Part(one, one.tree, None, drafter)

    def _ask(self, kind: StepVariant, parts: Sequence[_Part], drafter: DraftModelProposer | None) -> None:
        """Writes everything a step is to be given; what slots without a part write goes behind their rows."""
        slots = range(self.sizes[-1])
        self._device.reserve(max(len(part.view.tokens) for part in parts) - 1 + kind.tokens)
        given = self._device.inputs(kind.tokens, kind.tokens, slots=slots)
        for part in parts:
            tokens = part.proposal.tokens if part.proposal is not None else None
            self._write(given, part.view.slot, part.view, part.tree, tokens)
        if drafter is not None and kind.drafting is not None:
            K = kind.drafting.tree.depth
            drafter.ask([part.view for part in parts if part.drafter is not None], K)
            kind.drafting.graph.begin(CATCH_UP_TOKENS, drafts=K, slots=slots)
        self._device.begin(kind.tokens, kind.tokens, slots=slots)
        for part in parts:
            self._decide(kind, part)

    def _decide(self, kind: StepVariant, part: _Part) -> None:
        """Writes what the accept and fill graphs are to be given of a slot."""
        given = {name: array[part.view.slot] for name, array in self._steps[kind].inputs.host.items()}
        params, random, tree = part.view.params, part.view.random, part.tree
        given[tensors.PARENTS][:] = _parents(tree, kind.nodes)
        given[tensors.TREE_MASK][:] = padded_mask(tree, kind.nodes)
        write_sampling(self._steps[kind].inputs.host, part.view.slot, params)
        if kind.accept.rule == "typical":
            given[tensors.UNIFORM][:] = random.random()
            self._steps[kind].inputs.host[tensors.THRESHOLD][part.view.slot] = params.posterior_threshold
            self._steps[kind].inputs.host[tensors.ALPHA][part.view.slot] = params.posterior_alpha
        else:
            noise = np.zeros(len(tree)) if params.greedy else random.random(len(tree))
            _write_noise(given[tensors.UNIFORM], noise)
        if kind.drafting is None:
            _write_drafted(given, part.proposal)
        elif kind.drafting.fill is not None:
            for name, of_node in ((tensors.TREE_DEPTHS, tree.depths), (tensors.TREE_RANKS, tree.ranks)):
                given[name][: len(tree) - 1] = of_node[1:]

    def _take(self, kind: StepVariant, part: _Part) -> Outcome:
        """Reads what a step accepted of a slot, and tells those who go on from it."""
        one, tree, step = part.view, part.tree, self._steps[kind]
        accepted = int(step.outputs.host[tensors.NUM_ACCEPTED][one.slot])
        path = step.outputs.host[tensors.PATH][one.slot, 1 : accepted + 1].tolist()
        new = step.outputs.host[tensors.TOKENS][one.slot, : accepted + 1].tolist()
        past = len(one.tokens) - 1
        if step.commits:
            self._device.committed(one.slot, past + 1 + accepted)
        else:
            self._device.commit(one.slot, past, [0, *path])
        if part.drafter is not None:
            fed = [token for node, token in zip(path, new, strict=False) if tree.ranks[node] == 0]
            part.drafter.keep(one, fed[: tree.depth - 1])
        if one.method is not None:
            outputs = self._device.width(kind.tokens, kind.tokens, batch=self.sizes[-1]).outputs.host
            seen = {name: outputs[name][one.slot] for name in READ_BACK & outputs.keys()}
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
    tokens = given[tensors.DRAFT_TOKENS]
    tokens[:] = 0
    if proposal is not None:
        tokens[: len(proposal.tokens)] = proposal.tokens
    if tensors.DRAFT_IDS not in given:
        return
    ids, probs = given[tensors.DRAFT_IDS], given[tensors.DRAFT_PROBS]
    rows, support = np.arange(len(tokens)), ids.shape[1]
    at = np.where(tokens < support, tokens, 0)  # all ids of a row are different
    ids[:] = np.arange(support)
    ids[rows, at] = tokens
    probs[:] = 0.0
    probs[rows, at] = 1.0
    if proposal is not None and proposal.q is not None:
        ids[: len(proposal.tokens)] = proposal.q.ids
        probs[: len(proposal.tokens)] = proposal.q.probs
