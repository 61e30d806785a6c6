"""The default choice of speculation, against plain decoding and every fixed choice.

A cell is a precision, a kind of text, a temperature and a number of requests at once. All ways take turns, in another
order each time, and medians of ratios within a turn are reported, so that drift of the machine's speed affects all
equally. As the best of several noisy figures is biased, the best fixed choice is determined first; then it, plain
decoding and the default take further turns, and only these count. A fixed choice applies in a batch too, which requests
cannot ask for. ``first`` is the default right after opening a bundle, without any statistics of acceptance and step
times. Cells in the result file are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.common import add_common_arguments, machine, new_table, write_report
from benchmarks.pair import bundle, inflated_pair
from specexport.commands.bench import built_in_tasks
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams, Stream
from specexport.runtime.request import Request
from specexport.runtime.speculation.costs import Costs
from specexport.runtime.speculation.policy import MeasuredPolicy, SpeculationPolicy
from specexport.runtime.speculative import DEFAULT, PLAIN, Speculative
from specexport.tables import show

SIZES = (4, 1, 2, 3, 6, 8)
FIXED = {1: (2, 4, 8), 4: (1, 2, 4), 8: (1, 2, 4)}
"""The fixed numbers of draft tokens to compare with, by requests at once."""
NEW_TOKENS = {1: 48, 4: 48, 8: 32}
"""Default of ``--new-tokens`` by requests at once."""
ALONE = 3
"""Number of prompts, decoded one after the other, when requests run alone."""
MAX_SEQ_LEN = 512
LOOKUP = "ngram"
TEXTS = {"code": "completion", "prose": "text", "edits": "edit"}
RANDOM = "random"


@dataclass
class Row:
    """A cell; speeds are output tokens a second of wall clock, prompts included, medians of the repeats.

    Attributes:
        precision: of the matrices.
        text: kind of prompt; ``random`` are tokens drawn evenly.
        temperature: 0 is greedy.
        concurrency: requests at once.
        speeds: by way: ``plain``, ``default``, the draft's number of tokens, a look-up; for ``best`` and the first
            two from the turns that count.
        best: the fastest fixed choice, including plain decoding, in the earlier turns.
        over_best: median ratio of the default to it.
        over_plain: median ratio of the default to plain decoding.
        first_over_plain: the same ratio of a first request.
        steps: number of the default's steps by method.
        same_text: whether greedy texts are those of plain decoding.
    """

    precision: str
    text: str
    temperature: float
    concurrency: int
    speeds: dict[str, float]
    best: str
    over_best: float
    over_plain: float
    first_over_plain: float | None
    steps: dict[str, int]
    same_text: bool | None


class Fixed(SpeculationPolicy):
    """Every request verifies the tree it chose, whatever the batch."""

    def _share(self, request: Request, others: int) -> TokenTree:
        return request.tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks auto``."""
    add_common_arguments(parser, prompt_tokens=48, new_tokens=0)
    parser.add_argument("--precisions", default="fp32,int8,int4")
    parser.add_argument("--texts", default=",".join((*TEXTS, RANDOM)))
    parser.add_argument("--temperatures", default="0,0.7,1.5")
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--finding", type=int, default=2, help="turns that find the best fixed choice")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its table."""
    pair = inflated_pair(args.models, args.work)
    done = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    rows = [Row(**row) for row in done]
    known = {(row.precision, row.text, row.temperature, row.concurrency) for row in rows}
    for precision in args.precisions.split(","):
        folder = bundle(*pair, args.work, precision, SIZES, MAX_SEQ_LEN, 32)
        cells = itertools.product(
            args.texts.split(","), map(float, args.temperatures.split(",")), map(int, args.concurrency.split(","))
        )
        missing = [cell for cell in cells if (precision, *cell) not in known]
        if not missing:
            continue
        # Every prompt is read each time: the prefix cache's savings are not measured here.
        with Engine.load(folder, threads=args.threads, check_hashes=False, prefix_cache=False) as engine:
            warm = set[int]()
            for text, temperature, concurrency in missing:
                rows.append(_cell(engine, precision, text, temperature, concurrency, concurrency not in warm, args))
                warm.add(concurrency)
                write_report(args.json, {"machine": machine(args.threads), "rows": [asdict(row) for row in rows]})
                _print(rows[-1:])
    _print(rows)
    return 0


def _cell(
    engine: Engine,
    precision: str,
    text: str,
    temperature: float,
    concurrency: int,
    cold: bool,
    args: argparse.Namespace,
) -> Row:
    prompts = _prompts(engine, text, max(concurrency, ALONE), args.prompt_tokens)
    together = [prompts] if concurrency > 1 else [[prompt] for prompt in prompts]
    new_tokens = args.new_tokens or NEW_TOKENS[concurrency]
    ways: dict[str, Speculative] = {
        "plain": PLAIN,
        "default": DEFAULT,
        **({"first": DEFAULT} if concurrency == 1 else {}),
        **{str(size): Speculative(method="draft_model", num_speculative_tokens=size) for size in FIXED[concurrency]},
        LOOKUP: Speculative(method=LOOKUP, num_speculative_tokens=max(FIXED[concurrency])),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[list[int]]] = {}
    steps: dict[str, int] = {}

    def turn_of(names: Sequence[str], turn: int) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=new_tokens, ignore_eos=True, seed=turn)
        order = (*names[turn % len(names) :], *names[: turn % len(names)])
        seconds, streams = dict.fromkeys(order, 0.0), {name: list[Stream]() for name in order}
        for each, name in itertools.product(together, order):
            with _policy(engine, name):
                taken, new_streams = _run(engine, each, params, concurrency, ways[name])
            seconds[name] += taken
            streams[name] += new_streams
        for name in order:
            texts[name] = [stream.tokens[-new_tokens:] for stream in streams[name]]
            times[name].append(seconds[name])
        for stream in streams.get("default", ()):
            for method, by in stream.stats.steps_by_draft.items():
                steps[method] = steps.get(method, 0) + sum(by.values())

    if cold:  # warm-up, which allocates buffers
        turn_of(list(ways), 0)
        times = {name: [] for name in ways}
    fixed = [name for name in ways if name not in ("default", "first")]
    for turn in range(args.finding):
        turn_of(fixed, turn)
    best = min(fixed, key=lambda name: statistics.median(times[name]))
    counted = [name for name in ways if name in ("plain", "default", "first", best)]
    times |= {name: [] for name in counted}
    steps.clear()
    for turn in range(args.repeats):
        turn_of(counted, args.finding + turn)
    tokens = len(prompts) * new_tokens

    def over(name: str, way: str = "default") -> float:
        return statistics.median(other / base for base, other in zip(times[way], times[name], strict=True))

    return Row(
        precision,
        text,
        temperature,
        concurrency,
        {name: round(tokens / statistics.median(taken), 1) for name, taken in times.items()},
        best,
        over(best),
        over("plain"),
        over("plain", "first") if "first" in ways else None,
        steps,
        all(decoded == texts["plain"] for decoded in texts.values()) if temperature == 0 else None,
    )


@contextlib.contextmanager
def _policy(engine: Engine, name: str) -> Iterator[None]:
    """Sets the policy of a way: fixed trees, or for ``first`` one without statistics."""
    scheduler, program = engine._scheduler, engine._scheduler._program
    assert engine.costs is not None
    kept = scheduler._policy
    if name == "first":
        costs = Costs(engine.costs.curve, refined=True)
        fresh = MeasuredPolicy(engine.manifest, engine.proposers, costs, program.sizes)
        scheduler._policy = fresh
    elif name != "default":
        scheduler._policy = Fixed(engine.manifest, engine.proposers)
    try:
        yield
    finally:
        scheduler._policy = kept


def _prompts(engine: Engine, text: str, count: int, tokens: int) -> list[list[int]]:
    if text == RANDOM:
        drawn = np.random.default_rng(0).integers(0, engine.manifest.target.vocab_size, (count, tokens))
        return [[int(token) for token in row] for row in drawn]
    tasks = built_in_tasks(engine.encode, count, tokens)
    return [list(task.prompt)[-MAX_SEQ_LEN // 2 :] for task in tasks if task.workload == TEXTS[text]]


def _run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, concurrency: int, way: Speculative
) -> tuple[float, list[Stream]]:
    """Runs all prompts, ``concurrency`` at once; returns the seconds and the streams."""
    waiting = deque(engine.stream(prompt, params, way) for prompt in prompts)
    everyone, running = list(waiting), deque[Stream]()
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.append(waiting.popleft())
            running[-1].start()
        stream = running.popleft()
        if next(stream, None) is not None:
            running.append(stream)
    return time.perf_counter() - start, everyone


def _print(rows: list[Row]) -> None:
    labels = ("precision", "text")
    numbers = (
        "T",
        "at once",
        "plain",
        "default",
        "best fixed",
        "over it",
        "over plain",
        "first",
        "steps by",
        "same text",
    )
    table = new_table("output tokens a second, prompts included", labels, numbers)
    for row in rows:
        table.add_row(
            row.precision,
            row.text,
            f"{row.temperature:g}",
            str(row.concurrency),
            f"{row.speeds['plain']:.1f}",
            f"{row.speeds['default']:.1f}",
            f"{row.best}: {row.speeds[row.best]:.1f}",
            f"{row.over_best:.3f}x",
            f"{row.over_plain:.3f}x",
            "-" if row.first_over_plain is None else f"{row.first_over_plain:.3f}x",
            ", ".join(f"{method} {count}" for method, count in row.steps.items()),
            "-" if row.same_text is None else "yes" if row.same_text else "no",
        )
    show(table)
