"""The engine: a loaded bundle, and the loop propose -> verify -> accept -> commit."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.errors import RequestError
from specexport.contract.manifest import HYPOTHESIS, Manifest, method_name
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Graph, open_graph, step_buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.hypothesis import Unverified, check_hypothesis, continuation, taken_as_it_is
from specexport.runtime.logprobs import token_logprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposers import Proposal, Proposer, SlotView, open_proposer
from specexport.runtime.sampling import accept_greedy, accept_relaxed, accept_sampled, accept_typical
from specexport.runtime.stream import Chunk, Completion, FinishReason, Stream, completed
from specexport.runtime.text import TextStream

_ROOT = TokenTree.chain(1)
"""What a plain step verifies."""
_WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Speculation:
    """A way to propose, loaded.

    Attributes:
        proposer: proposes.
        trees: the trees the bundle was built for, the default first.
    """

    proposer: Proposer
    trees: tuple[TokenTree, ...]


class Engine:
    """Generates text from a bundle; made by :meth:`load`.

    It has one slot: one request runs at a time. Methods may be called from any thread; a request waits until the one
    before it is finished, closed or cancelled. A thread that holds an unfinished stream cannot start another request
    (it would wait for itself) and gets an error instead.

    Attributes:
        manifest: the bundle's.
        tokenizer: the bundle's.
        chat_template: the model's, or None.
        speculations: the loaded ways to propose, by the name of their method, the default first.
    """

    def __init__(self, bundle: Bundle, target: Graph, speculations: Mapping[str, Speculation]) -> None:
        self.manifest: Manifest = bundle.manifest
        self.tokenizer = bundle.tokenizer()
        self.chat_template = bundle.chat_template()
        self._target = target
        self.speculations = dict(speculations)
        self._slot = threading.Lock()
        self._holder: int | None = None
        self._running: weakref.ref[Stream] | None = None
        self._closed = False
        self._warm_up()

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        threads: int | None = None,
        check_hashes: bool = True,
        suffix_store_tokens: int = 0,
    ) -> Engine:
        """Opens a bundle and loads its graphs.

        Args:
            bundle: a folder made by ``specexport build``.
            threads: CPU threads; None for every core this process may use.
            check_hashes: compare every file's SHA-256 with the manifest; sizes are always compared.
            suffix_store_tokens: tokens of earlier outputs that the method ``suffix`` looks in too, at about half a
                kilobyte each; the oldest go first. 0 for none. It changes how much is accepted, never what is said.

        Raises:
            BundleError: the bundle is incomplete, altered or too new.
            BackendError: its backend is not installed or refuses a graph.
            RequestError: a store was asked for that is too small, or of a bundle without the method.
        """
        opened = Bundle.open(bundle, check_hashes=check_hashes)
        manifest = opened.manifest
        if suffix_store_tokens and manifest.method("suffix") is None:
            raise RequestError(
                f"suffix_store_tokens is {suffix_store_tokens}, but the bundle was built without the method suffix; "
                "build it with --suffix"
            )
        target = open_graph(opened, manifest.target, 1, step_buffers(manifest), threads)
        speculations = {
            method_name(method): Speculation(
                open_proposer(opened, method, 1, threads, suffix_store_tokens), method.token_trees()
            )
            for method in manifest.methods
        }
        return cls(opened, target, speculations)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the models and their caches; later requests are refused.

        Another thread's running request is waited for; a stream this thread has not finished ends.
        """
        self._closed = True
        stream = self._running() if self._running is not None and self._holder == threading.get_ident() else None
        if stream is not None:
            stream.close()
        with self._slot:
            if hasattr(self, "_target"):
                del self._target, self.speculations

    def defaults(self) -> SamplingParams:
        """The model's own sampling parameters, as its checkpoint states them."""
        return SamplingParams(**msgspec.structs.asdict(self.manifest.generation))

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, with the tokenizer's own special tokens; an empty prompt becomes its start token.

        Raises:
            RequestError: a token id is outside the vocabulary, or the prompt is empty and no start token is known.
        """
        tokens = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else [int(token) for token in prompt]
        if not tokens:
            info = self.manifest.tokenizer
            start = self.tokenizer.token_to_id(info.special_tokens.get("bos_token", ""))
            if start is None and not info.eos_token_ids:
                raise RequestError("the prompt is empty and the tokenizer has no start token; give at least one token")
            tokens = [start if start is not None else info.eos_token_ids[0]]
        limit = self.manifest.target.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < limit), None)
        if wrong is not None:
            raise RequestError(f"the prompt holds token {wrong}; the model has tokens 0 to {limit - 1}")
        return tokens

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: bool = True,
        method: str | None = None,
        num_speculative_tokens: int | None = None,
        hypothesis: str | Sequence[int] | None = None,
        hypothesis_entropy: float | None = None,
    ) -> Stream:
        """Starts a request; text comes as the returned stream is iterated.

        Args:
            prompt: text, or token ids.
            params: None for :meth:`defaults`.
            speculation: False decodes plainly, for comparison.
            method: how to speculate, one of the bundle's; None for its default.
            num_speculative_tokens: draft tokens a step, which choose one of the trees the bundle was built for; None
                for its default.
            hypothesis: what the output is expected to be, text or token ids; chooses the method ``hypothesis``.
            hypothesis_entropy: how unsure whoever made it was where that was worst, in nats; for relaxed acceptance
                with an ``entropy_threshold``.

        Raises:
            RequestError: the prompt does not fit the context, the method or the tree was not built, a hypothesis was
                given without a use for it or the other way round, or the engine is closed.
        """
        if self._closed:
            raise RequestError("the engine is closed; load the bundle again")
        params = params or self.defaults()
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream is one output: start several, or use LLM")
        tokens = self.encode(prompt)
        limit = self.manifest.max_seq_len
        if len(tokens) >= limit and params.max_tokens:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, but this bundle's context holds {limit}, output included; "
                "shorten the prompt or build with a larger --max-seq-len"
            )
        own = self.manifest.generation
        params = params.replace(
            posterior_threshold=own.posterior_threshold
            if params.posterior_threshold is None
            else params.posterior_threshold,
            posterior_alpha=own.posterior_alpha if params.posterior_alpha is None else params.posterior_alpha,
        )
        check_hypothesis(params, speculation, method, hypothesis, hypothesis_entropy)
        if hypothesis is None:
            chosen, tree = self._choose(method, num_speculative_tokens) if speculation else (None, _ROOT)
            return Stream(self, tokens, params, chosen, tree)
        chosen, tree = self._choose(HYPOTHESIS, num_speculative_tokens)
        expected = continuation(self, prompt, hypothesis)
        if taken_as_it_is(params, hypothesis_entropy):
            room = min(params.max_tokens, limit - len(tokens))
            return Stream(
                Unverified(self.tokenizer, self.manifest.tokenizer.eos_token_ids, room),
                tokens,
                params,
                None,
                _ROOT,
                expected,
            )
        return Stream(self, tokens, params, chosen, tree, expected)

    def _choose(self, method: str | None, draft_tokens: int | None) -> tuple[str | None, TokenTree]:
        """The method and tree of a request that speculates; none where the bundle has no way to."""
        if method == HYPOTHESIS and method not in self.speculations:
            raise RequestError("a hypothesis was given, but the bundle was built without the method; use --hypothesis")
        if method is None:
            method = next((name for name in self.speculations if name != HYPOTHESIS), None)
            if method is None and draft_tokens is None:
                return None, _ROOT
        if not self.speculations or method is None:
            asked = f"method is {method!r}" if method else f"num_speculative_tokens is {draft_tokens}"
            raise RequestError(f"{asked}, but the bundle was built without a way to speculate")
        if method not in self.speculations:
            raise RequestError(f"method is {method!r}; the bundle was built for {', '.join(self.speculations)}")
        trees = self.speculations[method].trees
        if draft_tokens is None:
            return method, trees[0]
        tree = next((tree for tree in trees if len(tree) == draft_tokens + 1), None)
        if tree is None:
            built = ", ".join(map(str, sorted(len(tree) - 1 for tree in trees)))
            raise RequestError(f"num_speculative_tokens is {draft_tokens}; the bundle was built for {built}")
        return method, tree

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: bool = True,
        method: str | None = None,
        num_speculative_tokens: int | None = None,
        hypothesis: str | Sequence[int] | None = None,
        hypothesis_entropy: float | None = None,
    ) -> Completion:
        """Runs a request to its end; see :meth:`stream`."""
        return completed(
            self.stream(
                prompt,
                params,
                speculation=speculation,
                method=method,
                num_speculative_tokens=num_speculative_tokens,
                hypothesis=hypothesis,
                hypothesis_entropy=hypothesis_entropy,
            )
        )

    def _warm_up(self) -> None:
        """Runs a plain step and one of each method, so that the first request does not pay for buffers and pages."""
        # Repeats, so that there is something to look up; long enough for the longest chain.
        start = self.encode([0] * max(2, min(_WARM_UP_TOKENS, self.manifest.max_seq_len - 2)))
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        for method, tree in ((None, _ROOT), *(self._choose(name, None) for name in self.speculations)):
            for _ in Stream(self, list(start), params, method, tree, start):
                pass

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run(self, stream: Stream) -> Iterator[Chunk]:
        """One request from prefill to finish. The target's cache holds all tokens but the last, the step's root."""
        params, stats, tokens = stream.params, stream.stats, stream.tokens
        began = time.perf_counter()
        view = SlotView(0, tokens, params, np.random.default_rng(params.seed), stream.tree, stream.hypothesis)
        proposer = self.speculations[stream.method].proposer if stream.method is not None else None
        text = TextStream(self.tokenizer, params.stop)
        room = min(params.max_tokens, self.manifest.max_seq_len - len(tokens))
        reason: FinishReason | None = "length" if room <= 0 else None
        paused = 0.0
        try:
            if reason is None:
                self._prefill(view, proposer)
                stats.prefill = time.perf_counter() - began
            while reason is None and not stream.cancelled:
                start = time.perf_counter()
                proposal = proposer.propose([view]).get(0) if proposer is not None and room > 1 else None
                proposed = time.perf_counter()
                outputs = self._verify(view, proposal)
                verified = time.perf_counter()
                path, bonus = _accept(outputs[tensors.LOGITS][view.slot], proposal, view)
                decided = time.perf_counter()
                if proposer is not None:
                    proposer.observe(view.slot, outputs, path[-1] if path else 0)
                new = [*(int(proposal.tokens[node - 1]) for node in path), bonus] if proposal else [bonus]
                self._target.commit(view.slot, len(tokens) - 1, [0, *path])
                new, piece, reason = self._commit(stream, new[:room], text)
                said = (
                    token_logprobs(outputs[tensors.LOGITS][view.slot], [0, *path], new, params.logprobs)
                    if params.logprobs is not None
                    else ()
                )
                room -= len(new)
                if reason is None and room == 0:
                    reason = "length"
                if proposal is None:
                    stats.count_step()
                else:
                    stats.count_step(len(proposal.tokens), proposal.tree.depth, len(path))
                stats.propose += proposed - start
                stats.verify += verified - proposed
                stats.accept += decided - verified
                if reason is not None:
                    piece += text.finish()
                end = time.perf_counter()
                stats.host += end - decided
                stats.first_token = stats.first_token or end - began - paused
                stats.total = end - began - paused
                yield Chunk(piece, tuple(new), reason, said)
                paused += time.perf_counter() - end
            if stats.steps == 0 or reason is None:
                yield Chunk(text.finish(), (), reason or "cancelled")
        finally:
            if proposer is not None:
                proposer.release(view.slot)

    def _prefill(self, view: SlotView, proposer: Proposer | None) -> None:
        """Runs the prompt through the target in chunks, all but its last token, which is the first step's root."""
        chunk, tokens, slot = self.manifest.prefill_chunk, view.tokens[:-1], view.slot
        for done in range(0, len(tokens), chunk):
            part = tokens[done : done + chunk]
            self._target.reserve(done + chunk)
            given = self._target.inputs(chunk, 1)
            given[tensors.INPUT_IDS][slot, : len(part)] = part
            given[tensors.POSITION_IDS][slot] = self._positions(done, TokenTree.chain(chunk))
            given[tensors.PAST_LENGTH][slot] = done
            given[tensors.LOGITS_ROWS][slot] = len(part) - 1
            outputs = self._target.run(chunk, 1)
            self._target.commit(slot, done, range(len(part)))
            if proposer is not None:
                proposer.observe(slot, outputs, 0)

    def _verify(self, view: SlotView, proposal: Proposal | None) -> dict[str, Array]:
        """What the target says at the root and at every draft token of the tree; rows go into its cache."""
        step = None if proposal is None else proposal.window or proposal
        tree = step.tree if step is not None else _ROOT
        past = len(view.tokens) - 1
        self._target.reserve(past + len(tree))
        given = self._target.inputs(len(tree), len(tree))
        given[tensors.INPUT_IDS][view.slot, 0] = view.tokens[-1]
        if step is not None:
            given[tensors.INPUT_IDS][view.slot, 1:] = step.tokens
        given[tensors.POSITION_IDS][view.slot] = self._positions(past, tree)
        given[tensors.TREE_MASK][view.slot] = tree.mask
        given[tensors.PAST_LENGTH][view.slot] = past
        return self._target.run(len(tree), len(tree))

    def _positions(self, past: int, tree: TokenTree) -> npt.NDArray[np.int64]:
        # A step at the end of the context reaches past it; what it computes there is cut off by `room`.
        return np.minimum(past + tree.depths, self.manifest.target.max_positions - 1)

    def _commit(self, stream: Stream, new: list[int], text: TextStream) -> tuple[list[int], str, FinishReason | None]:
        """Adds tokens up to an end of text or a stop text: those kept, their text, and why the output ends if so."""
        ends = stream.params.stop_token_ids
        if not stream.params.ignore_eos:
            ends += self.manifest.tokenizer.eos_token_ids
        piece = ""
        for count, token in enumerate(new, start=1):
            stream.tokens.append(token)
            stream.stats.output_tokens += 1
            if token in ends:
                return new[:count], piece, "stop"
            piece += text.push(token)
            if text.stopped:
                return new[:count], piece, "stop"
        return new, piece, None

    def _acquire(self, stream: Stream) -> None:
        me = threading.get_ident()
        if self._holder == me:
            raise RequestError(
                "this thread has an unfinished stream on the engine, which runs one request at a time; finish it or "
                "call its close() first"
            )
        self._slot.acquire()
        if self._closed:
            self._slot.release()
            raise RequestError("the engine is closed; load the bundle again")
        self._holder, self._running = me, weakref.ref(stream)

    def _release(self) -> None:
        self._holder = self._running = None
        self._slot.release()


def _accept(logits: npt.NDArray[np.float32], proposal: Proposal | None, view: SlotView) -> tuple[list[int], int]:
    """The nodes of the proposal's tree that are accepted, and the token after them."""
    tree, drafted, q = (
        (_ROOT, np.empty(0, np.int64), None) if proposal is None else (proposal.tree, proposal.tokens, proposal.q)
    )
    logits = logits[: len(tree)]
    if view.params.acceptance == "relaxed":
        return accept_relaxed(logits, tree, drafted, view.params, view.random.random())
    if view.params.greedy:
        return accept_greedy(logits, tree, drafted)
    if view.params.acceptance == "typical":
        return accept_typical(logits, tree, drafted, view.params, view.random.random())
    return accept_sampled(logits, tree, drafted, q, view.params, view.random.random(len(tree)))
