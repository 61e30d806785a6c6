"""A soak test of ``specexport serve``: overload, vanishing clients, requests of every kind, and a signal to stop.

Every request must be answered, refused with an error in OpenAI's format, or cancelled by its client. Ten times as many
clients as the server admits must not slow the admitted ones down; no slot may stay occupied; the process may not grow,
and on a signal it must finish its requests and exit with 0. Exits with 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import write_report
from benchmarks.serving import Process, quantile, server

_WRONG: tuple[dict[str, Any], ...] = (
    {"prompt": 1},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "nothing": 1},
    {"prompt": [2**40]},
    {"prompt": "a", "n": 0},
    {"model": "another", "prompt": "a"},
    {"prompt": "the quick brown fox " * 100_000},
    {"prompt": [1] * 400_000},
)
_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
}
_PLACES = 12
"""The server's queue limit: small, so that ten times as many clients are still few."""
_LOAD = {"prompt": "one two three", "max_tokens": 64, "temperature": 0, "ignore_eos": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks soak``."""
    parser.add_argument("--bundle", type=Path, required=True, help="what to serve")
    parser.add_argument("--minutes", type=float, default=10.0, help="a fifth of it for the crowd")
    parser.add_argument("--vanishing", type=int, default=1000, help="clients that leave in the middle of a stream")
    parser.add_argument("--concurrency", type=int, default=12, help="clients of the mixture")
    parser.add_argument("--slower", type=float, default=1.2, help="p99 with the crowd, most times that without it")
    parser.add_argument("--growth", type=float, default=32.0, metavar="MB", help="most the process may grow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")


@dataclass
class Tally:
    """The results of the soak.

    Attributes:
        outcomes: number of requests by outcome.
        failures: descriptions of failures.
        memory: seconds since the start, and the server's memory in megabytes.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``python -m benchmarks soak``."""
    flags = ("--max-queue", str(_PLACES), "--timeout", "60", "--shutdown-timeout", "60")
    seconds, tally = 60 * arguments.minutes, Tally()
    with server(arguments.bundle, *flags, threads=arguments.threads) as running:
        places = _PLACES + int(running.metrics()["num_slots"])
        crowd = asyncio.run(_crowds(running, places, seconds / 5, tally))
        asyncio.run(_vanish(running, places, arguments.vanishing, tally))
        held = asyncio.run(_left(running))
        with ProcessPoolExecutor(1, get_context("spawn")) as another:
            asking = another.submit(_ask_health, running.url, 0.75 * seconds)
            asyncio.run(_mixture(running, 0.75 * seconds, arguments, tally))
            health = asking.result()
        held += asyncio.run(_left(running))
        drained = asyncio.run(_drain(running, tally))
        process = running.process
    if held:
        tally.failures.append(f"{held:g} requests still hold a slot or wait")
    if crowd["slower"] > arguments.slower:
        tally.failures.append(f"the p99 latency is {crowd['slower']:.2f} times as long with the crowd")
    third = len(tally.memory) // 3
    early, middle, late = (
        statistics.median([value for _, value in part] or [0.0])
        for part in (tally.memory[third // 2 : third], tally.memory[third : 2 * third], tally.memory[2 * third :])
    )
    if late - early > arguments.growth:
        tally.failures.append(f"the process grew by {late - early:.1f} MB")
    figures = {
        "minutes": arguments.minutes,
        "crowd": crowd,
        "vanished": arguments.vanishing,
        "held_after": held,
        "requests": sum(tally.outcomes.values()),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "health_ms": {name: 1000 * quantile(health, share) for name, share in (("p50", 0.5), ("p99", 0.99))}
        | {"max": 1000 * max(health)},
        "memory_mb": {"early": early, "middle": middle, "late": late},
        "stopping": drained | {"exit_code": process.returncode},
        "errors": len(tally.failures),
        "failures": tally.failures[:20],
    }
    print(json.dumps(figures, indent=2))
    write_report(arguments.json, figures)
    return 1 if tally.failures else 0


async def _crowds(running: Process, places: int, seconds: float, tally: Tally) -> dict[str, float]:
    """Measures latencies with as many clients as the server admits, and with ten times as many, in turns.

    Uses bare connections, as an HTTP client with hundreds of connections would be slower than the server.
    """
    took: dict[int, list[float]] = {1: [], 10: []}
    refused: Counter[int] = Counter()
    body = json.dumps(_LOAD)
    head = "POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    host, _, port = running.url.removeprefix("http://").partition(":")

    async def client(times: int, until: float) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while time.monotonic() < until:
            began = time.monotonic()
            writer.write(request)
            fields = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await reader.readexactly(int(fields.partition("content-length: ")[2].split("\r\n")[0]))
            if fields.startswith("http/1.1 200"):
                took[times].append(time.monotonic() - began)
            elif fields.startswith("http/1.1 429") and "retry-after: " in fields:
                refused[times] += 1
                await asyncio.sleep(random.uniform(0.5, 1.5))  # many clients do not wait as long as Retry-After says
            else:
                tally.failures.append(f"in the crowd: {fields.splitlines()[0]}: {body[:200]!r}")
        writer.close()

    for times in (1, 10) * 3:
        until = time.monotonic() + seconds / 6
        await asyncio.gather(*(client(times, until) for _ in range(times * places)))
    p99 = {times: quantile(of, 0.99) for times, of in took.items()}
    return {
        "p99_ms_at_1x": 1000 * p99[1],
        "p99_ms_at_10x": 1000 * p99[10],
        "slower": p99[10] / p99[1],
        "answered_at_1x": len(took[1]),
        "answered_at_10x": len(took[10]),
        "refused_at_1x": refused[1],
        "refused_at_10x": refused[10],
    }


async def _vanish(running: Process, places: int, clients: int, tally: Tally) -> None:
    """Clients that disconnect after the first piece of a long stream."""
    left = iter(range(clients))

    async def worker(http: httpx.AsyncClient) -> None:
        for _ in left:
            answered = False
            while not answered:
                body = _LOAD | {"max_tokens": None, "stream": True}
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    answered = answer.status_code == 200
                    if answered:
                        await anext(answer.aiter_lines())
                    elif answer.status_code != 429:
                        tally.failures.append(f"before it vanished: {answer.status_code}")
                        answered = True
                if not answered:
                    await asyncio.sleep(0.05)

    async with httpx.AsyncClient(base_url=running.url, timeout=180) as http:
        await asyncio.gather(*(worker(http) for _ in range(places)))


def _ask_health(url: str, seconds: float) -> list[float]:
    """Polls ``/health`` from a separate process; seconds of each answer."""
    took: list[float] = []
    until = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as http:
        while time.monotonic() < until:
            began = time.monotonic()
            http.get("/health").raise_for_status()
            took.append(time.monotonic() - began)
            time.sleep(0.02)
    return took


async def _drain(running: Process, tally: Tally) -> dict[str, float]:
    """Stops the server while it answers: running requests must complete, and new ones be refused."""
    begun, ended = 0, 0
    stopped = asyncio.Event()

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal begun, ended
        body = _LOAD | {"max_tokens": None, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            begun += 1
            await stopped.wait()
            rest = [line async for line in lines if line]
            reason = json.loads(rest[-2].removeprefix("data: ")).get("choices", [{}])[0].get("finish_reason")
            ended += rest[-1] == "data: [DONE]" and reason == "length"

    async with httpx.AsyncClient(base_url=running.url, timeout=180) as http:
        streams = [asyncio.create_task(client(http)) for _ in range(4)]
        while begun < len(streams):
            await asyncio.sleep(0.001)
        running.process.send_signal(signal.SIGTERM)
        since = time.monotonic()
        stopped.set()
        await asyncio.sleep(0.2)
        try:
            late = httpx.post(f"{running.url}/v1/completions", json=_LOAD, timeout=60).status_code
        except httpx.TransportError:
            late = 503
        await asyncio.gather(*streams)
    if late != 503:
        tally.failures.append(f"a request that came after the signal was answered with {late}")
    if ended != len(streams):
        tally.failures.append(f"of {len(streams)} streams {ended} ended well after the signal")
    await asyncio.to_thread(running.process.wait, 120)
    return {"streams": len(streams), "ended_well": ended, "seconds": time.monotonic() - since}


async def _mixture(running: Process, seconds: float, arguments: argparse.Namespace, tally: Tally) -> None:
    """Requests of every kind."""
    began = time.monotonic()
    until = began + seconds
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
                metrics = await asyncio.to_thread(running.metrics)
                tally.memory.append((time.monotonic() - began, metrics["process_resident_memory_bytes"] / 1e6))
                await asyncio.sleep(min(1.0, seconds / 20))

        workers = (worker(arguments.seed * 1000 + index) for index in range(arguments.concurrency))
        await asyncio.gather(watch(), *workers)


async def _one(client: httpx.AsyncClient, draw: random.Random) -> str:
    """One request of a random kind; returns its outcome."""
    if draw.random() < 0.1:
        answer = await client.post("/v1/completions", json=draw.choice(_WRONG))
        assert answer.status_code in (400, 404, 429), answer.text
        assert answer.json()["error"]["message"]
        return "refused, queue full" if answer.status_code == 429 else "refused, wrong"
    if draw.random() < 0.3:
        return await _chat(client, draw)
    body: dict[str, Any] = {
        "prompt": " ".join(draw.choices(("def", "self", "return", "one", "the", "value"), k=draw.randint(1, 40))),
        "max_tokens": draw.choice((0, 1, 8, 32, 120)),
        "temperature": draw.choice((0.0, 0.7, 1.3)),
        "top_p": draw.choice((1.0, 0.9)),
        "n": draw.choice((1, 1, 1, 2)),
        "logprobs": draw.choice((None, None, 3)),
        "stop": draw.choice((None, ["e"])),
        "speculative": draw.choice((None, {"num_speculative_tokens": 0}, {"method": "ngram"}, {"method": "suffix"})),
        "seed": draw.choice((None, 1)),
        "stream": draw.random() < 0.6,
        "timeout": draw.choice((None, None, None, 0.05)),
    }
    if body["stream"]:
        return await _streamed(client, body, draw)
    answer = await client.post("/v1/completions", json=body)
    return _outcome(answer.status_code, answer.json(), body)


async def _chat(client: httpx.AsyncClient, draw: random.Random) -> str:
    """A chat, sometimes with a schema; a bundle without a chat template must refuse it."""
    text = " ".join(draw.choices(("what", "is", "a", "cat"), k=draw.randint(1, 30)))
    schema = {"type": "json_schema", "json_schema": {"name": "pet", "schema": _SCHEMA}} if draw.random() < 0.5 else None
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": draw.choice((4, 60)),
        "response_format": schema,
        "n": 1,
        "timeout": None,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code == 400 and "no chat template" in answer.text:
        return "refused, no chat template"
    outcome = _outcome(answer.status_code, answer.json(), body)
    if outcome == "answered" and schema is not None:
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"kind", "old"}, choice
        return "answered, schema"
    return "answered, chat" if outcome == "answered" else outcome


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
    """The number of requests in the server some time after the last client left."""
    for _ in range(100):
        metrics = await asyncio.to_thread(running.metrics)
        left = metrics["num_requests_running"] + metrics["num_requests_waiting"]
        if not left:
            return 0.0
        await asyncio.sleep(0.1)
    return left
