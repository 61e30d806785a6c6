"""The step program on a device: the host writes inputs, launches a step, and reads the accepted tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.manifest import Manifest
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, write_sampling
from specexport.runtime.backends.cuda.api import CudaStream
from specexport.runtime.backends.cuda.graph import DeviceGraph
from specexport.runtime.backends.cuda.step_variants import StepVariant, StepVariants, read_back
from specexport.runtime.backends.cuda.steps import Steps
from specexport.runtime.proposal import NOTHING, Ints, Proposal, Proposer, SlotView
from specexport.runtime.step import Outcome, StepProgram, StepResult, Verified, padded_mask

_NEVER = np.float32(1e30)
"""Noise that rejects any draft token, as its product with q exceeds every p."""
_MAX_UNIFORM = np.nextafter(np.float32(1.0), np.float32(0.0))


class DeviceProgram(StepProgram):
    """Steps that stay on the device, each of all slots.

    The host waits once a step: before it reads the result, a draft proposes, the target verifies, acceptance is decided
    and the rows of the accepted path are made contiguous. If the host proposes (by look-up, from heads, or with a draft
    whose rows it has to copy first), it writes the draft tokens and the q of each instead; a model that it runs for
    this is a separate call with a wait.

    The host drives steps that need its decisions, with the same graphs and caches: for requests with a schema,
    log-probabilities or relaxed acceptance, and for lookahead decoding, which reads all logits.
    """

    fuses = True
    _target: DeviceGraph

    def __init__(
        self,
        manifest: Manifest,
        target: DeviceGraph,
        proposers: Mapping[str, Proposer],
        execution: str,
        stream: CudaStream,
        variants: StepVariants,
        steps: Steps,
    ) -> None:
        super().__init__(manifest, target, proposers, execution)
        self._stream = stream
        self._variants = variants
        self._steps = steps

    def step(self, views: Sequence[SlotView]) -> StepResult:
        accept = self._variants.accept_graph(views)
        if accept is None:
            return super().step(views)
        start = time.perf_counter()
        variant, proposals = self._plan(accept, views)
        planned = time.perf_counter()
        self._write(variant, views, proposals)
        variant.launch(self._target.cache.rows)
        self._stream.synchronize()
        outcomes = [self._read_outcome(variant, view, proposals[view.slot]) for view in views]
        verify, fused = time.perf_counter() - planned, variant.drafting is not None
        return StepResult(outcomes, planned - start, verify, 0.0, self._steps.execution, fused)

    def _plan(self, accept: int, views: Sequence[SlotView]) -> tuple[StepVariant, dict[int, Proposal]]:
        """Chooses the variant of the next step, and has the host propose unless a draft proposes on the device.

        A draft does so if all speculating requests use its method and it has read all their texts. It reads now what it
        missed of a single request's text. Its proposals have a tree, but no tokens yet.
        """
        speculating = [view for view in views if view.method is not None and len(view.tree) > 1]
        methods = {view.lookup or view.method for view in speculating}
        if len(methods) == 1 and (method := methods.pop()) is not None:
            variant = self._variants.for_draft(accept, method, [view.tree for view in speculating])
            if variant is not None and variant.drafting is not None:
                is_ready = variant.drafting.draft.is_ready
                if len(views) == 1 and not is_ready(views[0]):
                    self.catch_up(method, views[0])
                if all(map(is_ready, speculating)):
                    drafted = {view.slot: replace(NOTHING, tree=view.tree) for view in speculating}
                    return variant, dict.fromkeys((view.slot for view in views), NOTHING) | drafted
        proposals = self.propose(views)
        return self._variants.for_proposals(accept, [proposal.tree for proposal in proposals.values()]), proposals

    def _write(self, variant: StepVariant, views: Sequence[SlotView], proposals: Mapping[int, Proposal]) -> None:
        """Writes all inputs of a step; slots that take no part in it write rows after their committed ones."""
        longest = max(len(view.tokens) for view in views)
        inputs, drafting = self._target.prepare(variant.shape, longest - 1 + variant.shape.tokens), variant.drafting
        for view in views:
            proposal, past = proposals[view.slot], len(view.tokens) - 1
            tokens = proposal.tokens if drafting is None else None
            self.write_nodes(inputs, view.slot, view, proposal.tree, past, 1, tokens)
        if drafting is not None:
            drafted = [view for view in views if len(proposals[view.slot].tree) > 1]
            drafting.draft.write_inputs(drafted, drafting.shape.tokens, drafting.shape.drafts)
            drafting.graph.begin(drafting.shape)
        self._target.begin(variant.shape)
        for view in views:
            self._write_acceptance(variant, view, proposals[view.slot])

    def _write_acceptance(self, variant: StepVariant, view: SlotView, proposal: Proposal) -> None:
        """Writes a slot's inputs of the accept and fill graphs."""
        inputs, slot, params, tree = variant.inputs.host, view.slot, view.params, proposal.tree
        inputs[tensors.PARENTS][slot] = _parents(tree, variant.nodes)
        inputs[tensors.TREE_MASK][slot] = padded_mask(tree, variant.nodes)
        if variant.accept.rule != "greedy":
            write_sampling(inputs, slot, params)
        if variant.accept.rule == "typical":
            inputs[tensors.UNIFORM][slot] = view.random.random()
            inputs[tensors.THRESHOLD][slot] = params.posterior_threshold
            inputs[tensors.ALPHA][slot] = params.posterior_alpha
        elif variant.accept.rule == "lossless":
            noise = np.zeros(len(tree)) if params.greedy else view.random.random(len(tree))
            _write_noise(inputs[tensors.UNIFORM][slot], noise)
        if variant.drafting is None:
            _write_drafted({name: array[slot] for name, array in inputs.items()}, proposal)
        elif variant.drafting.fill is not None and len(tree) > 1:
            rows = variant.drafting.draft.rows(tree, variant.drafting.shape.tokens)
            inputs[tensors.TREE_ROWS][slot, : len(tree) - 1] = rows
            inputs[tensors.TREE_RANKS][slot, : len(tree) - 1] = tree.ranks[1:]

    def _read_outcome(self, variant: StepVariant, view: SlotView, proposal: Proposal) -> Outcome:
        """Reads a slot's accepted tokens, and informs the proposer."""
        tree, past = proposal.tree, len(view.tokens) - 1
        results = {name: array[view.slot] for name, array in variant.outputs.host.items()}
        accepted = int(results[tensors.NUM_ACCEPTED])
        if not 0 <= accepted <= tree.depth:  # a wrong number might keep the loop from ending
            raise BackendError(
                f"the device says that it accepted {accepted} of {tree.depth} draft tokens; its results cannot be "
                "trusted. Try another driver or library, or run the bundle with --backend onnxruntime"
            )
        path = results[tensors.PATH][1 : accepted + 1].tolist()
        new = results[tensors.TOKENS][: accepted + 1].tolist()
        rows = [0, *path]
        if variant.commits:
            self._target.set_filled(view.slot, past + len(rows))
        else:
            self._target.commit(view.slot, past, rows)
        if variant.drafting is not None and len(tree) > 1:
            fed = [token for node, token in zip(path, new, strict=False) if tree.ranks[node] == 0]
            variant.drafting.draft.commit(view, fed[: tree.depth - 1])
        if view.method is not None:
            outputs = self._target.buffers(variant.shape).outputs.host
            observed = {name: outputs[name][view.slot] for name in read_back(outputs)}
            self.inform(view, observed, rows[-1], past, rows)
        return Outcome(new, verified=Verified(tree, proposal.tokens.tolist(), path) if len(tree) > 1 else None)


@lru_cache(maxsize=256)
def _parents(tree: TokenTree, nodes: int) -> Ints:
    """The parents of N nodes, int64 ``[N]``; padding nodes are their own parents, so that no path reaches them."""
    parents = np.arange(nodes)
    parents[: len(tree)] = tree.parents
    return parents


def _write_noise(uniform: Array, noise: npt.NDArray[np.float64]) -> None:
    """Writes the noise for the tree's draft tokens, for padding nodes, and for the final draw."""
    uniform[:] = _NEVER
    uniform[: len(noise) - 1] = np.minimum(noise[:-1].astype(np.float32), _MAX_UNIFORM)
    uniform[-1] = min(np.float32(noise[-1]), _MAX_UNIFORM)


def _write_drafted(inputs: Mapping[str, Array], proposal: Proposal) -> None:
    """Writes the host's draft tokens and the q of each, which is 1 for tokens that were chosen without drawing."""
    tokens = inputs[tensors.DRAFT_TOKENS]
    tokens[:] = 0
    tokens[: len(proposal.tokens)] = proposal.tokens
    if tensors.DRAFT_IDS not in inputs:
        return
    ids, probs = inputs[tensors.DRAFT_IDS], inputs[tensors.DRAFT_PROBS]
    rows, support = np.arange(len(tokens)), ids.shape[1]
    at = np.where(tokens < support, tokens, 0)  # all ids of a row are different
    ids[:] = np.arange(support)
    ids[rows, at] = tokens
    probs[:] = 0.0
    probs[rows, at] = 1.0
    if proposal.q is not None:
        ids[: len(proposal.tokens)] = proposal.q.ids
        probs[: len(proposal.tokens)] = proposal.q.probs
