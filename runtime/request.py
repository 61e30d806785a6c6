"""Requests: their counters, their state while they run, and their output."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from specexport.runtime.logits import TokenLogprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import SlotView
from specexport.runtime.speculation.acceptance import History
from specexport.runtime.step import Outcome, Verified
from specexport.runtime.text import TextStream

if TYPE_CHECKING:
    from specexport.runtime.scheduler import Scheduler

NO_METHOD = "plain"
"""Counters list plain steps under this name."""
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass
class Stats:
    """Counters of one request. Times are seconds of wall clock.

    Attributes:
        prompt_tokens: length of the prompt.
        output_tokens: tokens generated.
        steps: verify steps, including plain ones.
        drafted: draft tokens verified.
        accepted: draft tokens accepted; in the last step perhaps beyond the output's end.
        accepted_at: number of accepted draft tokens at each depth of the steps' trees.
        steps_with_draft: steps that verified draft tokens.
        steps_by_draft: number of steps by number of draft tokens (0 is plain), for each method that proposed them.
        cached_tokens: tokens of the prompt that were not read, as the cache held them already.
        queued: time until a slot was free.
        prefill: time of reading the prompt, by the target and by a draft.
        stalled: time between its steps in which a chunk of another request's prompt was read.
        propose: time of proposing, for all requests of its steps.
        verify: time of the target's decode and verify runs, for all requests of its steps.
        accept: time of deciding which tokens are accepted, for all requests of its steps.
        host: time of everything else in its steps: bookkeeping and text.
        first_token: time from the start of the request to its first tokens.
        total: time from start to end. Both leave out time in which no stream of the engine was read.
        execution: how the work of steps reached the device: ``host`` without a device, ``plain`` call by call, ``graph
            per engine`` as a captured CUDA graph for each model, ``graph per step`` as one for the whole step.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    steps_with_draft: int = 0
    steps_by_draft: dict[str, dict[int, int]] = field(default_factory=dict)
    queued: float = 0.0
    prefill: float = 0.0
    stalled: float = 0.0
    propose: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    host: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    execution: str = "host"

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a step commits: accepted and bonus tokens, up to the output's end."""
        return self.output_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each depth, the share of steps in which a draft token was accepted there."""
        return [count / self.steps_with_draft for count in self.accepted_at] if self.steps_with_draft else []

    @property
    def decode_seconds(self) -> float:
        """Time after the prefill."""
        return self.stalled + self.propose + self.verify + self.accept + self.host

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of decoding."""
        return self.output_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def count_step(self, method: str, outcome: Outcome) -> None:
        """Counts a step for which ``method`` may have proposed draft tokens."""
        drafted, accepted = outcome.drafted, outcome.accepted
        self.steps += 1
        steps = self.steps_by_draft.setdefault(method if drafted else NO_METHOD, {})
        steps[drafted] = steps.get(drafted, 0) + 1
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self.steps_with_draft += 1
            self.accepted_at += [0] * (outcome.depth - len(self.accepted_at))
            for position in range(accepted):
                self.accepted_at[position] += 1

    def __add__(self, other: Stats) -> Stats:
        """The sums of all counters and times, as of the outputs of a request; ``execution`` is that of the first."""
        names = [field.name for field in dataclasses.fields(self) if field.default == 0]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        accepted_at = [a + b for a, b in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)]
        steps = {name: Counter(counts) for name, counts in self.steps_by_draft.items()}
        for name, counts in other.steps_by_draft.items():
            steps.setdefault(name, Counter()).update(counts)
        by_draft = {name: dict(counts) for name, counts in steps.items()}
        return Stats(**sums, accepted_at=accepted_at, steps_by_draft=by_draft, execution=self.execution)

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures, for JSON."""
        derived = ("acceptance_length", "acceptance_rate", "acceptance_by_position", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class Chunk:
    """The part of an output that one step added.

    Attributes:
        text: new text; may be empty while a character or a possible stop text is unfinished.
        finish_reason: set on the last chunk: ``stop`` (end of text or a stop text), ``length`` (``max_tokens`` or the
            end of the context) or ``cancelled``.
        logprobs: those of each new token, if the request asks for them.
        pieces: the text that each token released, one piece a token; together they are ``text`` if there are any.
        verified: the tree that the step verified; None for a plain step.
        created: its time, by ``time.monotonic()``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    pieces: tuple[str, ...] = ()
    verified: Verified | None = None
    created: float = field(default_factory=time.monotonic, compare=False)


class Request:
    """A request, from its start until its last chunk is read.

    Attributes:
        view: its part that step programs see, such as the prompt, to which the output is appended, and the next tree.
        tree: the tree that it asked for; steps may verify smaller ones.
        fixed: whether it set its number of draft tokens.
        lookup: a look-up method that may propose in a step instead of the request's own method.
        bypass: whether its hypothesis becomes its output, without a step.
        history: the acceptance of its draft tokens so far.
        remaining: number of tokens that it may still generate.
        read: whether its prompt is read, so that steps may begin.
        began: the scheduler's clock when it was submitted.
        owner: the thread that started it.
        chunks: its unread chunks.
        finished: whether it has its last chunk.
        cancelled: whether it ends before its next step, with a last chunk.
        abandoned: whether nobody will read its chunks.
        error: the error that ended it without a last chunk; None if there was none.
    """

    def __init__(self, view: SlotView, text: TextStream, remaining: int, ends: Sequence[int]) -> None:
        self.view = view
        self.tree = view.tree
        self.fixed = False
        self.lookup: str | None = None
        self.bypass = False
        self.stats = Stats(prompt_tokens=view.prompt)
        self.history = History(unread=view.prompt)
        self.remaining = remaining
        self.read = False
        self.began = 0.0
        self.owner: int | None = None
        self.chunks: deque[Chunk] = deque()
        self.finished = self.cancelled = self.abandoned = False
        self.error: BaseException | None = None
        self._text = text
        self._ends = ends

    @property
    def scored(self) -> bool:
        """Whether it asks for the log-probabilities of its prompt."""
        return self.view.params.prompt_logprobs is not None

    @property
    def ended(self) -> bool:
        """Whether it gets no further chunk."""
        return self.finished or self.abandoned or self.error is not None

    @property
    def ready(self) -> bool:
        """Whether a reader of its next chunk need not wait."""
        return bool(self.chunks) or self.ended

    @property
    def over(self) -> bool:
        """Whether it needs no further step."""
        return self.cancelled or self.ended

    def append(self, outcome: Outcome, *, last: bool = False) -> Chunk:
        """Appends a step's tokens to the text, up to the output's end, and returns their chunk.

        ``last`` says that the output ends with these tokens.
        """
        pieces: list[str] = []
        new, stopped = outcome.tokens[: self.remaining], False
        while len(pieces) < len(new) and not stopped:
            token = new[len(pieces)]
            self.view.tokens.append(token)
            stopped = token in self._ends
            pieces.append(self._text.end(token) if stopped else self._text.push(token))
            stopped |= self._text.stopped
        count = len(pieces)
        self.stats.output_tokens += count
        self.remaining -= count
        reason: FinishReason | None = None
        if stopped or (last and count == len(outcome.tokens)):
            reason = "stop"
        elif self.remaining == 0:
            reason = "length"
        if reason is not None and pieces:
            pieces[-1] += self._text.finish()
        text, tokens = "".join(pieces), tuple(new[:count])
        return Chunk(text, tokens, reason, outcome.logprobs[:count], tuple(pieces), outcome.verified)

    def add_chunk(self, chunk: Chunk) -> None:
        """Queues a chunk for its reader."""
        self.finished = chunk.finish_reason is not None
        self.chunks.append(chunk)

    def end(self, reason: FinishReason) -> None:
        """Ends the request without a step; its last chunk is the text held back so far."""
        self.add_chunk(Chunk(self._text.finish(), (), reason))

    def take_hypothesis(self) -> None:
        """Queues the whole hypothesis as its only chunk."""
        began = time.perf_counter()
        chunk = self.append(Outcome(list(self.view.hypothesis)), last=True)
        self.stats.total = self.stats.first_token = time.perf_counter() - began
        self.add_chunk(chunk)


@dataclass(frozen=True)
class Completion:
    """A finished output.

    Attributes:
        text: the output without the stop text.
        token_ids: all generated tokens, including an end-of-text token.
        finish_reason: see :class:`Chunk`.
        logprobs: those of each token, if the request asks for them.
        prompt_logprobs: those of the prompt's tokens from the second on, if the request asks for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Joins the chunks of an output."""
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        chunks[-1].finish_reason,
        tuple(entry for chunk in chunks for entry in chunk.logprobs),
    )


def complete(stream: Stream) -> Completion:
    """Runs a stream to its end."""
    with stream:
        whole = join_chunks(list(stream))
    reason = whole.finish_reason
    assert reason is not None
    return Completion(whole.text, whole.token_ids, reason, stream.stats, whole.logprobs, stream.prompt_logprobs)


class Stream:
    """The output of one request, an iterator of :class:`Chunk`; also a context manager.

    The request joins the engine's batch at the first iteration, or when :meth:`start` is called, and leaves it when it
    ends, is closed or cancelled, or the stream is dropped. It makes progress whenever any stream of the engine is read.

    Attributes:
        tokens: prompt and output so far; negative numbers where the prompt has embeddings.
        method: the name of its method; None decodes plainly.
        hypothesis: the expected output; empty if there is none.
        stats: the request's counters, up to date after every chunk.
    """

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._scheduler = scheduler
        self._request = request
        self._started = False
        view = request.view
        self.tokens: list[int] = view.tokens
        self.params: SamplingParams = view.params
        self.method: str | None = view.method
        self.hypothesis: Sequence[int] = view.hypothesis
        self.stats: Stats = request.stats

    @property
    def ended(self) -> bool:
        """Whether its last chunk is there, though perhaps unread, or it failed."""
        return self._request.ended

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt's tokens from the second on, if requested; complete with the first chunk."""
        return tuple(self._request.view.prompt_logprobs)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        self.start()
        chunk = self._scheduler.next_chunk(self._request)
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot be pickled or copied; its chunks and a Completion can")

    def __del__(self) -> None:
        # Takes no lock: this may run at any moment, in a thread that holds it. Nobody waits for this stream.
        self._request.abandoned = True

    def start(self) -> None:
        """Submits the request now instead of when it is first read.

        Raises:
            ClosedError: the engine is closed.
        """
        if not self._started and not self._request.abandoned:
            self._scheduler.submit(self._request)
            self._started = True

    def cancel(self) -> None:
        """Ends the request before its next step; may be called from another thread."""
        self._request.cancelled = True

    def close(self) -> None:
        """Ends the request; its slot is free before the next step. Unread chunks are dropped."""
        self._scheduler.abandon(self._request)
