"""The step program on a device: the host writes inputs, launches a step, and reads the accepted tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, write_sampling
from specexport.runtime.backends.cuda.api import CudaStream
from specexport.runtime.backends.cuda.graph import DeviceGraph
from specexport.runtime.backends.cuda.step_variants import StepVariant, StepVariants, read_back
from specexport.runtime.backends.cuda.steps import Steps
from specexport.runtime.proposal import DeviceDraft, Ints, Proposal, SlotView
from specexport.runtime.step import HostProgram, padded_mask
from specexport.runtime.step_program import PLAIN_TREE, LoadedMethod, Outcome, StepResult, Verified

_NEVER = np.float32(1e30)
"""Noise that rejects any draft token, as its product with q exceeds every p."""
_MAX_UNIFORM = np.nextafter(np.float32(1.0), np.float32(0.0))


@dataclass(frozen=True)
class _Part:
    """A slot's part in a step.

    Attributes:
        proposal: the host's proposal; None if the device fills the tree, or if the tree is only the root.
        draft: the draft that fills the tree on the device; None if the host fills it.
    """

    view: SlotView
    tree: TokenTree
    proposal: Proposal | None = None
    draft: DeviceDraft | None = None


class DeviceProgram:
    """Steps that stay on the device, each of all slots; see :class:`~specexport.runtime.step_program.StepProgram`.

    The host waits once a step: before it reads the result, a draft proposes, the target verifies, acceptance is decided
    and the rows of the accepted path are made contiguous. If the host proposes (by look-up, from heads, or with a draft
    whose rows it has to copy first), it writes the draft tokens and the q of each instead; a model that it runs for
    this is a separate call with a wait.

    The host drives steps that need its decisions, with the same graphs and caches: for requests with a schema,
    log-probabilities or relaxed acceptance, and for lookahead decoding, which reads all logits.
    """

    fuses = True

    def __init__(
        self, host: HostProgram, target: DeviceGraph, stream: CudaStream, variants: StepVariants, steps: Steps
    ) -> None:
        self._host = host
        self._target = target
        self._stream = stream
        self._variants = variants
        self._steps = steps
        # The host program does everything but steps.
        self.sizes, self.filled, self.prefill, self.release = host.sizes, host.filled, host.prefill, host.release
        self.move, self.share, self.shrink_cache = host.move, host.share, host.shrink_cache
        self.reusable, self.look_up = host.reusable, host.look_up

    def step(self, views: Sequence[SlotView]) -> StepResult:
        accept = self._variants.accept_graph(views)
        if accept is None:
            return self._host.step(views)
        start = time.perf_counter()
        variant, parts = self._plan(accept, views)
        planned = time.perf_counter()
        self._write(variant, parts)
        self._steps[variant].launch(self._target.cache.rows)
        self._stream.synchronize()
        outcomes = [self._read(variant, part) for part in parts]
        verify, fused = time.perf_counter() - planned, variant.drafting is not None
        return StepResult(outcomes, planned - start, verify, 0.0, self._steps.execution, fused)

    def with_methods(self, loaded_methods: Mapping[str, LoadedMethod]) -> DeviceProgram:
        host = self._host.with_methods(loaded_methods)
        return DeviceProgram(host, self._target, self._stream, self._variants, self._steps)

    def _plan(self, accept: int, views: Sequence[SlotView]) -> tuple[StepVariant, list[_Part]]:
        """Chooses the variant of the next step, and has the host propose unless a draft proposes on the device.

        A draft does so if all speculating requests use its method and it has read all their texts. It reads now what it
        missed of a single request's text.
        """
        speculating = [view for view in views if view.method is not None and len(view.tree) > 1]
        methods = {view.lookup or view.method for view in speculating}
        if len(methods) == 1 and (method := methods.pop()) is not None:
            draft = self._host.proposer(method).device_draft
            if draft is not None and len(views) == 1 and not draft.is_ready(views[0]):
                self._host.catch_up(method, views[0])
            if draft is not None and all(map(draft.is_ready, speculating)):
                variant = self._variants.for_draft(accept, method, [view.tree for view in speculating])
                if variant is not None:
                    drafting = {view.slot for view in speculating}
                    return variant, [
                        _Part(view, view.tree, draft=draft) if view.slot in drafting else _Part(view, PLAIN_TREE)
                        for view in views
                    ]
        proposals = self._host.propose(views)
        proposed = [(view, proposals.get(view.slot)) for view in views]
        parts = [_Part(view, proposal.tree if proposal else PLAIN_TREE, proposal) for view, proposal in proposed]
        return self._variants.for_proposals(accept, [part.tree for part in parts]), parts

    def _write(self, variant: StepVariant, parts: Sequence[_Part]) -> None:
        """Writes all inputs of a step; slots that take no part in it write rows after their committed ones."""
        longest = max(len(part.view.tokens) for part in parts)
        inputs = self._target.prepare(variant.shape, longest - 1 + variant.shape.tokens)
        for part in parts:
            tokens = part.proposal.tokens if part.proposal is not None else None
            self._host.write_tree(inputs, part.view.slot, part.view, part.tree, tokens)
        drafted = [part for part in parts if part.draft is not None]
        if drafted and drafted[0].draft is not None and variant.drafting is not None:
            drafting = variant.drafting
            drafted[0].draft.write_inputs([part.view for part in drafted], drafting.shape.tokens, drafting.shape.drafts)
            drafting.graph.begin(drafting.shape)
        self._target.begin(variant.shape)
        for part in parts:
            self._write_acceptance(variant, part)

    def _write_acceptance(self, variant: StepVariant, part: _Part) -> None:
        """Writes a slot's inputs of the accept and fill graphs."""
        inputs, slot, params, tree = self._steps[variant].inputs.host, part.view.slot, part.view.params, part.tree
        inputs[tensors.PARENTS][slot] = _parents(tree, variant.nodes)
        inputs[tensors.TREE_MASK][slot] = padded_mask(tree, variant.nodes)
        if variant.accept.rule != "greedy":
            write_sampling(inputs, slot, params)
        if variant.accept.rule == "typical":
            inputs[tensors.UNIFORM][slot] = part.view.random.random()
            inputs[tensors.THRESHOLD][slot] = params.posterior_threshold
            inputs[tensors.ALPHA][slot] = params.posterior_alpha
        elif variant.accept.rule == "lossless":
            noise = np.zeros(len(tree)) if params.greedy else part.view.random.random(len(tree))
            _write_noise(inputs[tensors.UNIFORM][slot], noise)
        if variant.drafting is None:
            _write_drafted({name: array[slot] for name, array in inputs.items()}, part.proposal)
        elif variant.drafting.fill is not None and part.draft is not None:
            inputs[tensors.TREE_ROWS][slot, : len(tree) - 1] = part.draft.rows(tree, variant.drafting.shape.tokens)
            inputs[tensors.TREE_RANKS][slot, : len(tree) - 1] = tree.ranks[1:]

    def _read(self, variant: StepVariant, part: _Part) -> Outcome:
        """Reads a slot's accepted tokens, and informs the proposer."""
        view, tree, step = part.view, part.tree, self._steps[variant]
        accepted = int(step.outputs.host[tensors.NUM_ACCEPTED][view.slot])
        if not 0 <= accepted <= tree.depth:  # a wrong number might keep the loop from ending
            raise BackendError(
                f"the device says that it accepted {accepted} of {tree.depth} draft tokens; its results cannot be "
                "trusted. Try another driver or library, or run the bundle with --backend onnxruntime"
            )
        path = step.outputs.host[tensors.PATH][view.slot, 1 : accepted + 1].tolist()
        new = step.outputs.host[tensors.TOKENS][view.slot, : accepted + 1].tolist()
        past = len(view.tokens) - 1
        if step.commits:
            self._target.set_filled(view.slot, past + 1 + accepted)
        else:
            self._target.commit(view.slot, past, [0, *path])
        if part.draft is not None:
            fed = [token for node, token in zip(path, new, strict=False) if tree.ranks[node] == 0]
            part.draft.commit(view, fed[: tree.depth - 1])
        if view.method is not None:
            outputs = self._target.buffers(variant.shape).outputs.host
            observed = {name: outputs[name][view.slot] for name in read_back(outputs)}
            self._host.inform(view, observed, path[-1] if path else 0, past, [0, *path])
        verified = None
        if len(tree) > 1:
            drafted = part.proposal.tokens.tolist() if part.proposal is not None else ()
            verified = Verified(tree, drafted, path)
        return Outcome(new, verified=verified)


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


def _write_drafted(inputs: Mapping[str, Array], proposal: Proposal | None) -> None:
    """Writes the host's draft tokens and the q of each, which is 1 for tokens that were chosen without drawing."""
    tokens = inputs[tensors.DRAFT_TOKENS]
    tokens[:] = 0
    if proposal is not None:
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
    if proposal is not None and proposal.q is not None:
        ids[: len(proposal.tokens)] = proposal.q.ids
        probs[: len(proposal.tokens)] = proposal.q.probs
