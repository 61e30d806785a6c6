"""Whether sampled text has the target's own distribution: every way to speculate, at a size that settles it.

A cell is a way to speculate, requests alone or in a batch, and sampling parameters. Its samples are texts of three
tokens after one prompt, of a model of twelve tokens, so that the probability of each of the 1728 texts is known. Three
chi-square tests compare them: first tokens, first two, all three. Holm's correction over all tests of all cells holds
however they depend on each other, as the three of a cell do. Cells are independent, so that their p-values must also be
uniform together: Kolmogorov-Smirnov and Fisher, for each of the three lengths.

A batch has up to 8 requests that come and go, and a made-up cost curve by which the number of draft tokens follows from
how many they are. Cells named for a bias show what the tests find: acceptance is made wrong by that much.

What is done is kept in ``--json`` cell by cell, and a run goes on with what is missing there. Exits with 1 if a
distribution is not the target's, or a bias was not found.
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
from specexport.runtime.costs import CostCurve
from specexport.runtime.sampling import Distributions, accept_sampled
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.runtime.stats import Stats
from specexport.tables import show

PROMPT = (5, 8, 5, 8)
LENGTH = 3
LONG = 56
"""Tokens of the requests that keep others company; the model's context is 64."""
LEVEL = 0.01
"""What ``overall`` has to stay above: the least of all p-values of :func:`summary`, corrected for how many they are."""

Text = tuple[int, ...]
Accept = Callable[..., tuple[list[int], int]]


@dataclass(frozen=True)
class Way:
    """A way to speculate.

    Attributes:
        recipe: of its bundle; see ``tests.make_bundles``.
        method: which of the bundle's.
        tokens: draft tokens of the tree that a request alone verifies.
        hypothesis: for the method that takes one.
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
"""By after which turn of :func:`cells`. SHIFT goes without filters: it would accept what they make impossible."""


@dataclass(frozen=True)
class Cell:
    """What one set of samples is drawn by; ``bias`` is empty but for those that show what would be found."""

    way: str
    load: str
    sampling: str
    bias: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.way, self.load, self.sampling, self.bias) if part)


@dataclass
class Row:
    """What was found in a cell.

    Attributes:
        samples: texts.
        p: of the chi-square tests of the first token, the first two, and all three.
        drafted: draft tokens verified.
        steps: steps with draft tokens.
        accepted_at: in how many of those a draft token was accepted at each depth.
        drafts: how many texts' first step verified so many draft tokens, where only one step had some.
        seconds: that it took.
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
    """Declares the arguments of ``python -m benchmarks losslessness``."""
    parser.add_argument("--samples", type=int, default=100_000, help="of each cell")
    parser.add_argument("--only", default="", metavar="WORDS", help="cells whose name holds this")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, a process and a thread each")
    parser.add_argument("--minutes", type=float, help="begin no cell after that long")
    parser.add_argument("--work", type=Path, default=Path(".cache/bench/losslessness"), help="keeps the bundles")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/losslessness.json"), help="what is done, and goes on"
    )


def main(args: argparse.Namespace) -> int:
    """Runs what is missing and prints the verdict; 1 if a distribution is not the target's or a bias was not found."""
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
    """All cells, those done first spread out: the first turn has every way once, the next with the other load, and so
    on with other sampling parameters; biased ones come early.
    """
    loads, sampling = ("alone", "batch"), tuple(SAMPLING)
    found = []
    for turn in range(2 * len(sampling)):
        for at, way in enumerate(WAYS):
            found.append(Cell(way, loads[(at + turn) % 2], sampling[(at + turn // 2 + 3 * (turn % 2)) % len(sampling)]))
        found += [Cell("draft_model, chain", "alone", *biased) for biased in BIASED.get(turn, ())]
    return found


def _bundle(work: Path, name: str) -> Path:
    """A bundle; made if it is not there."""
    folder = work / name
    if not folder.exists():
        from tests.make_bundles import LOSSLESSNESS, make  # needs torch, which the rest does not

        make(name, work, LOSSLESSNESS[name])
    return folder


def _costs(manifest: Manifest) -> CostCurve:
    """Costs by which the number of draft tokens depends on the batch.

    A step costs nothing more up to some tokens in all: alone the largest trees pay, in a full batch the smallest.
    """
    from tests.manifests import curve

    free = 4 * max(method.beside + len(tree) for method in manifest.methods for tree in method.token_trees())
    return curve(manifest, lambda slots, tokens: float(max(free, slots * tokens)))


@lru_cache(maxsize=2)
def _engine(folder: Path, load: str) -> Engine:
    batch = load == "batch"
    # What observes the target proposes in the first step only if the prompt was read, so alone it is.
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
    """The samples of a cell, each a request of its own with a seed that no other cell has.

    In a batch there are always some that run. As a turn of the scheduler lets one request in, and they are soon over,
    they never fill the slots by themselves: up to five longer requests, plain ones, run beside them.
    """
    first = zlib.crc32(str(cell).encode()) << 32
    how = Speculative(method=way.method, num_speculative_tokens=way.tokens, hypothesis=way.hypothesis)
    params = params.replace(max_tokens=LENGTH, ignore_eos=True)
    sizes, running, others = random.Random(first), deque[Stream](), deque[Stream]()
    beside = 0
    for at in range(samples):
        if cell.load == "batch" and at % 16 == 0:
            beside = sizes.choice((0, 1, 2, 4, 5)) if at % 64 == 0 else beside
            while others and (len(others) > beside or others[0].stats.output_tokens > LONG - 24):
                others.popleft().close()
            while len(others) < beside:
                others.append(engine.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=LONG), PLAIN))
                others[-1].start()
        stream = engine.stream(PROMPT, params.replace(seed=first + at), how)
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
    """Acceptance whose noise for draft tokens, not for the token after them, is changed."""

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
    """What all cells say together: of those with the true acceptance, and of each bias."""
    return {
        name: summary([row for row in rows if row.bias == bias])
        for name, bias in (("lossless", ""), (SHIFT, SHIFT), (FACTOR, FACTOR))
        if any(row.bias == bias for row in rows)
    }


def summary(rows: list[Row]) -> dict[str, Any]:
    """Of some cells: how many, the least p by Holm, how uniform the p-values of each length are, and all in one p."""
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
    found = verdict(rows)
    for name, together in found.items():
        print(name, together)
    wrong = [name for name, together in found.items() if (together["overall"] < LEVEL) is not (name != "lossless")]
    return int(bool(wrong))
