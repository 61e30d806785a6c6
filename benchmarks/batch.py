"""Several requests at once, with speculation and without, on the benchmark-size pair.

At each concurrency that many streams are started, and as one ends the next begins, until all prompts are done; speeds
are all output tokens over wall-clock seconds, prompts included. Both ways run in turn at each concurrency, so that a
machine whose speed drifts treats them alike. The bars: 8 requests at once make 2.5 times the tokens a second of one,
plainly and at fp32; with speculation no concurrency is below 0.97 of plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.common import add_common_arguments, machine, new_table, read_texts, write_report
from benchmarks.pair import bundle, inflated_pair
from specexport.runtime import Engine, SamplingParams, Stream
from specexport.runtime.speculative import PLAIN

MAX_SEQ_LEN = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``python -m benchmarks batch``."""
    add_common_arguments(parser, num_prompts=16, prompt_tokens=64, new_tokens=64)
    parser.add_argument("--precisions", default="fp32,int8")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--k", type=int, default=4, help="draft tokens a request speculates at most")
    parser.add_argument("--repeats", type=int, default=3)


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
    texts = read_texts(args.prompts)[: args.num_prompts]
    measured: list[Point] = []
    for precision in args.precisions.split(","):
        folder = bundle(target, draft, args.work, precision, (args.k,), MAX_SEQ_LEN, 32)
        # Every prompt is read each time: what a prefix cache saves is not what is asked here.
        with Engine.load(folder, threads=args.threads, check_hashes=False, prefix_cache=False) as engine:
            prompts = [engine.encode(text)[: args.prompt_tokens] for text in texts]
            points = _measure(engine, precision, prompts, args)
        measured += points
        Console().print(_table(f"{precision}, greedy, {len(prompts)} prompts", points))
    write_report(args.json, {"machine": machine(args.threads), "points": [asdict(point) for point in measured]})
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
    waiting = deque(engine.stream(prompt, params, None if speculation else PLAIN) for prompt in prompts)
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
    numbers = ("at once", "plain tokens/s", "over one", "with speculation", "on / off", "same text")
    table = new_table(title, (), numbers)
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
