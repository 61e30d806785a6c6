"""Load on ``specexport serve``: many requests at once, with and without speculation, through the openai client.

There are always ``--concurrency`` requests. Time to first token is from sending a request to its first text. Time
between tokens is reported twice: the client's mean per request, and the quantiles of the server's histogram, which
divides the time between events among an event's tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import openai

from benchmarks.common import add_common_arguments, machine, new_table, read_texts, write_report
from benchmarks.pair import bundle as pair_bundle
from benchmarks.pair import inflated_pair
from benchmarks.serving import Process, quantile, server
from specexport.tables import Table, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks serve``."""
    add_common_arguments(parser, new_tokens=64)
    parser.add_argument("--bundle", type=Path, help="what to serve (default: the benchmark-size pair, K = 4)")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-chars", type=int, default=400)


@dataclass
class Row:
    """The results of one way; times in seconds.

    Attributes:
        name: with or without speculation.
        requests: number of answered requests.
        tokens_per_second: of all requests together.
        first_p50: time to first token.
        first_p99: the same.
        token_p50: a request's mean time between tokens.
        token_p99: the same.
        server: the same from the server's histograms, by name, each with its p50 and p99.
        acceptance_length: mean tokens a step.
    """

    name: str
    requests: int
    tokens_per_second: float
    first_p50: float
    first_p99: float
    token_p50: float
    token_p99: float
    server: dict[str, tuple[float, float]]
    acceptance_length: float


def main(arguments: argparse.Namespace) -> int:
    """Runs ``python -m benchmarks serve``."""
    served = arguments.bundle
    if served is None:
        target, draft = inflated_pair(arguments.models, arguments.work)
        served = pair_bundle(target, draft, arguments.work, arguments.precision, (4,), 1024)
    texts = [text[: arguments.prompt_chars] for text in read_texts(arguments.prompts)]
    prompts = [texts[index % len(texts)] for index in range(arguments.requests)]
    rows = []
    for name, draft_tokens in (("speculation", None), ("plain", 0)):
        with server(served, "--max-queue", str(arguments.requests), threads=arguments.threads) as running:
            rows.append(asyncio.run(_load(name, draft_tokens, running, prompts, arguments)))
    show(_table(rows, arguments))
    write_report(arguments.json, {"machine": machine(arguments.threads), "rows": [asdict(row) for row in rows]})
    return 0


async def _load(
    name: str, draft_tokens: int | None, running: Process, prompts: list[str], arguments: argparse.Namespace
) -> Row:
    first: list[float] = []
    between: list[float] = []
    statistics: list[dict[str, float]] = []
    places = asyncio.Semaphore(arguments.concurrency)
    extra = {"ignore_eos": True, "include_speculation": True}
    if draft_tokens is not None:
        extra["speculative"] = {"num_speculative_tokens": draft_tokens}
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="EMPTY", timeout=3600, max_retries=0) as client:

        async def request(prompt: str) -> int:
            async with places:
                sent, times = time.perf_counter(), []
                stream = await client.completions.create(
                    model="model",
                    prompt=prompt,
                    max_tokens=arguments.new_tokens,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body=extra,
                )
                tokens = 0
                async for part in stream:
                    if part.choices:
                        times.append(time.perf_counter())
                    if part.usage is not None:
                        tokens = part.usage.completion_tokens
                        statistics.append(part.usage.model_dump()["speculation"])
                first.append(times[0] - sent)
                between.append((times[-1] - times[0]) / max(1, tokens - 1))
                return tokens

        await request(prompts[0])
        for values in (first, between, statistics):
            values.clear()
        before = running.metrics()
        began = time.perf_counter()
        answers = await asyncio.gather(*map(request, prompts))
        seconds = time.perf_counter() - began
    after = running.metrics()
    histograms = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    return Row(
        name,
        len(answers),
        sum(answers) / seconds,
        quantile(first, 0.5),
        quantile(first, 0.99),
        quantile(between, 0.5),
        quantile(between, 0.99),
        {each: (_bucket(before, after, each, 0.5), _bucket(before, after, each, 0.99)) for each in histograms},
        sum(stats["acceptance_length"] for stats in statistics) / len(statistics),
    )


def _bucket(before: dict[str, float], after: dict[str, float], name: str, share: float) -> float:
    """A quantile of a Prometheus histogram, interpolated within its bucket."""
    head = f'{name}_bucket{{le="'
    counts = sorted(
        (float(key.removeprefix(head).rstrip('"}')), value - before.get(key, 0.0))
        for key, value in after.items()
        if key.startswith(head)
    )
    wanted, lower, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return lower if bound == float("inf") else lower + (bound - lower) * (wanted - below) / (count - below or 1)
        lower, below = bound, count
    return lower


def _table(rows: list[Row], arguments: argparse.Namespace) -> Table:
    title = f"{arguments.requests} requests, {arguments.concurrency} at once; milliseconds, p50 / p99"
    numbers = ("tokens/s", "first token", "between tokens", "first, server", "between, server", "tokens/step")
    table = new_table(title, ("",), numbers)
    for row in rows:
        pairs = [(row.first_p50, row.first_p99), (row.token_p50, row.token_p99), *row.server.values()]
        cells = [f"{low * 1e3:.1f} / {high * 1e3:.1f}" for low, high in pairs]
        table.add_row(row.name, f"{row.tokens_per_second:.1f}", *cells, f"{row.acceptance_length:.2f}")
    return table
