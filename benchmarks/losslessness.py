"""Large-sample tests that sampled text has the target's own distribution, for every way to speculate.

A cell is a way to speculate, requests alone or in a batch, and sampling parameters. Its samples are texts of three
tokens after one prompt, of a model with twelve tokens, so that the probability of each of the 1728 texts is known.
Three chi-square tests compare the first tokens, the first two, and all three. Holm's correction over all tests of all
cells is valid for any dependence, such as that of a cell's three tests. Cells are independent, so their p-values must
also be uniform together: Kolmogorov-Smirnov and Fisher, for each of the three lengths.

A batch has up to 8 requests that come and go, and an artificial cost curve, so that the number of draft tokens depends
on the batch. Cells named for a bias show the power of the tests: their acceptance is wrong by that much.

Results are stored in ``--json`` cell by cell, and another run resumes there. Exits with 1 if a distribution is not the
target's, or if a bias was not detected.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, new_table, write_report
from specexport.contract.manifest import Manifest
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams, Stream
from specexport.runtime import step as step_module
from specexport.runtime.request import Stats
from specexport.runtime.sampling import Distributions, accept_sampled
from specexport.runtime.speculation.costs import CostCurve
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.tables import show

PROMPT = (5, 8, 5, 8)
LENGTH = 3
LONG = 56
"""Tokens of the requests that only fill the batch; the model's context is 64."""
LEVEL = 0.01
"""Lower limit of ``overall``, the least p-value of :func:`summary`, corrected for their number."""

Text = tuple[int, ...]
Accept = Callable[..., tuple[list[int], int]]


@dataclass(frozen=True)
class Way:
    """A way to speculate.

    Attributes:
        recipe: of its bundle; see ``tests.make_bundles``.
        method: the bundle's method.
        tokens: draft tokens of the tree that a single request verifies.
        hypothesis: for the method of that name.
    """

    recipe: str
    method: str
    tokens: int
    hypothesis: Text | None = None


WAYS = {
    "draft_model, chain": Way("draft", "draft_model", 3),
    "draft_model, tree": Way("draft-tree", "draft_model", 8),
    "medusa, chain": Way("medusa", "medusa", 3),
    "medusa, tree": Way("medusa-tree", "medusa", 10),
    "mlp_speculator, chain": Way("mlp", "mlp_speculator", 3),
    "mlp_speculator, tree": Way("mlp-tree", "mlp_speculator", 10),
    "lookahead, tree": Way("lookahead", "lookahead", 6),
    "suffix, chain": Way("texts", "suffix", 3),
    "ngram, chain": Way("texts", "ngram", 3),
    "self_draft, chain": Way("self", "self_draft", 3),
    "self_draft, tree": Way("self-tree", "self_draft", 8),
    "medusa_draft, chain": Way("medusa-draft", "medusa_draft", 3),
    "medusa_draft, tree": Way("medusa-draft-tree", "medusa_draft", 10),
    "universal_draft, chain": Way("universal", "universal_draft", 3),
    "hypothesis, chain": Way("texts", "hypothesis", 3, (5, 8, 5)),
    "eagle3, chain": Way("eagle3", "eagle3", 3),
    "eagle3, tree": Way("eagle3-tree", "eagle3", 8),
    "mtp, chain": Way("mtp", "mtp", 3),
    "mtp, tree": Way("mtp-tree", "mtp", 8),
    "dflash, chain": Way("dflash", "dflash", 3),
    "dflash, tree": Way("dflash-tree", "dflash", 10),
}
SAMPLING = {
    "T 0.7": SamplingParams(temperature=0.7),
    "T 1.0": SamplingParams(),
    "top-k 6": SamplingParams(top_k=6),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.1": SamplingParams(min_p=0.1),
}
SHIFT, FACTOR = "accepts 1 point too often", "accepts 1 % too often"
BIASED = {0: (("T 0.7", SHIFT), ("T 1.0", SHIFT)), 1: tuple((sampling, FACTOR) for sampling in SAMPLING)}
"""By the turn of :func:`cells` that they follow. SHIFT has no filters, as it would accept excluded tokens."""


@dataclass(frozen=True)
class Cell:
    """The settings of one set of samples; ``bias`` is empty except for cells that show the tests' power."""

    way: str
    load: str
    sampling: str
    bias: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.way, self.load, self.sampling, self.bias) if part)


@dataclass
class Row:
    """The result of a cell.

    Attributes:
        samples: number of texts.
        p: of the chi-square tests of the first token, the first two, and all three.
        drafted: draft tokens verified.
        steps: steps with draft tokens.
        accepted_at: number of those that accepted a draft token at each depth.
        drafts: number of texts by the draft tokens of their first step, if only one step had any.
        seconds: run time.
    """

    way: str
    load: str
    sampling: str
    bias: str
    samples: int
    p: list[float]
    drafted: int
    steps: int
    accepted_at: list[int]
    drafts: dict[str, int]
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks losslessness``."""
    parser.add_argument("--samples", type=int, default=100_000, help="of each cell")
    parser.add_argument("--only", default="", metavar="WORDS", help="cells whose name holds this")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, a process and a thread each")
    parser.add_argument("--minutes", type=float, help="begin no cell after that long")
    parser.add_argument("--work", type=Path, default=Path(".cache/bench/losslessness"), help="keeps the bundles")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/losslessness.json"), help="what is done, and goes on"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the missing cells and prints the verdict; returns 1 if a distribution is wrong or a bias undetected."""
    report = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
    rows = [Row(**row) for row in report.get("rows", ())]
    done = {(row.way, row.load, row.sampling, row.bias) for row in rows if row.samples == args.samples}
    wanted = [cell for cell in cells() if args.only in str(cell)]
    left = [cell for cell in wanted if (cell.way, cell.load, cell.sampling, cell.bias) not in done]
    if len(done) != len(rows):
        raise SystemExit(
            f"{args.json}: rows of {sorted({row.samples for row in rows})} samples, and --samples is {args.samples}; "
            "name another file with --json"
        )
    for name in sorted({WAYS[cell.way].recipe for cell in left}):
        _bundle(args.work, name)
    here = machine(1)
    print(here, f"{len(left)} cells to go", flush=True)
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        waiting = iter(left)
        running: deque[Any] = deque()
        while True:
            while len(running) < args.jobs and (cell := _next(waiting, args.minutes, began)) is not None:
                running.append(pool.apply_async(run, (cell, args.samples, args.work)))
            if not running:
                break
            rows.append(running.popleft().get())
            row = rows[-1]
            name = Cell(row.way, row.load, row.sampling, row.bias)
            print(f"{name}: p {' '.join(f'{p:.3g}' for p in row.p)}, {row.seconds:.0f} s", flush=True)
            write_report(args.json, {"machine": here, **verdict(rows), "rows": [asdict(row) for row in rows]})
    return _print(rows)


def _next(waiting: Iterator[Cell], minutes: float | None, began: float) -> Cell | None:
    over = minutes is not None and time.monotonic() - began > 60 * minutes
    return None if over else next(waiting, None)


def cells() -> list[Cell]:
    """All cells in an order that covers much early: the first turn has every way once, the next the other loads, and
    the following ones other sampling parameters; biased cells come early.
    """
    loads, sampling = ("alone", "batch"), tuple(SAMPLING)
    ordered = []
    for turn in range(2 * len(sampling)):
        for at, way in enumerate(WAYS):
            ordered.append(
                Cell(way, loads[(at + turn) % 2], sampling[(at + turn // 2 + 3 * (turn % 2)) % len(sampling)])
            )
        ordered += [Cell("draft_model, chain", "alone", *biased) for biased in BIASED.get(turn, ())]
    return ordered


def _bundle(work: Path, name: str) -> Path:
    """A bundle, built if it does not exist."""
    folder = work / name
    if not folder.exists():
        from tests.make_bundles import LOSSLESSNESS, make  # imported here, as only it needs torch

        make(name, work, LOSSLESSNESS[name])
    return folder


def _costs(manifest: Manifest) -> CostCurve:
    """Costs that make the number of draft tokens depend on the batch.

    Steps up to a total number of tokens cost the same: alone the largest trees pay, in a full batch the smallest.
    """
    from tests.manifests import curve

    free = 4 * max(method.extra_nodes + len(tree) for method in manifest.methods for tree in method.token_trees())
    return curve(manifest, lambda slots, tokens: float(max(free, slots * tokens)))


@lru_cache(maxsize=2)
def _engine(folder: Path, load: str) -> Engine:
    batch = load == "batch"
    # Methods that observe the target propose in the first step only if the prompt was read by this request.
    manifest = read_manifest(folder)
    observes = any(method.target_outputs for method in manifest.methods)
    engine = Engine.load(
        folder,
        threads=1,
        check_hashes=False,
        calibrate=False,
        costs=_costs(manifest) if batch else None,
        prefix_cache=batch or not observes,
    )
    gc.freeze()
    return engine


def run(cell: Cell, samples: int, work: Path) -> Row:
    """Draws a cell's samples and tests them."""
    from tests.reference import exact_texts, prefix_p_values

    start, way, params = time.monotonic(), WAYS[cell.way], SAMPLING[cell.sampling]
    folder = work / way.recipe
    engine = _engine(folder, cell.load)
    logits = json.loads((work / f"{way.recipe}.json").read_text(encoding="utf-8"))["next_logits"]
    step_module.accept_sampled = ACCEPT[cell.bias]
    texts: list[Text] = []
    tally, accepted_at, drafts = Counter[str](), Counter[int](), Counter[int]()
    for text, stats in draw(engine, cell, way, params, samples):
        texts.append(text)
        tally["drafted"] += stats.drafted
        tally["steps"] += stats.steps_with_draft
        accepted_at.update(dict(enumerate(stats.accepted_at)))
        if stats.steps_with_draft <= 1:
            drafts[stats.drafted] += 1
    step_module.accept_sampled = accept_sampled
    return Row(
        **asdict(cell),
        samples=samples,
        p=prefix_p_values(texts, exact_texts(logits, params, LENGTH)),
        drafted=tally["drafted"],
        steps=tally["steps"],
        accepted_at=[accepted_at[depth] for depth in range(LENGTH)],
        drafts={str(count): drafts[count] for count in sorted(drafts)},
        seconds=round(time.monotonic() - start, 1),
    )


def draw(engine: Engine, cell: Cell, way: Way, params: SamplingParams, samples: int) -> Iterator[tuple[Text, Stats]]:
    """The samples of a cell, each a separate request with a seed that no other cell has.

    In a batch several run at once. As each turn of the scheduler admits one request, and requests are short, they never
    fill the slots by themselves: up to five longer plain requests run beside them.
    """
    first = zlib.crc32(str(cell).encode()) << 32
    speculation = Speculative(method=way.method, num_speculative_tokens=way.tokens, hypothesis=way.hypothesis)
    params = params.replace(max_tokens=LENGTH, ignore_eos=True)
    sizes, running, others = random.Random(first), deque[Stream](), deque[Stream]()
    long_requests = 0
    for at in range(samples):
        if cell.load == "batch" and at % 16 == 0:
            long_requests = sizes.choice((0, 1, 2, 4, 5)) if at % 64 == 0 else long_requests
            while others and (len(others) > long_requests or others[0].stats.output_tokens > LONG - 24):
                others.popleft().close()
            while len(others) < long_requests:
                others.append(engine.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=LONG), PLAIN))
                others[-1].start()
        stream = engine.stream(PROMPT, params.replace(seed=first + at), speculation)
        stream.start()
        running.append(stream)
        if len(running) >= (3 if cell.load == "batch" else 1):
            yield _finished(running.popleft())
    while running:
        yield _finished(running.popleft())


def _finished(stream: Stream) -> tuple[Text, Stats]:
    for _ in stream:
        pass
    return tuple(stream.tokens[len(PROMPT) :]), stream.stats


# --- wrong acceptance -------------------------------------------------------------------------------------------------


def _with_noise(change: Callable[[Any], Any]) -> Accept:
    """Acceptance with changed noise for draft tokens, but not for the token after them."""

    def accept(
        logits: Any, tree: TokenTree, tokens: Any, q: Distributions | None, params: SamplingParams, noise: Any
    ) -> tuple[list[int], int]:
        return accept_sampled(logits, tree, tokens, q, params, np.append(change(noise[:-1]), noise[-1]))

    return accept


ACCEPT: dict[str, Accept] = {
    "": accept_sampled,
    SHIFT: _with_noise(lambda noise: noise - 0.01),
    FACTOR: _with_noise(lambda noise: noise / 1.01),
}


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(rows: list[Row]) -> dict[str, Any]:
    """Joint statistics of all unbiased cells, and of the cells of each bias."""
    return {
        name: summary([row for row in rows if row.bias == bias])
        for name, bias in (("lossless", ""), (SHIFT, SHIFT), (FACTOR, FACTOR))
        if any(row.bias == bias for row in rows)
    }


def summary(rows: list[Row]) -> dict[str, Any]:
    """The number of cells, the least p by Holm, the tests of uniformity for each length, and all combined."""
    from scipy import stats

    p = np.array([row.p for row in rows])  # [cells, lengths]
    holm = min(1.0, float(p.min() * p.size))
    uniform = [float(stats.kstest(column, "uniform").pvalue) for column in p.T]
    fisher = [float(stats.combine_pvalues(np.maximum(column, 1e-300)).pvalue) for column in p.T]
    together = [holm, *uniform, *fisher]
    return {
        "cells": len(rows),
        "samples": sum(row.samples for row in rows),
        "holm": holm,
        "kolmogorov_smirnov": uniform,
        "fisher": fisher,
        "overall": min(1.0, min(together) * len(together)),
    }


def _print(rows: list[Row]) -> int:
    numbers = ("p of 1 token", "of 2", "of 3", "draft tokens a step", "accepted at 1", "2", "3")
    table = new_table("Sampled texts against their exact distribution", ("cell",), numbers)
    for row in rows:
        table.add_row(
            str(Cell(row.way, row.load, row.sampling, row.bias)),
            *(f"{p:.2g}" for p in row.p),
            f"{row.drafted / max(1, row.steps):.2f}",
            *(f"{count / max(1, row.steps):.3f}" for count in row.accepted_at),
        )
    show(table)
    report = verdict(rows)
    for name, together in report.items():
        print(name, together)
    wrong = [name for name, together in report.items() if (together["overall"] < LEVEL) is not (name != "lossless")]
    return int(bool(wrong))
