"""One request while it runs: its text so far, and its unread chunks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from specexport.runtime.acceptance import History
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.proposal import SlotView
from specexport.runtime.stats import Stats
from specexport.runtime.step_program import Outcome, Verified
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
        logprobs: of each new token, if the request asks for them.
        pieces: the text that each token released, one piece a token; together they are ``text`` if there are any.
        verified: the tree of the step; None for a plain one.
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
        view: its part that step programs see: the prompt, to which the output is appended, and the next step's tree.
        tree: the tree that it asked for; a step may verify a smaller one.
        fixed: whether it set its number of draft tokens.
        lookup: a look-up method that may propose in a step instead of its own.
        stats: its counters.
        history: its acceptance so far.
        remaining: tokens it may still generate.
        read: whether its prompt is read, so that steps may begin.
        began: the scheduler's clock when it was submitted.
        owner: the thread that started it.
        chunks: its unread chunks.
        finished: whether it has its last chunk.
        cancelled: whether it is to end before its next step, with a last chunk.
        abandoned: whether nobody will read its chunks.
        error: why it ended without a last chunk.
    """

    def __init__(self, view: SlotView, text: TextStream, remaining: int, ends: Sequence[int]) -> None:
        self.view = view
        self.tree = view.tree
        self.fixed = False
        self.lookup: str | None = None
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
    def ready(self) -> bool:
        """Whether its reader need not wait."""
        return bool(self.chunks) or self.finished or self.abandoned or self.error is not None

    @property
    def over(self) -> bool:
        """Whether it needs no further step."""
        return self.finished or self.cancelled or self.abandoned or self.error is not None

    def take(self, outcome: Outcome, *, last: bool = False) -> Chunk:
        """Appends a step's tokens to the text, up to its end; returns the chunk of output."""
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

    def give(self, chunk: Chunk) -> None:
        """Queues a chunk for its reader."""
        self.finished = chunk.finish_reason is not None
        self.chunks.append(chunk)

    def end(self, reason: FinishReason) -> None:
        """Ends it without a step; its last chunk is the text that was held back."""
        self.give(Chunk(self._text.finish(), (), reason))
