"""Who drives, over a step program that only counts: no model, no bundle."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specexport.contract.errors import BackendError
from specexport.runtime import SamplingParams
from specexport.runtime.proposal import PLAIN_TREE, SlotView
from specexport.runtime.request import Request, Stream, complete
from specexport.runtime.scheduler import Scheduler
from specexport.runtime.speculation.policy import SpeculationPolicy
from specexport.runtime.step import Outcome, StepResult
from specexport.runtime.text import TextStream
from tests.threads import JOIN

TOKENIZER = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))


class Counting:
    """A step program whose texts go on with zeros; ``released`` is called as a slot is."""

    sizes = (1, 2, 4, 8)

    def __init__(self, released: Callable[[int], None] = lambda slot: None) -> None:
        self._released = released

    def filled(self, slot: int) -> int:
        return 0

    def reusable(self, slot: int, tokens: int) -> int:
        return 0

    def prefill(self, view: SlotView, alone: bool = False) -> bool:
        return False

    def step(self, views: Sequence[SlotView]) -> StepResult:
        return StepResult([Outcome([0]) for _ in views], 0.0, 0.0, 0.0, "host")

    def move(self, source: int, to: int, method: str | None) -> None: ...

    def share(self, source: int, to: int, tokens: int) -> None: ...

    def shrink_cache(self, rows: int) -> None: ...

    def release(self, slot: int, method: str | None) -> None:
        self._released(slot)


class Plain(SpeculationPolicy):
    """Nothing is speculated."""

    def __init__(self) -> None: ...

    def assign(self, requests: Sequence[Request], joining: int = 0) -> None: ...

    def learn(self, requests: Sequence[Request], step: StepResult, seconds: float) -> None: ...


def scheduler(program: Counting) -> Scheduler:
    return Scheduler(program, Plain(), reuse=False)


def stream(runner: Any, room: int = 3) -> Stream:
    view = SlotView(0, [1, 0], SamplingParams(), np.random.default_rng(0), PLAIN_TREE)
    return Stream(runner, Request(view, TextStream(TOKENIZER), room, ()))


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_a_request_may_start_while_another_thread_ends_its_turn(monkeypatch):
    """The turn ends between two looks that the scheduler's clock takes at it."""
    stepping, may_end, here = threading.Event(), threading.Event(), threading.get_ident()

    class Slow(Counting):
        def step(self, views: Sequence[SlotView]) -> StepResult:
            stepping.set()
            assert may_end.wait(JOIN)
            return super().step(views)

    def now() -> float:
        if threading.get_ident() == here:
            may_end.set()
            time.sleep(0.2)
        return time.monotonic()

    shared = scheduler(Slow())
    reader, errors = in_background(lambda: complete(stream(shared, room=1)))
    assert stepping.wait(JOIN)
    request = stream(shared)
    with monkeypatch.context() as patch:
        patch.setattr("specexport.runtime.scheduler.time.perf_counter", now)
        request.start()
    reader.join(JOIN)
    assert errors == []
    assert len(complete(request).token_ids) == 3


def test_a_request_that_could_not_start_may_start_later(monkeypatch):
    shared = scheduler(Counting())
    request = stream(shared)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_clock", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(request)
    reader, errors = in_background(lambda: complete(request))
    reader.join(JOIN)
    assert not reader.is_alive()
    assert errors == []


def test_closing_waits_for_the_turn_that_another_thread_takes():
    leaving, may_leave = threading.Event(), threading.Event()

    def released(slot: int) -> None:
        leaving.set()
        assert may_leave.wait(JOIN)

    shared = scheduler(Counting(released))
    reader, reader_errors = in_background(lambda: complete(stream(shared)))
    assert leaving.wait(JOIN)
    closer, closer_errors = in_background(shared.close)
    closer.join(0.3)
    assert closer.is_alive()
    may_leave.set()
    for thread in (reader, closer):
        thread.join(JOIN)
        assert not thread.is_alive()
    assert reader_errors == closer_errors == []


def test_closing_ends_every_request_of_its_thread_while_others_leave(monkeypatch):
    """Another thread's turn has a request leave between two looks of :meth:`Scheduler.close` at those running."""
    looking, left = threading.Event(), threading.Event()

    class Owner(int):
        """The thread that closes; as it is looked at, the request may leave."""

        def __eq__(self, other: object) -> bool:
            looking.set()
            left.wait(0.5)
            return True

        __hash__ = int.__hash__

    shared = scheduler(Counting(lambda slot: left.set()))
    streams = [stream(shared, room=10**6) for _ in range(3)]
    for stream_ in streams:
        next(stream_)
    streams[0]._request.owner = Owner()
    streams[0].cancel()
    reader, turn = stream(shared), shared._turn

    def turn_while_another_looks() -> None:
        assert looking.wait(JOIN)
        turn()

    monkeypatch.setattr(shared, "_turn", turn_while_another_looks)
    driver, _ = in_background(lambda: complete(reader))
    while not shared._driving:
        time.sleep(0.001)
    shared.close()
    driver.join(JOIN)
    assert not driver.is_alive()
    assert [stream_._request.abandoned for stream_ in streams] == [True] * 3


def test_an_engine_that_does_not_get_on_says_so():
    stepping, may_end, broken = threading.Event(), threading.Event(), [True] * 4

    class Failing(Counting):
        def step(self, views: Sequence[SlotView]) -> StepResult:
            stepping.set()
            assert may_end.wait(JOIN)
            if broken and broken.pop():
                raise BackendError("the device is lost")
            return super().step(views)

    shared = scheduler(Failing())
    reader, errors = in_background(lambda: complete(stream(shared)))
    assert stepping.wait(JOIN)
    time.sleep(0.02)
    assert shared.stall_reason(1e6) is None
    assert "a turn has taken" in (shared.stall_reason(0.01) or "")
    may_end.set()
    reader.join(JOIN)
    assert len(errors) == 1
    for _ in range(2):
        assert shared.stall_reason(0.01) is None
        with pytest.raises(BackendError):
            complete(stream(shared))
    assert shared.stall_reason(1e6) == "the last 3 turns failed; the log says why"
    broken.clear()
    complete(stream(shared))
    assert shared.stall_reason(1e6) is None
