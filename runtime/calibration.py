"""What steps cost on this machine: measured when a bundle is first opened there, and remembered."""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from specexport.contract.manifest import Manifest
from specexport.contract.methods import Method
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Backend
from specexport.runtime.buffers import buffers
from specexport.runtime.costs import Cost, CostCurve, MethodCosts
from specexport.runtime.graph import Graph
from specexport.runtime.machine import Remembered
from specexport.runtime.params import SamplingParams
from specexport.runtime.program import Speculation
from specexport.runtime.proposal import Proposal, Proposer, SlotView
from specexport.runtime.step import HostProgram

SECONDS = 3.0
"""About how long it may take, unless single steps are slower than that allows."""
MOST_NOISE = 1.5
"""A machine that is so busy is measured again when the bundle is opened the next time; see ``CostCurve.noise``."""
_HOW = "proposals behind steps"
"""How it is measured: what was measured otherwise is not taken."""
_ROUNDS = 25
_APART = 1.15
"""Widths that are measured are apart by this factor at least: what lies between is interpolated."""
_WIDER = 2
"""Wider steps of a batch hardly ever pay."""
_LARGER = 4
"""How many times larger the cache is that tells what a row of it costs."""
_PERIOD = 11
"""Tokens after which the text repeats itself, so that there is something to look up."""
_GREEDY = SamplingParams(temperature=0.0)
_FIXED = "fixed"

Progress = Callable[[str, int, int], None]
Trial = Callable[[], float]
"""Runs something once; the seconds it took."""


def remembered(manifest: Manifest, backend: Backend, slots: int) -> Remembered[CostCurve]:
    """Where the curve of a bundle is kept on this machine, by all that steps' times depend on."""
    content = msgspec.json.encode(manifest).decode()
    about = (_HOW, content, backend.device, str(slots), *_versions())
    return Remembered("costs", about, CostCurve)


def _versions() -> list[str]:
    """Of what is installed of the libraries that steps take their time in."""
    found = []
    for name in ("specexport", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return found


def measure(
    manifest: Manifest,
    target: Graph,
    speculations: Mapping[str, Speculation],
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> CostCurve:
    """Times steps and proposals, one slot first, then larger batches as far as there is time.

    Of a larger batch only steps are timed that are at most ``_WIDER`` times as wide, all slots together, as the widest
    of a single one. All of a batch size are taken in turns, so that a machine whose speed drifts treats them alike; a
    figure is the
    least of 25 turns, or of as many as there is time for, at least one after the first, which pays for buffers.

    Args:
        manifest: the bundle's.
        target: the target's graph; nothing else may use it meanwhile, and its slots are empty afterwards.
        speculations: the methods to measure, by name.
        seconds: about how long it may take.
        progress: is told what is done.
    """
    program = HostProgram(manifest, target, {_FIXED: Speculation(Method(), _Fixed())})
    points = manifest.target.graph.points
    tokens = _apart(sorted({point.tokens for point in points if point.rows == point.tokens}))
    text = [at % min(_PERIOD, manifest.target.vocab_size) for at in range(_length(manifest, tokens[-1]))]
    target.shrink_cache(0)
    steps: list[Cost] = []
    proposals: dict[str, list[Cost]] = {name: [] for name in speculations}
    reads = {name: _first_read(manifest, one, text, target.sizes[-1]) for name, one in speculations.items()}
    noise: list[float] = []
    end, turn = time.perf_counter() + seconds, 0.0
    for batch in target.sizes:
        began = time.perf_counter()
        if steps and began + 2 * turn > end:  # two turns, and the next batch size takes about as long as the last
            break
        most = max(_WIDER * tokens[-1] // batch, tokens[min(1, len(tokens) - 1)])
        trials: dict[tuple[str, int], Trial] = {
            ("", width): _step(program, _views(text, batch, TokenTree.chain(width), _FIXED))
            for width in tokens
            if width <= most
        }
        for name, one in speculations.items():
            trees = one.method.smaller_trees(manifest.target)
            for tree in [tree for tree in trees if len(tree) <= most] or trees[-1:]:
                trials[name, len(tree)] = _propose(one.proposer, _views(text, batch, tree, name))
        share = (end - began) / (len(target.sizes) - target.sizes.index(batch))
        found = _in_turns(trials, share, f"timing steps of {batch}", noise, progress)
        for (name, nodes), least in found.items():
            (proposals[name] if name else steps).append(Cost(batch=batch, tokens=nodes, seconds=least))
        turn = sum(found.values())
    rows = target.cache_sizes[0]
    larger = max((size for size in target.cache_sizes if size <= _LARGER * rows), default=rows)
    longer: dict[tuple[str, int], float] = {}
    if larger > rows:
        target.reserve(larger)
        ends = {("", width): _step(program, _views(text, 1, TokenTree.chain(width), _FIXED)) for width in _ends(tokens)}
        longer = _in_turns(ends, seconds / 8, f"timing steps with {larger} cache rows", noise, progress)
    for slot in range(target.sizes[-1]):
        target.copy(slot, slot, 0)
        for one in speculations.values():
            one.proposer.release(slot)
    target.shrink_cache(0)
    return CostCurve(
        rows=rows,
        steps=tuple(_rising(steps)),
        more_rows=larger,
        longer=tuple(_rising([Cost(batch=1, tokens=width, seconds=least) for (_, width), least in longer.items()])),
        methods=tuple(
            MethodCosts(method=name, propose=tuple(_rising(costs)), read=reads[name])
            for name, costs in proposals.items()
            if costs
        ),
        noise=statistics.median(noise),
    )


def _length(manifest: Manifest, widest: int) -> int:
    """Tokens of the text that steps go on from: a chunk for a draft to read, as steps cost the same after any."""
    return max(2, min(manifest.prefill_chunk + 1, manifest.max_seq_len - widest - 1))


def _apart(widths: Sequence[int]) -> list[int]:
    """Some of ascending widths, the first and the last among them."""
    found = [widths[0]]
    for width in widths[1:]:
        if width >= _APART * found[-1] or width == widths[-1]:
            found.append(width)
    return found


def _ends(widths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({widths[0], widths[-1]}))


class _Fixed(Proposer):
    """Proposes chains of one token: the cost of a step does not depend on which."""

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        made = {}
        for view in views:
            tokens = np.zeros(len(view.tree) - 1, np.int64)
            made[view.slot] = Proposal(tokens, view.tree, None, tokens[:, None])
        return made


def _views(text: Sequence[int], slots: int, tree: TokenTree, method: str) -> list[SlotView]:
    noise = np.random.default_rng(0)
    return [SlotView(slot, list(text), _GREEDY, noise, tree, text[:_PERIOD], method) for slot in range(slots)]


def _step(program: HostProgram, views: Sequence[SlotView]) -> Trial:
    """A step of the same text again and again: its rows are written where they were."""

    def trial() -> float:
        start = time.perf_counter()
        step = program.step(views)
        return time.perf_counter() - start - step.propose

    return trial


def _propose(proposer: Proposer, views: Sequence[SlotView]) -> Trial:
    def trial() -> float:
        start = time.perf_counter()
        proposer.propose(views)
        return time.perf_counter() - start

    return trial


def _first_read(manifest: Manifest, one: Speculation, text: Sequence[int], slots: int) -> float:
    """Has a method read a text in every slot; seconds of a chunk, 0 where no draft reads."""
    views, seen = _views(text, slots, TokenTree.chain(2), one.method.name), {}
    if one.method.target_outputs:
        made = buffers(manifest.target_signature)(ShapePoint(1, len(text), manifest.target.graph.points[0].cache, 1))[1]
        seen = {name: array[0] for name, array in made.items()}
    times: list[float] = []
    for view in views:
        if seen:  # what a proposer goes on from; its cost does not depend on what that is
            one.proposer.observe(view.slot, seen, 0)
            one.proposer.observe_text(view, seen, 0, range(len(text) - 1))
        more = True
        while more:
            start = time.perf_counter()
            more = one.proposer.prefill(view)
            times.append(time.perf_counter() - start)
    return min(times) if times and not one.method.reads_embeddings else 0.0


def _in_turns(
    trials: Mapping[tuple[str, int], Trial], seconds: float, name: str, noise: list[float], progress: Progress | None
) -> dict[tuple[str, int], float]:
    """The least time of each trial; by what factor its median is above that is added to ``noise``.

    Before each proposal comes a step, as in decoding: a small draft would stay in the processor's cache without it, and
    seem to take half of what it does.
    """
    steps, proposals = ([key for key in trials if bool(key[0]) is proposes] for proposes in (False, True))
    order = list[tuple[str, int]]()
    for at in range(max(len(steps), len(proposals))):
        order += [steps[at % len(steps)], *proposals[at : at + 1]]
    times: dict[tuple[str, int], list[float]] = {key: [] for key in trials}
    end = time.perf_counter() + seconds
    for turn in range(_ROUNDS + 1):
        for key in order:
            taken = trials[key]()
            if turn:
                times[key].append(taken)
        if progress is not None:
            progress(name, turn + 1, _ROUNDS + 1)
        if turn and time.perf_counter() > end:
            break
    if progress is not None:
        progress(name, 1, 1)
    least = {key: max(min(taken), 1e-9) for key, taken in times.items()}
    noise += [statistics.median(taken) / least[key] for key, taken in times.items()]
    return least


def _rising(costs: Sequence[Cost]) -> list[Cost]:
    """Costs none of which is above that of a wider step, or of as wide a one of more slots: noise only adds to them."""
    return [
        msgspec.structs.replace(
            one,
            seconds=min(more.seconds for more in costs if more.batch >= one.batch and more.tokens >= one.tokens),
        )
        for one in sorted(costs, key=lambda one: (one.batch, one.tokens))
    ]
