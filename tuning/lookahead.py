"""Which window, n-grams and guesses make lookahead decoding fastest on this device: W, N and G.

What is accepted depends on all three, and a run shows it for one choice of them. But column i of the window sees the
columns before it and no others, and a pool of G n-grams a token keeps the latest G whatever else it keeps: so a run
with a wide window and many guesses tells what a narrower window and fewer guesses would have proposed at its steps. One
such run for each N is replayed for every W and G; the best of each N is then run itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from specexport.contract.errors import RequestError
from specexport.contract.methods import Lookahead
from specexport.contract.tree import MAX_NODES
from specexport.runtime.bundle import Bundle
from specexport.runtime.engine import Engine
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposers.lookahead import LookaheadProposer, NgramPool, merged
from specexport.runtime.proposers.reader import common_prefix
from specexport.runtime.stats import Stats
from specexport.runtime.step import Speculation
from specexport.tuning.record import recorded
from specexport.tuning.tree import Progress, added, with_widths

Ngram = tuple[int, tuple[int, ...]]
"""Its first token, and the rest."""

NAME = "lookahead"
NGRAMS = (2, 3, 4, 5)
"""N that are tried."""
_SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 63)
"""W and G that are tried."""


@dataclass(frozen=True)
class ReplayedStep:
    """A step of an observed run.

    Attributes:
        root: its root.
        ahead: the N - 1 tokens that came after it; fewer at the end of a text.
        said: the n-grams of the window's columns after it, in the columns' order; none while the window fills.
    """

    root: int
    ahead: tuple[int, ...]
    said: tuple[Ngram, ...]


@dataclass(frozen=True)
class Run:
    """One text's steps.

    Attributes:
        seeds: the n-grams its pool began with.
        steps: its steps, in order.
    """

    seeds: tuple[Ngram, ...]
    steps: tuple[ReplayedStep, ...]


@dataclass(frozen=True)
class LookaheadSizes:
    """Sizes that were considered, and what is expected of them.

    Attributes:
        method: lookahead decoding of these sizes.
        tokens: a step is expected to commit, the bonus token included.
        seconds: a step is expected to take.
        speed_up: over plain decoding.
    """

    method: Lookahead
    tokens: float
    seconds: float
    speed_up: float


@dataclass(frozen=True)
class Measured:
    """What decoding with some sizes showed.

    Attributes:
        tokens: a step committed, the bonus token included.
        speed_up: over plain decoding of the same prompts, in turns with it.
    """

    tokens: float
    speed_up: float


def any_widths(bundle: Bundle, most: int) -> Bundle:
    """A bundle as if it had been built for one slot, lookahead decoding alone and steps of up to ``most`` tokens.

    Its symbolic master can run them on the CPU.
    """
    manifest = bundle.manifest
    model = manifest.target
    alone = tuple(graph for graph in model.graph.points if graph.point.batch == 1)
    model = msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, points=alone))
    methods = tuple(method for method in manifest.methods if isinstance(method, Lookahead))
    changed = msgspec.structs.replace(
        manifest, target=with_widths(model, range(1, most + 1)), methods=methods, batch_sizes=(1,)
    )
    return Bundle(bundle.folder, changed)


def widest(ngram: int, most: int, room: int, seeding: bool) -> Lookahead | None:
    """The sizes to observe an N with; None where its smallest step has more than ``most`` tokens.

    Args:
        ngram: N.
        most: tokens a step may have in the end.
        room: tokens that fit behind the context.
        seeding: whether the pool starts with the prompt's n-grams.
    """
    least = max(1, ngram - 2)
    if (ngram - 1) * (least + 1) > min(most, room):
        return None
    each = min(2 * most, room, MAX_NODES) // (2 * (ngram - 1))
    return Lookahead.of(max(each, least), ngram, max(each, 1), seeding)


@contextlib.contextmanager
def proposing(engine: Engine, method: Lookahead, pool: Callable[[int], NgramPool] = NgramPool) -> Iterator[None]:
    """Lets an engine of :func:`any_widths` decode with other sizes while the block runs."""
    before = engine.speculations[NAME]
    engine.speculations[NAME] = Speculation(LookaheadProposer(method, pool), method.token_trees())
    try:
        yield
    finally:
        engine.speculations[NAME] = before


class _Diary(NgramPool):
    """A pool that keeps what it was told: ``told[0]`` before the first question, ``told[i]`` after the i-th."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.asked: list[int] = []
        self.told: list[list[Ngram]] = [[]]

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        self.told[-1].append((first, rest))
        super().add(first, rest)

    def guesses(self, first: int, limit: int) -> list[tuple[int, ...]]:
        self.asked.append(first)
        self.told.append([])
        return super().guesses(first, limit)


def observe(
    engine: Engine, method: Lookahead, prompts: Sequence[Sequence[int]], params: SamplingParams, progress: Progress
) -> tuple[list[Run], Stats]:
    """Decodes prompts and keeps what every step could have guessed.

    Args:
        engine: of a bundle that can run the sizes.
        method: the largest sizes that are to be judged.
        prompts: tokens.
        params: how to sample.
        progress: called for every prompt.

    Returns:
        A run a prompt, and the counters of all requests together.
    """
    runs: list[Run] = []
    diaries: list[_Diary] = []
    total = Stats()

    def begin(limit: int) -> _Diary:
        diaries.append(_Diary(limit))
        return diaries[-1]

    with proposing(engine, method, begin), recorded(engine, NAME) as recorder:
        for index, prompt in enumerate(prompts):
            diaries.clear()
            recorder.made.clear()
            done = engine.generate(prompt, params, method=NAME)
            total = added(total, done.stats)
            whole = [*prompt, *done.token_ids]
            for diary in diaries:  # none for a text whose only step was a plain one
                lengths = [length for length, _ in recorder.made]
                steps = [
                    ReplayedStep(root, tuple(whole[length : length + method.ngram - 1]), tuple(said))
                    for root, length, said in zip(diary.asked, lengths, diary.told[1:], strict=True)
                ]
                runs.append(Run(tuple(diary.told[0]), tuple(steps)))
            progress(f"decoding, N = {method.ngram}", index + 1, len(prompts))
    return runs, total


def replay(method: Lookahead, runs: Sequence[Run]) -> tuple[float, Counter[int]]:
    """What the steps of observed runs would have come to with a narrower window and fewer guesses.

    Args:
        method: the sizes, of the runs' N.
        runs: observed with sizes at least as large.

    Returns:
        Tokens a step, and how many steps have each width T, their window being full.

    Raises:
        RequestError: the runs have no steps.
    """
    widths = sorted(method.widths())
    tokens, steps = 0, 0
    at: Counter[int] = Counter()
    for run in runs:
        pool = NgramPool(method.guesses)
        for ngram in run.seeds:
            pool.add(*ngram)
        for step in run.steps:
            guesses = pool.guesses(step.root, method.guesses)
            if len(step.ahead) == method.ngram - 1:  # the end of a text is no rejection
                steps += 1
                tokens += 1 + max((common_prefix(guess, step.ahead) for guess in guesses), default=0)
                nodes = method.window_nodes + len(merged(guesses)[0])
                at[next(width for width in widths if width >= nodes)] += 1
            for ngram in step.said[: method.window]:
                pool.add(*ngram)
    if not steps:
        raise RequestError("no step to learn from; give more or longer prompts, or more tokens")
    return tokens / steps, at


def candidates(observed: Lookahead, runs: Sequence[Run], stats: Stats, costs: Sequence[float]) -> list[LookaheadSizes]:
    """Every W and G of an N that was observed, the one that is expected to commit most tokens a second first.

    Args:
        observed: the sizes the runs were made with.
        runs: what :func:`observe` found.
        stats: their counters.
        costs: c(1), c(2), ...: as many as a step may have tokens.
    """
    other = (stats.accept + stats.host) / stats.steps
    propose = stats.propose / max(1, stats.steps_with_draft)
    plain = costs[0] + other
    found = []
    for window in (size for size in _SIZES if observed.ngram - 2 <= size <= observed.window):
        for guesses in (size for size in _SIZES if size <= observed.guesses):
            if (observed.ngram - 1) * (window + guesses) > len(costs):
                break
            method = Lookahead.of(window, observed.ngram, guesses, observed.prompt_seeding)
            tokens, at = replay(method, runs)
            verify = sum(costs[width - 1] * count for width, count in at.items()) / at.total()
            seconds = verify + propose + other
            found.append(LookaheadSizes(method, tokens, seconds, tokens * plain / seconds))
    return sorted(found, key=lambda one: -one.speed_up)


def measure(
    engine: Engine,
    methods: Sequence[Lookahead],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    progress: Progress,
) -> list[Measured]:
    """Decodes prompts with each of some sizes and plainly, in turns.

    Args:
        engine: of a bundle that can run the sizes.
        methods: the sizes.
        prompts: tokens.
        params: how to sample.
        progress: called for every prompt.

    Returns:
        What was found, in the order of the sizes.
    """
    plain, totals = Stats(), [Stats() for _ in methods]
    for index, prompt in enumerate((prompts[0], *prompts)):
        ran = engine.generate(prompt, params, speculation=False).stats
        each = []
        for method in methods:
            with proposing(engine, method):
                each.append(engine.generate(prompt, params, method=NAME).stats)
        if index:  # the first round pays for buffers
            plain = added(plain, ran)
            totals = [added(total, stats) for total, stats in zip(totals, each, strict=True)]
        progress("measuring", index + 1, len(prompts) + 1)
    return [
        Measured(total.output_tokens / total.steps, total.tokens_per_second / plain.tokens_per_second)
        for total in totals
    ]
