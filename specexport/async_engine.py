"""``AsyncEngine`` runs the requests of a service: as many at once as there are slots, the rest in a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

from specexport.contract.errors import ClosedError, DeadlineError, QueueFullError, RequestError, SpecExportError
from specexport.contract.options import keywords
from specexport.contract.values import counted, shown
from specexport.frontend import Frontend
from specexport.options import ServiceOptions
from specexport.runtime import Chunk, SamplingParams, Stats, Stream, TokenLogprobs
from specexport.runtime.params import require_params
from specexport.runtime.prompt import Prompt
from specexport.runtime.speculative import SpeculativeLike

_SMOOTHING = 0.1
"""Weight of the latest request in the mean duration that Retry-After is computed from."""


@dataclass(eq=False)
class _Request:
    """One output: a thread iterates its stream and puts chunks into a queue of the event loop."""

    stream: Stream
    loop: asyncio.AbstractEventLoop
    arrived: float
    items: asyncio.Queue[Chunk | BaseException] = field(default_factory=asyncio.Queue)
    work: Future[None] | None = None
    started: float | None = None
    timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        """Runs the request in a thread of the pool."""
        self.started = time.monotonic()
        try:
            with self.stream as stream:
                for chunk in stream:
                    self.post(chunk)
        except Exception as error:  # passed on to the consumer
            self.post(error)

    def post(self, item: Chunk | BaseException) -> None:
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:  # the loop is closed
            self.stream.cancel()

    def cancel(self, error: SpecExportError | None = None) -> None:
        """Ends the request before its next step, or removes it from the queue."""
        if error is not None:  # before the last chunk of the stream, which its thread may post at once
            self.post(error)
        self.stream.cancel()
        if self.work is not None and self.work.cancel() and error is None:
            self.post(Chunk("", (), "cancelled"))


class AsyncStream:
    """The output of a request, an asynchronous iterator of :class:`Chunk`; also a context manager.

    The request runs whether the output is iterated or not, and is cancelled when the stream is closed or dropped.

    Attributes:
        stats: the request's counters, up to date after every chunk.
        arrived: time at which the request arrived, by ``time.monotonic()``.
    """

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._ended = False
        self.stats: Stats = request.stream.stats
        self.arrived = request.arrived

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt's tokens from the second on, if requested; complete at the first chunk."""
        return self._request.stream.prompt_logprobs

    @property
    def started(self) -> float | None:
        """Time at which the request got a slot, by ``time.monotonic()``; None while it waits."""
        return self._request.started

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            DeadlineError: the request's time is up.
            ClosedError: the engine is shutting down.
        """
        if self._ended:
            raise StopAsyncIteration
        items = self._request.items
        item = await items.get()
        if self._ended:  # another task had the end meanwhile
            items.put_nowait(item)
            raise StopAsyncIteration
        if isinstance(item, BaseException) or item.finish_reason is not None:
            self._ended = True
            items.put_nowait(item)  # wakes other tasks that wait for a chunk
        if isinstance(item, BaseException):
            raise item
        return item

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def aclose(self) -> None:
        """Cancels it, as a generator's ``aclose`` does, for ``contextlib.aclosing``."""
        self.cancel()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot be pickled or copied; its chunks can")

    def __del__(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the request before its next step, or removes it from the queue; does nothing if it has ended."""
        self._request.cancel()


class AsyncEngine:
    """Serves requests to coroutines of one event loop.

    >>> engine = AsyncEngine.open(bundle="bundle/")  # doctest: +SKIP
    >>> async for chunk in engine.generate("one two"):  # doctest: +SKIP
    ...     print(chunk.text, end="")

    Args:
        frontend: the engine and the defaults of its requests.
        max_queue: maximum number of requests that wait for a slot.

    Attributes:
        closed: whether new requests are refused.
    """

    def __init__(self, frontend: Frontend, *, max_queue: int = 128) -> None:
        self.frontend = frontend
        self.max_queue = max_queue
        self.slots = frontend.engine.slots
        self._threads = ThreadPoolExecutor(self.slots, thread_name_prefix="specexport-request")
        self._live: set[_Request] = set()
        self.closed = False
        self._seconds = 0.0

    @classmethod
    @keywords(ServiceOptions)
    def open(cls, *args: Any, **keys: Any) -> AsyncEngine:
        """Opens a bundle or a model; arguments and errors are the same as ``LLM``'s, besides ``max_queue``."""
        options = ServiceOptions.from_keywords(*args, **keys)
        keys.pop("max_queue", None)
        return cls(Frontend.open(*args, **keys), max_queue=options.max_queue)

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        return sum(request.started is not None for request in tuple(self._live))

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._live) - self.running

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculative: SpeculativeLike | None = None,
        timeout: float | None = None,
    ) -> AsyncStream:
        """Starts a request; must be called in the event loop.

        See :meth:`~specexport.runtime.engine.Engine.stream` for the other arguments.

        Args:
            timeout: seconds after which the request is ended, waiting included; None for no limit.

        Raises:
            RequestError: a parameter cannot be honoured, or the prompt does not fit.
            QueueFullError: too many requests wait.
            ClosedError: the engine shuts down.
        """
        self.require_place()
        require_params(params)
        if params is not None and params.n != 1:
            raise RequestError(f"n is {params.n}; a stream is one output, start several", param="n")
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise RequestError(f"timeout is {shown(timeout)}; expected a number > 0, or None", param="timeout")
        return self.start(self.frontend.streams(prompt, params, speculative), timeout)[0]

    def require_place(self, arriving: int = 0, outputs: int = 1) -> None:
        """Refuses a request when the queue is full, before any work on it.

        Args:
            arriving: number of requests whose bodies are being read; counts if it exceeds the present requests.
            outputs: number of streams to start.

        Raises:
            RequestError: the queue is too small for so many outputs.
            QueueFullError: too many requests wait.
            ClosedError: the engine shuts down.
        """
        if self.closed:
            raise ClosedError("the server is shutting down; send the request again later")
        limit = self.slots + self.max_queue
        if outputs > limit:
            raise RequestError(
                f"the request asks for {outputs} outputs; this server takes at most {limit} at once", param="n"
            )
        if max(len(self._live), arriving) + outputs > limit:
            wait = self._wait()
            raise QueueFullError(
                f"the queue is full: at most {counted(self.max_queue, 'request')} may wait for "
                f"{counted(self.slots, 'slot')}; try again in {counted(wait, 'second')}",
                wait,
            )

    def _wait(self) -> int:
        """Seconds until all present requests have had a slot: the longest wait of a request admitted now."""
        now = time.monotonic()
        running = [now - request.started for request in tuple(self._live) if request.started is not None]
        # If no request has ended yet, or lately, the running requests give a lower bound.
        duration = max(self._seconds, sum(running) / len(running) if running else 0.0)
        return max(1, math.ceil(duration * len(self._live) / self.slots))

    def start(self, streams: Sequence[Stream], timeout: float | None = None) -> list[AsyncStream]:
        """Starts streams of the frontend, all or none; see :meth:`generate`."""
        self.require_place(0, len(streams))
        loop = asyncio.get_running_loop()
        requests = [_Request(stream, loop, time.monotonic()) for stream in streams]
        for request in requests:
            self._live.add(request)
            request.work = self._threads.submit(request.run)
            request.work.add_done_callback(lambda _, request=request: self._finished(request))  # type: ignore[misc]
            if timeout is not None:
                error = DeadlineError(f"the request did not finish within {timeout:g} seconds")
                request.timer = loop.call_later(timeout, request.cancel, error)
        return [AsyncStream(request) for request in requests]

    async def drain(self, timeout: float) -> None:
        """Refuses new requests, and ends present requests that take more than ``timeout`` further seconds."""
        self.closed = True
        until = time.monotonic() + timeout
        while self._live and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for request in tuple(self._live):
            request.cancel(ClosedError("the server shut down before the request was done; send it again later"))
        while self._live:
            await asyncio.sleep(0.005)

    async def aclose(self) -> None:
        """Ends every request and frees the engine."""
        await self.drain(0)
        self._threads.shutdown()
        await asyncio.to_thread(self.frontend.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _finished(self, request: _Request) -> None:
        """Forgets a request; called in the thread that ended it."""
        self._live.discard(request)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            request.loop.call_soon_threadsafe(self._account, request)

    def _account(self, request: _Request) -> None:
        if request.timer is not None:
            request.timer.cancel()
        if request.started is not None:
            duration = time.monotonic() - request.started
            self._seconds = duration if not self._seconds else self._seconds + _SMOOTHING * (duration - self._seconds)
