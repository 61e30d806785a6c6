"""``AsyncEngine``: requests from one event loop, a bounded queue, and every way a request can end."""

import asyncio
import contextlib
import copy
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from specexport import AsyncEngine, SamplingParams
from specexport.contract.errors import ClosedError, DeadlineError, QueueFullError, RequestError
from specexport.frontend import Frontend
from specexport.runtime import Chunk, Stats, Stream
from specexport.runtime.speculative import PLAIN, Speculative
from tests.fixtures import Engines

NAME = "llama-near"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=480)
PROMPT = (17, 180, 33)


@pytest.fixture(scope="module")
def frontend(engine: Engines) -> Frontend:
    shared = engine(NAME)
    return Frontend(shared, NAME)


async def tokens_of(stream: AsyncIterator[Any]) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def test_batches_equal_single_requests(frontend):
    prompts = [[5 + index, 60, 7 * index + 3] for index in range(12)]
    expected = [list(frontend.engine.generate(prompt, GREEDY).token_ids) for prompt in prompts]
    engine = AsyncEngine(frontend)
    streams = [engine.generate(prompt, GREEDY) for prompt in prompts]
    assert await asyncio.gather(*map(tokens_of, streams)) == expected
    await until(lambda: engine.running == engine.waiting == 0)
    assert all(stream.stats.output_tokens == 16 for stream in streams)
    assert all(stream.started is not None and stream.started >= stream.arrived for stream in streams)


@pytest.mark.parametrize("end", ["cancel", "drop", "close", "aclose", "task"])
async def test_abandoned_requests_free_their_slots(frontend, end):
    engine = AsyncEngine(frontend)
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    stats = stream.stats
    if end == "cancel":
        stream.cancel()
        assert [chunk.finish_reason async for chunk in stream][-1] == "cancelled"
    elif end == "close":
        async with stream:
            pass
    elif end == "aclose":  # as of generators
        async with contextlib.aclosing(stream):
            pass
    elif end == "task":
        task = asyncio.create_task(tokens_of(stream))
        del stream
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
    else:
        del stream
    gc.collect()
    await until(lambda: engine.running == 0)
    assert stats.output_tokens < 400
    assert len(await tokens_of(engine.generate(PROMPT, GREEDY))) == 16


async def test_retry_after_follows_the_queue(frontend):
    """Nothing has ended yet, and those that run say how long they take at least."""
    engine = AsyncEngine(frontend, max_queue=3 * frontend.engine.slots)
    streams = [engine.generate(PROMPT, LONG) for _ in range(engine.slots)]
    await until(lambda: engine.running == engine.slots)
    for request in engine._live:
        request.started -= 10
    assert engine._wait() in (10, 11)
    streams += [engine.generate(PROMPT, LONG) for _ in range(3 * engine.slots)]
    with pytest.raises(QueueFullError) as caught:
        engine.require_place()
    assert 40 <= caught.value.retry_after <= 60
    for stream in streams:
        stream.cancel()
    await until(lambda: not engine._live)
    # Of those that ended, some took ten seconds and some hardly any; what they took lately is remembered.
    assert 0 < engine._seconds < 11
    engine.require_place()


async def test_the_queue_is_bounded_and_those_in_it_can_leave(frontend):
    engine = AsyncEngine(frontend, max_queue=2)
    streams = [engine.generate(PROMPT, LONG) for _ in range(engine.slots + 2)]
    with pytest.raises(QueueFullError, match="at most 2 requests may wait for 1 slot") as caught:
        engine.generate(PROMPT, GREEDY)
    assert caught.value.retry_after >= 1
    await until(lambda: engine.running == engine.slots)
    waiting = streams.pop()
    assert waiting.started is None
    waiting.cancel()
    assert [chunk.finish_reason async for chunk in waiting] == ["cancelled"]
    await until(lambda: engine.waiting == 1)
    streams.append(engine.generate(PROMPT, GREEDY))
    for stream in streams[:-1]:
        stream.cancel()
    assert len(await tokens_of(streams[-1])) == 16


async def test_two_tasks_that_iterate_one_stream_both_end(frontend):
    stream = AsyncEngine(frontend).generate(PROMPT, GREEDY)
    with pytest.raises(TypeError, match="a stream cannot be pickled or copied"):
        copy.copy(stream)  # the copy would cancel it when dropped
    parts = await asyncio.gather(tokens_of(stream), tokens_of(stream))
    assert sum(map(len, parts)) == 16


async def test_several_streams_are_admitted_together_or_not_at_all(frontend):
    engine = AsyncEngine(frontend, max_queue=1)
    first = engine.generate(PROMPT, LONG)
    for count, kind in ((engine.slots + 1, QueueFullError), (engine.slots + 2, RequestError)):
        with pytest.raises(kind):
            engine.start([frontend.streams(PROMPT, GREEDY)[0] for _ in range(count)])
    assert engine.running + engine.waiting == 1
    first.cancel()


async def test_a_deadline_ends_requests_that_run_and_that_wait(frontend):
    engine = AsyncEngine(frontend)
    running = engine.generate(PROMPT, LONG, timeout=0.05)
    others = [engine.generate(PROMPT, LONG) for _ in range(engine.slots)]
    waiting = engine.generate(PROMPT, LONG, timeout=0.01)
    for stream, limit in ((waiting, "0.01"), (running, "0.05")):
        with pytest.raises(DeadlineError, match=f"did not finish within {limit} seconds"):
            await tokens_of(stream)
    for stream in others:
        stream.cancel()
    await until(lambda: engine.running == engine.waiting == 0)
    assert running.stats.output_tokens < 480


async def test_a_deadline_is_reported_even_if_the_request_ends_at_once(frontend, monkeypatch):
    """The thread of a request may see that it is cancelled before the event loop has said why."""
    cancel = Stream.cancel
    engine = AsyncEngine(frontend)
    stream = engine.generate(PROMPT, LONG, timeout=0.05)

    def cancel_and_wait(cancelled: Stream) -> None:
        cancel(cancelled)
        # Threads of requests cancel theirs too, once a test's loop is closed.
        if cancelled is stream._request.stream and threading.current_thread() is threading.main_thread():
            wait([stream._request.work], 60)

    monkeypatch.setattr(Stream, "cancel", cancel_and_wait)
    with pytest.raises(DeadlineError):
        await tokens_of(stream)


async def test_a_deadline_that_is_not_reached_leaves_nothing_behind(frontend):
    engine = AsyncEngine(frontend)
    before = len(asyncio.get_running_loop()._scheduled)
    assert len(await tokens_of(engine.generate(PROMPT, GREEDY, timeout=1000))) == 16
    await until(lambda: engine.running == 0)
    scheduled = asyncio.get_running_loop()._scheduled
    assert len([timer for timer in scheduled if not timer.cancelled()]) <= before


async def test_draining_finishes_running_and_refuses_new_requests(frontend):
    engine = AsyncEngine(frontend)
    streams = [engine.generate(PROMPT, GREEDY) for _ in range(3)]
    draining = asyncio.create_task(engine.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        engine.generate(PROMPT, GREEDY)
    await draining
    assert [len(await tokens_of(stream)) for stream in streams] == [16, 16, 16]


async def test_draining_cancels_slow_requests(frontend):
    engine = AsyncEngine(frontend)
    streams = [engine.generate(PROMPT, LONG) for _ in range(engine.slots + 1)]
    await anext(streams[0])
    await engine.drain(0)
    for stream in streams:
        with pytest.raises(ClosedError, match="shut down before"):
            await tokens_of(stream)


async def test_closing_frees_the_engine(bundle):
    async with AsyncEngine.open(bundle=bundle(NAME), threads=1, calibrate=False) as engine:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
    with pytest.raises(ClosedError, match="closed"):
        engine.frontend.engine.stream(PROMPT, GREEDY)
    with pytest.raises(ClosedError):
        engine.generate(PROMPT, GREEDY)


async def test_wrong_requests_are_refused_before_they_run(frontend):
    engine = AsyncEngine(frontend)
    with pytest.raises(RequestError, match="n is 2"):
        engine.generate(PROMPT, GREEDY.replace(n=2))
    with pytest.raises(RequestError, match="method is 'magic'"):
        engine.generate(PROMPT, GREEDY, speculative=Speculative(method="magic"))
    with pytest.raises(RequestError, match=r"params is {'max_tokens': 3}; expected SamplingParams"):
        engine.generate(PROMPT, {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"params is {'max_tokens': 3}; expected SamplingParams"):
        frontend.engine.stream(PROMPT, {"max_tokens": 3})  # type: ignore[arg-type]
    for timeout in (0, -1.0, float("nan"), "30"):
        with pytest.raises(RequestError, match=f"timeout is {timeout!r}; expected a number > 0, or None"):
            engine.generate(PROMPT, GREEDY, timeout=timeout)  # type: ignore[arg-type]
    assert engine.running + engine.waiting == 0


class Broken:
    """Stands in for a stream whose backend fails."""

    stats = Stats()

    def __enter__(self) -> Iterator[Chunk]:
        yield from (Chunk("a", (5,)),)
        raise RuntimeError("the backend is gone")

    def __exit__(self, *_: object) -> None:
        pass

    def cancel(self) -> None:
        pass


async def test_errors_reach_waiting_threads(frontend):
    engine = AsyncEngine(frontend)
    (stream,) = engine.start([Broken()])
    assert (await anext(stream)).text == "a"
    with pytest.raises(RuntimeError, match="the backend is gone"):
        await tokens_of(stream)
    await until(lambda: engine.running == 0)
    assert len(await tokens_of(engine.generate(PROMPT, GREEDY))) == 16


async def test_requests_choose_how_to_speculate(frontend):
    engine = AsyncEngine(frontend)
    plain, fast = (engine.generate(PROMPT, GREEDY, speculative=request) for request in (PLAIN, None))
    assert await tokens_of(plain) == await tokens_of(fast)
    assert (plain.stats.drafted, fast.stats.drafted > 0) == (0, True)


async def test_requests_of_a_loop_that_stands_still_end(frontend):
    engine, other = AsyncEngine(frontend), asyncio.new_event_loop()

    async def start() -> Any:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        return stream

    stream = await asyncio.to_thread(other.run_until_complete, start())
    await asyncio.wait_for(engine.drain(0), 10)
    assert stream.stats.output_tokens < 400
    other.close()
