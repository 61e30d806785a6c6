"""The engine: a loaded bundle, and the loop propose -> verify -> accept -> commit."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.errors import RequestError
from specexport.contract.manifest import DraftModel, Manifest
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Graph, open_graph, propose_buffers, step_buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposers import DraftModelProposer, Proposal, Proposer, SlotView
from specexport.runtime.sampling import accept_greedy, accept_sampled, accept_typical
from specexport.runtime.stats import Stats
from specexport.runtime.text import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Chunk:
    """What one step added to the output.

    Attributes:
        text: new text; may be empty while a character or a possible stop text is unfinished.
        token_ids: new tokens.
        finish_reason: set on the last chunk: ``stop`` (end of text or a stop text), ``length`` (``max_tokens`` or the
            end of the context) or ``cancelled``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """A finished output.

    Attributes:
        text: without the stop text.
        token_ids: every token generated, an end-of-text token included.
        finish_reason: see :class:`Chunk`.
        stats: what it cost.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats


class Engine:
    """Generates text from a bundle; made by :meth:`load`.

    It has one slot: one request runs at a time. Methods may be called from any thread; a request waits until the one
    before it is finished, closed or cancelled. A thread that holds an unfinished stream cannot start another request
    (it would wait for itself) and gets an error instead.
    """

    def __init__(self, bundle: Bundle, target: Graph, proposer: Proposer | None) -> None:
        self.manifest: Manifest = bundle.manifest
        self.tokenizer = bundle.tokenizer()
        self._target = target
        self._proposer = proposer
        self._slot = threading.Lock()
        self._holder: int | None = None
        self._running: weakref.ref[Stream] | None = None
        self._closed = False
        self._warm_up()

    @classmethod
    def load(cls, bundle: str | Path, *, threads: int | None = None, check_hashes: bool = True) -> Engine:
        """Opens a bundle and loads its graphs.

        Args:
            bundle: a folder made by ``specexport build``.
            threads: CPU threads; None for every core this process may use.
            check_hashes: compare every file's SHA-256 with the manifest; sizes are always compared.

        Raises:
            BundleError: the bundle is incomplete, altered or too new.
            BackendError: its backend is not installed or refuses a graph.
        """
        opened = Bundle.open(bundle, check_hashes=check_hashes)
        manifest = opened.manifest
        target = open_graph(opened, manifest.target, 1, step_buffers(manifest), threads)
        proposer: Proposer | None = None
        if isinstance(manifest.method, DraftModel):
            method = manifest.method
            draft = open_graph(opened, method.draft, 1, propose_buffers(method), threads)
            proposer = DraftModelProposer(draft, manifest)
        return cls(opened, target, proposer)

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
                del self._target, self._proposer

    def defaults(self) -> SamplingParams:
        """The model's own sampling parameters, as its checkpoint states them."""
        own = self.manifest.generation
        return SamplingParams(temperature=own.temperature, top_p=own.top_p, top_k=own.top_k, min_p=own.min_p)

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
        num_speculative_tokens: int | None = None,
    ) -> Stream:
        """Starts a request; text comes as the returned stream is iterated.

        Args:
            prompt: text, or token ids.
            params: None for :meth:`defaults`.
            speculation: False decodes plainly, for comparison.
            num_speculative_tokens: K for this request, one the bundle was built for; None for the bundle's default.

        Raises:
            RequestError: the prompt does not fit the context, K was not built, or the engine is closed.
        """
        if self._closed:
            raise RequestError("the engine is closed; load the bundle again")
        params = params or self.defaults()
        tokens = self.encode(prompt)
        limit = self.manifest.max_seq_len
        if len(tokens) >= limit and params.max_tokens:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, but this bundle's context holds {limit}, output included; "
                "shorten the prompt or build with a larger --max-seq-len"
            )
        K = self._draft_tokens(num_speculative_tokens) if speculation else 0
        return Stream(self, tokens, params, K)

    def _draft_tokens(self, wanted: int | None) -> int:
        """K for a request that speculates; 0 where the bundle has no way to."""
        method = self.manifest.method
        if not isinstance(method, DraftModel):
            if wanted:
                raise RequestError(f"num_speculative_tokens is {wanted}, but the bundle was built without a draft")
            return 0
        if wanted is not None and wanted not in method.choices:
            built = ", ".join(map(str, method.choices))
            raise RequestError(f"num_speculative_tokens is {wanted}; the bundle was built for {built}")
        return method.num_speculative_tokens if wanted is None else wanted

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: bool = True,
        num_speculative_tokens: int | None = None,
    ) -> Completion:
        """Runs a request to its end; see :meth:`stream`."""
        with self.stream(
            prompt, params, speculation=speculation, num_speculative_tokens=num_speculative_tokens
        ) as stream:
            chunks = list(stream)
        reason = chunks[-1].finish_reason
        assert reason is not None
        text = "".join(chunk.text for chunk in chunks)
        return Completion(text, tuple(t for chunk in chunks for t in chunk.token_ids), reason, stream.stats)

    def _warm_up(self) -> None:
        """Runs one plain and one speculative step, so that the first request does not pay for buffers and pages."""
        start = self.encode([0, 0])
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        for K in {0, self._draft_tokens(None)}:
            for _ in Stream(self, list(start), params, K):
                pass

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run(self, stream: Stream) -> Iterator[Chunk]:
        """One request from prefill to finish. The target's cache holds all tokens but the last, the step's root."""
        params, stats, tokens = stream.params, stream.stats, stream.tokens
        began = time.perf_counter()
        view = SlotView(0, tokens, params, np.random.default_rng(params.seed), stream.num_speculative_tokens)
        proposer = self._proposer if view.num_speculative_tokens else None
        text = TextStream(self.tokenizer, params.stop)
        room = min(params.max_tokens, self.manifest.max_seq_len - len(tokens))
        reason: FinishReason | None = "length" if room <= 0 else None
        paused = 0.0
        try:
            if reason is None:
                self._prefill(tokens[:-1])
                stats.prefill = time.perf_counter() - began
            while reason is None and not stream.cancelled:
                start = time.perf_counter()
                proposal = proposer.propose([view]).get(0) if proposer is not None and room > 1 else None
                proposed = time.perf_counter()
                logits = self._verify(view, proposal)
                verified = time.perf_counter()
                path, bonus = _accept(logits, proposal, view)
                decided = time.perf_counter()
                new = [*(int(proposal.tokens[node - 1]) for node in path), bonus] if proposal else [bonus]
                if path != list(range(1, len(path) + 1)):  # a chain's rows are where they belong already
                    self._target.commit(view.slot, len(tokens) - 1, path)
                new, piece, reason = self._commit(stream, new[:room], text)
                room -= len(new)
                if reason is None and room == 0:
                    reason = "length"
                stats.count_step(len(proposal.tokens) if proposal else 0, len(path))
                stats.propose += proposed - start
                stats.verify += verified - proposed
                stats.accept += decided - verified
                if reason is not None:
                    piece += text.finish()
                end = time.perf_counter()
                stats.host += end - decided
                stats.first_token = stats.first_token or end - began - paused
                stats.total = end - began - paused
                yield Chunk(piece, tuple(new), reason)
                paused += time.perf_counter() - end
            if stats.steps == 0 or reason is None:
                yield Chunk(text.finish(), (), reason or "cancelled")
        finally:
            if self._proposer is not None:
                self._proposer.release(0)

    def _prefill(self, tokens: list[int]) -> None:
        """Runs the prompt through the target in chunks; logits are not needed, the last token is the first root."""
        chunk = self.manifest.prefill_chunk
        for done in range(0, len(tokens), chunk):
            part = tokens[done : done + chunk]
            self._target.reserve(done + chunk)
            given = self._target.inputs(chunk)
            given[tensors.INPUT_IDS][0, : len(part)] = part
            given[tensors.POSITION_IDS][0] = self._positions(done, TokenTree.chain(chunk))
            given[tensors.PAST_LENGTH][0] = done
            given[tensors.LOGITS_ROWS][0] = len(part) - 1
            self._target.run(chunk)

    def _verify(self, view: SlotView, proposal: Proposal | None) -> npt.NDArray[np.float32]:
        """The target's logits at the root and at every draft token, float32 ``[1+K,V]``; rows go into its cache."""
        tree = proposal.tree if proposal is not None else TokenTree.chain(1)
        past = len(view.tokens) - 1
        self._target.reserve(past + len(tree))
        given = self._target.inputs(len(tree))
        given[tensors.INPUT_IDS][view.slot, 0] = view.tokens[-1]
        if proposal is not None:
            given[tensors.INPUT_IDS][view.slot, 1:] = proposal.tokens
        given[tensors.POSITION_IDS][view.slot] = self._positions(past, tree)
        given[tensors.TREE_MASK][view.slot] = tree.mask
        given[tensors.PAST_LENGTH][view.slot] = past
        logits: npt.NDArray[np.float32] = self._target.run(len(tree))[tensors.LOGITS][view.slot]
        return logits

    def _positions(self, past: int, tree: TokenTree) -> npt.NDArray[np.int64]:
        # A step at the end of the context reaches past it; what it computes there is cut off by `room`.
        return np.minimum(past + tree.depths, self.manifest.target.max_positions - 1)

    def _commit(self, stream: Stream, new: list[int], text: TextStream) -> tuple[list[int], str, FinishReason | None]:
        """Adds tokens up to an end of text or a stop text: those kept, their text, and why the output ends if so."""
        ends = () if stream.params.ignore_eos else self.manifest.tokenizer.eos_token_ids
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
        (TokenTree.chain(1), np.empty(0, np.int64), None)
        if proposal is None
        else (proposal.tree, proposal.tokens, proposal.q)
    )
    if view.params.greedy:
        return accept_greedy(logits, tree, drafted)
    if view.params.acceptance == "typical":
        return accept_typical(logits, tree, drafted, view.params, view.random.random())
    return accept_sampled(logits, tree, drafted, q, view.params, view.random.random(len(tree)))


class Stream:
    """The output of one request, an iterator of :class:`Chunk`; also a context manager.

    The request starts at the first iteration and holds the engine's slot until it ends, is closed, or is cancelled.

    Attributes:
        tokens: prompt and output so far.
        params: how it samples.
        stats: its counters, up to date after every chunk.
        num_speculative_tokens: K, draft tokens proposed a step; 0 decodes plainly.
        cancelled: whether :meth:`cancel` was called.
    """

    def __init__(self, engine: Engine, tokens: list[int], params: SamplingParams, K: int) -> None:
        self.tokens = tokens
        self.params = params
        self.num_speculative_tokens = K
        self.stats = Stats(prompt_tokens=len(tokens))
        self.cancelled = False
        self._engine = engine
        self._chunks: Iterator[Chunk] | None = None
        self._ended = False
        self._step = threading.RLock()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self._chunks is None and not self._ended:
            # Without the lock: a stream that waits for its turn can still be closed.
            self._engine._acquire(self)
            with self._step:
                if self._ended:
                    self._engine._release()
                else:
                    self._chunks = self._engine._run(self)
        with self._step:
            if self._ended or self._chunks is None:
                raise StopIteration
            try:
                chunk = next(self._chunks)
            except BaseException:
                self.close()
                raise
            if chunk.finish_reason is not None:
                self.close()
            return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def cancel(self) -> None:
        """Ends the request before its next step; may be called from another thread."""
        self.cancelled = True

    def close(self) -> None:
        """Ends the request and frees the engine's slot, after the step another thread may be in; then does nothing."""
        with self._step:
            if self._ended:
                return
            self._ended = True
            if self._chunks is not None:
                self._chunks.close()  # type: ignore[attr-defined]
                self._engine._release()
