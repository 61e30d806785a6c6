"""What a request gives back, while it runs and when it is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from specexport.contract.tree import TokenTree
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.stats import Stats

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
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished output.

    Attributes:
        text: without the stop text.
        token_ids: every token generated, an end-of-text token included.
        finish_reason: see :class:`Chunk`.
        stats: what it cost.
        logprobs: of each token, if the request asks for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()


def completed(stream: Stream) -> Completion:
    """Runs a stream to its end."""
    with stream:
        chunks = list(stream)
    reason = chunks[-1].finish_reason
    assert reason is not None
    return Completion(
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        reason,
        stream.stats,
        tuple(entry for chunk in chunks for entry in chunk.logprobs),
    )


class _Runner(Protocol):
    """What a stream needs of the engine."""

    def _acquire(self, stream: Stream) -> None: ...

    def _release(self) -> None: ...

    def _run(self, stream: Stream) -> Iterator[Chunk]: ...


class Stream:
    """The output of one request, an iterator of :class:`Chunk`; also a context manager.

    The request starts at the first iteration and holds the engine's slot until it ends, is closed, or is cancelled.

    Attributes:
        tokens: prompt and output so far.
        params: how it samples.
        stats: its counters, up to date after every chunk.
        method: how it speculates; None decodes plainly.
        tree: the tree its steps verify; the root alone where it decodes plainly.
        hypothesis: tokens the output is expected to be.
        cancelled: whether :meth:`cancel` was called.
    """

    def __init__(
        self,
        engine: _Runner,
        tokens: list[int],
        params: SamplingParams,
        method: str | None,
        tree: TokenTree,
        hypothesis: Sequence[int] = (),
    ) -> None:
        self.tokens = tokens
        self.params = params
        self.method = method
        self.tree = tree
        self.hypothesis = hypothesis
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
