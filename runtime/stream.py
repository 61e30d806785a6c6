"""A request's output, while it runs and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specexport.contract.tree import TokenTree
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Chunk, FinishReason, Request
from specexport.runtime.stats import Stats


@dataclass(frozen=True)
class Completion:
    """A finished output.

    Attributes:
        text: the output without the stop text.
        token_ids: every generated token, an end-of-text token included.
        finish_reason: see :class:`Chunk`.
        stats: its counters.
        logprobs: of each token, if the request asks for them.
        prompt_logprobs: of the prompt's tokens from the second on, if the request asks for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


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
        stream.prompt_logprobs,
    )


class _Runner(Protocol):
    """The part of the scheduler that a stream uses."""

    def submit(self, request: Request) -> None: ...

    def next_chunk(self, request: Request) -> Chunk | None: ...

    def abandon(self, request: Request) -> None: ...


class Stream:
    """The output of one request, an iterator of :class:`Chunk`; also a context manager.

    The request joins the engine's batch at the first iteration, or when :meth:`start` is called, and leaves it when it
    ends, is closed or cancelled, or the stream is dropped. It makes progress whenever any stream of the engine is read.
    """

    def __init__(self, runner: _Runner, request: Request) -> None:
        self._runner = runner
        self._request = request
        self._started = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far; negative numbers where the prompt has embeddings."""
        return self._request.view.tokens

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters."""
        return self._request.view.params

    @property
    def method(self) -> str | None:
        """Its method; None decodes plainly."""
        return self._request.view.method

    @property
    def tree(self) -> TokenTree:
        """The tree that it asks for; steps may verify smaller ones. The root alone for plain decoding."""
        return self._request.tree

    @property
    def hypothesis(self) -> Sequence[int]:
        """The expected output."""
        return self._request.view.hypothesis

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Those of the prompt's tokens from the second on, if requested: complete with the first chunk."""
        return tuple(self._request.view.prompt_logprobs)

    @property
    def stats(self) -> Stats:
        """Its counters, up to date after every chunk."""
        return self._request.stats

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._request.cancelled

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        self.start()
        chunk = self._runner.next_chunk(self._request)
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Takes no lock: this may run at any moment, in a thread that holds it. Nobody waits for this stream.
        self._request.abandoned = True

    def start(self) -> None:
        """Submits the request now instead of when it is first read.

        Raises:
            RequestError: the engine is closed.
        """
        if not self._started and not self._request.abandoned:
            self._runner.submit(self._request)
            self._started = True

    def cancel(self) -> None:
        """Ends the request before its next step; may be called from another thread."""
        self._request.cancelled = True

    def close(self) -> None:
        """Ends the request; its slot is free before the next step. Unread chunks are dropped."""
        self._runner.abandon(self._request)
