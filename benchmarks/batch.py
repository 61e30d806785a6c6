"""Several requests at once, with speculation and without, on the benchmark-size pair.

At each concurrency that many streams are started, and as one ends the next begins, until all prompts are done; speeds
are all output tokens over wall-clock seconds, prompts included. Both ways run in turn at each concurrency, so that a
machine whose speed drifts treats them alike. The bars: 8 requests at once make 2.5 times the tokens a second of one,
plainly and at fp32; with speculation no concurrency is below 0.97 of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.decode import machine
from benchmarks.pair import bundle, inflated_pair, with_curve
from specexport.runtime import Engine, SamplingParams, Stream

MAX_SEQ_LEN = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``python -m benchmarks batch``."""
    parser.add_argument("--models", type=Path, default=Path("examples/models"), help="holds demo-target and demo-draft")
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts/held_out.jsonl"))
    parser.add_argument("--work", type=Path, default=Path(".cache/bench"), help="keeps inflated models and bundles")
    parser.add_argument("--precisions", default="fp32,int8")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--num-prompts", type=int, default=16, help="requests at each concurrency")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=4, help="draft tokens a request alone speculates")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="measure the cost curve anew")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")


@dataclass
class Point:
    """A concurrency at one precision; speeds are medians over repeats.

    Attributes:
        precision: of the matrices.
        concurrency: requests at once.
        plain: tokens a second without speculation.
        speculative: tokens a second with it.
        ratio: median of the repeats' ratios of the two.
        scaling: plain, over plain with one request.
        same_text: requests whose tokens are the same both ways.
    """

    precision: str
    concurrency: int
    plain: float
    speculative: float
    ratio: float
    scaling: float
    same_text: int


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its tables."""
    target, draft = inflated_pair(args.models, args.work)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.num_prompts]
    measured: list[Point] = []
    for precision in args.precisions.split(","):
        folder = bundle(target, draft, args.work, precision, (args.k,), MAX_SEQ_LEN, 32)
        with_curve(folder, args.threads, anew=args.measure)
        # Every prompt is read each time: what a prefix cache saves is not what is asked here.
        with Engine.load(folder, threads=args.threads, check_hashes=False, prefix_cache=False) as engine:
            prompts = [engine.encode(json.loads(line)["text"])[: args.prompt_tokens] for line in lines]
            points = _measure(engine, precision, prompts, args)
        measured += points
        Console().print(_table(f"{precision}, greedy, {len(prompts)} prompts", points))
    if args.json:
        report = {"machine": machine(args.threads), "points": [asdict(point) for point in measured]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _measure(engine: Engine, precision: str, prompts: list[list[int]], args: argparse.Namespace) -> list[Point]:
    params = SamplingParams(temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True)
    points: list[Point] = []
    for concurrency in (int(count) for count in args.concurrency.split(",")):
        speeds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(args.repeats + 1):
            texts = {}
            for speculation in (False, True):
                seconds, texts[speculation] = _run(engine, prompts, params, concurrency, speculation)
                if turn:  # the first turn pays for buffers
                    speeds[speculation].append(len(prompts) * args.new_tokens / seconds)
        ratios = [fast / plain for plain, fast in zip(speeds[False], speeds[True], strict=True)]
        plain = statistics.median(speeds[False])
        points.append(
            Point(
                precision,
                concurrency,
                plain,
                statistics.median(speeds[True]),
                statistics.median(ratios),
                plain / (points[0].plain if points else plain),
                sum(a == b for a, b in zip(texts[False], texts[True], strict=True)),
            )
        )
    return points


def _run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, concurrency: int, speculation: bool
) -> tuple[float, list[list[int]]]:
    """Seconds for all prompts, so many at once, and their outputs."""
    waiting = deque(engine.stream(prompt, params, speculation=speculation) for prompt in prompts)
    everyone, running = list(waiting), deque[Stream]()
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.append(waiting.popleft())
            running[-1].start()
        stream = running.popleft()
        if next(stream, None) is not None:
            running.append(stream)
    seconds = time.perf_counter() - start
    return seconds, [stream.tokens[-params.max_tokens :] for stream in everyone]


def _table(title: str, points: list[Point]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("at once", "plain tokens/s", "over one", "with speculation", "on / off", "same text"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            str(point.concurrency),
            f"{point.plain:.1f}",
            f"{point.scaling:.2f}x",
            f"{point.speculative:.1f}",
            f"{point.ratio:.3f}x",
            str(point.same_text),
        )
    return table
