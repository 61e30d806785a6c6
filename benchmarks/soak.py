"""A soak of ``specexport serve``: mixed requests, random cancels and wrong ones, for as long as you like.

Every request has to be answered, refused in OpenAI's shape, or cancelled by the client; at the end no slot may be held,
and the process may not have grown by more than ``--growth`` MB since a fifth of the time had passed. Exits with 1 if
anything of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import write_report
from benchmarks.serving import Process, server

_WRONG: tuple[dict[str, Any], ...] = (
    {"prompt": 1},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "nothing": 1},
    {"prompt": [2**40]},
    {"prompt": "a", "n": 0},
    {"model": "another", "prompt": "a"},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``python -m benchmarks soak``."""
    parser.add_argument("--bundle", type=Path, required=True, help="what to serve")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--max-queue", type=int, default=8, help="small, so that some requests are refused")
    parser.add_argument("--growth", type=float, default=32.0, metavar="MB", help="most the process may grow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        outcomes: how many ended in which way.
        failures: what must not happen, in words.
        memory: seconds since the start, and megabytes the server held.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``python -m benchmarks soak``."""
    flags = ("--max-queue", str(arguments.max_queue), "--timeout", "60")
    with server(arguments.bundle, *flags, threads=arguments.threads) as running:
        tally = asyncio.run(_soak(running, arguments))
        left = asyncio.run(_left(running))
    if left:
        tally.failures.append(f"{left:g} requests still hold a slot or wait")
    fifth = arguments.seconds / 5
    early = [value for at, value in tally.memory if fifth <= at < 2 * fifth]
    late = [value for at, value in tally.memory if at >= 4 * fifth]
    growth = statistics.median(late) - statistics.median(early) if early and late else 0.0
    if growth > arguments.growth:
        tally.failures.append(f"the process grew by {growth:.1f} MB")
    figures = {
        "seconds": arguments.seconds,
        "requests": sum(tally.outcomes.values()),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "memory_mb": {"early": statistics.median(early or [0]), "late": statistics.median(late or [0])},
        "growth_mb": growth,
        "failures": tally.failures[:20],
    }
    print(json.dumps(figures, indent=2))
    write_report(arguments.json, figures)
    return 1 if tally.failures else 0


async def _soak(running: Process, arguments: argparse.Namespace) -> Tally:
    tally, began = Tally(), time.monotonic()
    until = began + arguments.seconds
    async with httpx.AsyncClient(base_url=running.url, timeout=180, limits=httpx.Limits(max_connections=64)) as client:

        async def worker(seed: int) -> None:
            draw = random.Random(seed)
            while time.monotonic() < until:
                await attempt(draw)

        async def attempt(draw: random.Random) -> None:
            try:
                tally.outcomes[await _one(client, draw)] += 1
            except (httpx.HTTPError, AssertionError, KeyError, ValueError, IndexError) as error:
                tally.failures.append(f"{type(error).__name__}: {error}")

        async def watch() -> None:
            while time.monotonic() < until:
                found = await asyncio.to_thread(running.metrics)
                tally.memory.append((time.monotonic() - began, found["process_resident_memory_bytes"] / 1e6))
                await asyncio.sleep(min(1.0, arguments.seconds / 20))

        workers = (worker(arguments.seed * 1000 + index) for index in range(arguments.concurrency))
        await asyncio.gather(watch(), *workers)
    return tally


async def _one(client: httpx.AsyncClient, draw: random.Random) -> str:
    """One request of any kind; says how it ended."""
    if draw.random() < 0.1:
        answer = await client.post("/v1/completions", json=draw.choice(_WRONG))
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["message"]
        return "refused, wrong"
    body: dict[str, Any] = {
        "prompt": " ".join(draw.choices(("def", "self", "return", "one", "the", "value"), k=draw.randint(1, 40))),
        "max_tokens": draw.choice((0, 1, 8, 32, 120)),
        "temperature": draw.choice((0.0, 0.7, 1.3)),
        "top_p": draw.choice((1.0, 0.9)),
        "n": draw.choice((1, 1, 1, 2)),
        "logprobs": draw.choice((None, None, 3)),
        "stop": draw.choice((None, ["e"])),
        "speculative": {"num_speculative_tokens": draw.choice((None, 0))},
        "seed": draw.choice((None, 1)),
        "stream": draw.random() < 0.6,
        "timeout": draw.choice((None, None, None, 0.05)),
    }
    if body["stream"]:
        return await _streamed(client, body, draw)
    answer = await client.post("/v1/completions", json=body)
    return _outcome(answer.status_code, answer.json(), body)


def _outcome(status: int, document: dict[str, Any], body: dict[str, Any]) -> str:
    if status == 200:
        assert len(document["choices"]) == body["n"]
        assert all(choice["finish_reason"] in ("stop", "length") for choice in document["choices"])
        return "answered"
    if status == 429:
        return "refused, queue full"
    assert status == 504, f"{status}: {document}"
    assert body["timeout"] is not None, document
    return "ended, deadline"


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any], draw: random.Random) -> str:
    leave = draw.randint(1, 12) if draw.random() < 0.4 else None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return _outcome(answer.status_code, answer.json(), body)
        events: list[str] = []
        async for line in answer.aiter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if leave is not None and len(events) >= leave:
                return "cancelled by the client"
    assert events[-1] == "[DONE]", events[-1:]
    last = json.loads(events[-2])
    if "error" in last:
        assert last["error"]["code"] == "deadline_exceeded", last
        assert body["timeout"] is not None, last
        return "ended, deadline"
    ends = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert sum(end is not None for end in ends) == body["n"], ends
    return "answered, streamed"


async def _left(running: Process) -> float:
    """Requests the server still holds, some time after the last client left."""
    for _ in range(100):
        found = await asyncio.to_thread(running.metrics)
        left = found["num_requests_running"] + found["num_requests_waiting"]
        if not left:
            return 0.0
        await asyncio.sleep(0.1)
    return left
