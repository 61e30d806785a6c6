"""Continuous batching: requests join and leave between steps, which are taken by the threads that wait for output."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from specexport.contract.errors import BackendError, ClosedError
from specexport.runtime.request import NO_METHOD, Chunk, Request
from specexport.runtime.slots import Slots
from specexport.runtime.speculation.policy import SpeculationPolicy
from specexport.runtime.step import Outcome, StepProgram

_MAX_FAILURES = 3
"""Failed turns in a row after which the engine counts as broken, rather than a request."""
_CLOSED = "the engine is closed; load the bundle again"


_SCHEDULERS: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _freeze_all() -> None:
    """Lets the present steps end: Python would end a daemon thread within one, which aborts the process."""
    for scheduler in list(_SCHEDULERS):
        scheduler.freeze()


class Scheduler:
    """Runs requests in the slots of a step program.

    It has no thread. A thread that waits for a chunk takes turns for all requests while no other thread does, and hands
    over to another waiting thread when its chunk is there. So a single request runs in the thread that reads it, and no
    request is stuck behind a request that nobody reads.

    A turn reads at most one chunk of one prompt and takes one step, so that decoding never stalls for longer than that.
    """

    def __init__(self, program: StepProgram, policy: SpeculationPolicy, reuse: bool) -> None:
        self._program = program
        self._policy = policy
        self._slots = Slots(program, reuse)
        # Reentrant, as the garbage collector may drop a stream while its thread holds it.
        self._lock = threading.RLock()
        # For each waiting thread, a function that says whether its wait is over, and the condition that wakes it.
        self._waiters: list[tuple[Callable[[], bool], threading.Condition]] = []
        self._driving = False
        self._closed = self._frozen = False
        self._process = os.getpid()
        _SCHEDULERS.add(self)
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []  # changed by the thread that drives, under the lock
        # Seconds spent in turns, and the start of the present turn: one tuple, as it is read without the lock.
        self._time: tuple[float, float | None] = (0.0, None)
        self._failed = 0  # number of failed turns since the last that succeeded

    def stall_reason(self, timeout: float) -> str | None:
        """The reason why requests make no progress; None if they do.

        Args:
            timeout: seconds after which a turn counts as stuck.
        """
        if self._failed >= _MAX_FAILURES:
            return f"the last {self._failed} turns failed; the log says why"
        began = self._time[1]
        since = 0.0 if began is None else time.perf_counter() - began
        return f"a turn has taken {since:.0f} seconds" if since > timeout else None

    def require_open(self) -> None:
        """Raises :class:`ClosedError` if the engine is closed."""
        if self._closed:
            raise ClosedError(_CLOSED)

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
            ClosedError: the engine is closed.
        """
        with self._lock:
            request.abandoned = self._closed
            self.require_open()
            request.owner = threading.get_ident()
            request.began = self._clock()
            if request.bypass:
                request.take_hypothesis()
            elif request.remaining <= 0 and not request.scored:
                request.end("length")
            else:
                self._queue.append(request)

    def next_chunk(self, request: Request) -> Chunk | None:
        """Waits for a request's next chunk; None after its last chunk, or if it was abandoned.

        Raises:
            Exception: the error that ended the request before its last chunk.
        """
        if not request.ready:
            self.wait_for(lambda: request.ready)
        with self._lock:
            if request.abandoned:
                return None
            if request.error is not None and not request.chunks:
                request.abandoned = True
                raise request.error
            return request.chunks.popleft() if request.chunks else None

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Waits until ``is_done()``, and takes turns while no other thread does."""
        with self._lock:
            try:
                while not is_done():
                    if self._driving or self._frozen:
                        self._wait(is_done)
                    else:
                        self._drive()
            finally:
                self._hand_over()

    def abandon(self, request: Request) -> None:
        """Ends a request that nobody reads any more before the next step."""
        with self._lock:
            request.abandoned = True
            self._wake_finished()

    def close(self) -> None:
        """Refuses new requests, ends this thread's and the queued requests, and runs the others to their end."""
        with self._lock:
            self._closed = True
            while self._queue:
                self._queue.popleft().error = ClosedError(_CLOSED)
            for request in self._running:
                request.abandoned |= request.owner == threading.get_ident()
            self._wake_finished()
        self.wait_for(lambda: not self._driving and (self._frozen or not self._running))
        with self._lock:
            if hasattr(self, "_program"):
                del self._program, self._slots  # they hold the models, which streams would keep alive

    def freeze(self) -> None:
        """Lets no turn begin any more, and waits for the present one; does nothing in a forked process."""
        if self._process == os.getpid():
            with self._lock:
                self._frozen = True
                while self._driving:
                    self._wait(lambda: not self._driving)

    def _drive(self) -> None:
        """Takes a turn, without the lock."""
        self._driving = True
        self._lock.release()
        try:
            self._turn()
        finally:
            self._lock.acquire()
            self._driving = False
            self._wake_finished()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        waiter = (is_done, threading.Condition(self._lock))
        self._waiters.append(waiter)
        try:
            waiter[1].wait()
        finally:
            self._waiters.remove(waiter)

    def _wake_finished(self) -> None:
        """Wakes threads whose wait is over."""
        for is_done, wake in self._waiters:
            if is_done():
                wake.notify()

    def _hand_over(self) -> None:
        """Wakes a thread that still waits, to take the next turn."""
        if not self._driving:
            next_driver = next((wake for is_done, wake in self._waiters if not is_done()), None)
            if next_driver is not None:
                next_driver.notify()

    def _clock(self) -> float:
        """Seconds spent in turns: a clock that stops while nobody reads a stream."""
        busy, turn_began = self._time
        return busy if turn_began is None else busy + time.perf_counter() - turn_began

    def _turn(self) -> None:
        """Reads at most one chunk of a prompt, and takes a step for every request whose prompt is read."""
        self._time = (self._clock(), time.perf_counter())
        try:
            self._leave()
            self._join()
            decoding = [request for request in self._running if request.read]
            arriving = next((request for request in self._running if not request.read), None)
            if arriving is not None:
                self._read(arriving, decoding)
            if arriving is not None and arriving.read:
                if arriving.remaining > 0:
                    decoding.append(arriving)
                else:
                    arriving.end("length")
                    self._leave()
            if decoding:
                self._step(decoding)
                self._leave()
            self._failed = 0
        except BaseException as error:
            self._failed += 1
            for request in self._running:
                request.error = error
            self._leave()
            if not isinstance(error, Exception):
                raise
        finally:
            self._time = (self._clock(), None)

    def _leave(self) -> None:
        """Frees the slots of ended requests, and closes the gaps between running ones."""
        ended = [request for request in self._running if request.over]
        with self._lock:
            self._running = [request for request in self._running if request not in ended]
        for request in ended:
            self._slots.leave(request.view.slot)
            self._program.release(request.view.slot, request.view.method)
            if request.cancelled and not request.finished and not request.abandoned and request.error is None:
                request.end("cancelled")
        while ended and (move := self._slots.next_move()) is not None:
            mover = next(request for request in self._running if request.view.slot == move[0])
            self._program.move(*move, mover.view.method)
            self._slots.record_move(*move)
            mover.view.slot = move[1]
        if ended and self._running:
            self._shrink_cache()

    def _join(self) -> None:
        """Gives free slots to queued requests, in order of arrival."""
        with self._lock:
            over = [request for request in self._queue if request.over]
            for request in over:
                self._queue.remove(request)
            joining = [self._queue.popleft() for _ in range(min(self._slots.free, len(self._queue)))]
            self._running += joining
        for request in over:
            if not request.abandoned:
                request.end("cancelled")
        for request in joining:
            request.view.slot = self._slots.take(request.view.tokens, whole=request.scored)
            request.stats.queued = self._clock() - request.began
        if joining:
            self._shrink_cache()

    def _shrink_cache(self) -> None:
        self._program.shrink_cache(max(len(request.view.tokens) + request.remaining for request in self._running))

    def _read(self, request: Request, stalled: list[Request]) -> None:
        """Reads a chunk of a request's prompt, while the ``stalled`` requests wait."""
        start = time.perf_counter()
        if request.stats.prefill == 0.0 and not request.scored:
            request.stats.cached_tokens = self._slots.begin(request.view.slot)
        # A draft reads nothing for a request that will not speculate.
        self._policy.assign(self._running)
        reread = request.view.read_again
        request.read = not self._program.prefill(request.view, alone=not stalled)
        request.stats.cached_tokens -= request.view.read_again - reread
        if request.read and len(request.view.tree) > 1 and request.view.lookup is None:
            request.history.unread = 0
        seconds = time.perf_counter() - start
        request.stats.prefill += seconds
        for waiting in stalled:
            waiting.stats.stalled += seconds

    def _step(self, requests: list[Request]) -> None:
        """Takes a step for requests whose prompts are read, and queues its chunks for their readers."""
        start = time.perf_counter()
        self._policy.assign(requests, len(self._running) - len(requests))
        chosen = time.perf_counter()
        step = self._program.step([request.view for request in requests])
        self._policy.learn(requests, step, time.perf_counter() - chosen)
        chunks = list(map(_append, requests, step.outcomes))
        now, total = self._clock(), time.perf_counter() - start
        for request, chunk in zip(requests, chunks, strict=True):
            stats = request.stats
            stats.propose += step.propose
            stats.verify += step.verify
            stats.accept += step.accept
            stats.execution = step.execution
            stats.host += total - step.propose - step.verify - step.accept
            stats.first_token = stats.first_token or now - request.began
            stats.total = now - request.began
            if chunk is not None:
                request.add_chunk(chunk)


def _append(request: Request, outcome: Outcome) -> Chunk | None:
    """Adds a step's outcome to a request; a failure ends this request alone, and returns None."""
    try:
        for processor in request.view.processors:
            processor.check()
        if not outcome.finite:
            raise BackendError(
                f"the target's logits after {len(request.view.tokens)} tokens are not finite, so there is no text to "
                "go on with; 'specexport verify BUNDLE' says whether its graphs are right"
            )
        method = request.view.lookup or request.view.method or NO_METHOD
        request.stats.count_step(method, outcome)
        return request.append(outcome)
    except Exception as error:
        request.error = error
        return None
