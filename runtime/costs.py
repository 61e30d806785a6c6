"""The cost of steps on this machine: measured when a bundle is first opened there, stored, and interpolated."""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from specexport.contract.manifest import Manifest
from specexport.contract.methods import Method
from specexport.contract.model import Size, Strict
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Backend, Graph, buffers
from specexport.runtime.machine import MachineRecord
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import Proposal, Proposer, SlotView
from specexport.runtime.step import HostProgram
from specexport.runtime.step_program import LoadedMethod

Seconds = Annotated[float, Meta(gt=0.0, le=1e6)]
_PACE_STEP, _FACTOR_STEP = 1.02, 1.005
"""Factors by which an observed time moves the estimate of the machine's speed, and a call's own factor."""
_MOST: Final = 1.5
"""Largest factor by which refinement changes a measured cost."""
SECONDS = 3.0
"""About how long calibration may take, unless single steps are slower than that allows."""
MOST_NOISE = 1.5
"""A busier machine is measured again when the bundle is opened the next time; see ``CostCurve.noise``."""
_VERSION = "plain steps of one request behind plain steps"
"""Version of the measurement; older results are discarded."""
_ROUNDS = 25
_PLAIN_BEFORE = 5
"""Plain steps of a single request before one that is timed."""
_SPACING = 1.15
"""Least ratio of neighbouring measured widths; costs between them are interpolated."""
_WIDER = 2
"""Widest steps of a batch that are measured, all slots together, relative to a single slot's widest."""
_LONGER = 8
"""Relative length of the longer text from which the cost of a further token is computed."""
_PERIOD = 11
"""Tokens after which the text repeats itself, so that look-ups have matches."""
_GREEDY = SamplingParams(temperature=0.0)
_FIXED = "fixed"

Progress = Callable[[str, int, int], None]
Trial = Callable[[], float]
"""Runs a call once and returns the seconds that it took."""


class Cost(Strict, frozen=True):
    """The time of one call, the least of several: other load on the machine only adds to it.

    Attributes:
        batch: slots that took part, B.
        tokens: for a step, T; for proposing, the nodes of each slot's tree.
        seconds: wall-clock time.
    """

    batch: Size
    tokens: Size
    seconds: Seconds


class MethodCosts(Strict, frozen=True):
    """What proposing with a method costs.

    Attributes:
        method: its name.
        propose: d(B, K): the time of proposing each of its trees.
        read: seconds in which a draft reads a chunk of text; 0 for methods that read nothing.
    """

    method: str
    propose: Annotated[tuple[Cost, ...], Meta(min_length=1)]
    read: Annotated[float, Meta(ge=0.0, le=1e6)]


class CostCurve(Strict, frozen=True):
    """The measured costs of a bundle on a machine.

    Attributes:
        text: tokens of the text at whose end ``steps`` were measured.
        steps: c(B, T): steps without proposing, for every batch size up to the largest that was measured.
        longer_text: tokens of the longer text of ``longer``.
        longer: c(1, T) at its end; empty if the bundle's context is too short.
        methods: the costs of every measured method.
        noise: ratio of a call's median time to its least, the median over all calls: other load on the machine.
    """

    text: Size
    steps: Annotated[tuple[Cost, ...], Meta(min_length=1)]
    longer_text: Size
    longer: tuple[Cost, ...]
    methods: tuple[MethodCosts, ...]
    noise: float = 1.0


class Costs:
    """c(B, T) and d(B, K) of a curve, after any text. Widths between measured ones are interpolated linearly, those
    beyond the last extrapolated. Each further token of a slot's text adds the same cost.

    A batch larger than any that was measured takes as long as the largest one with as many tokens in total, and its
    proposals take proportionally longer.

    The times of steps refine the costs (:meth:`refine`): in decoding a wide step takes a few percent longer, relative
    to a plain one, than when it was measured, and the machine may have been busy then. Only ratios of costs matter. So
    each call has a factor in addition to the machine's present speed, and a time above or below the expected one moves
    both by a fixed small step: they follow the median, and outliers count as much as any other time.

    Args:
        curve: the measured costs, also an attribute.
        refined: whether the times of steps refine the costs; else they are constant.
    """

    def __init__(self, curve: CostCurve, refined: bool = False) -> None:
        self.curve = curve
        self._refined = refined
        self._pace = 1.0
        self._factors: dict[tuple[str | None, int, int], float] = {}
        self._steps, self._longer = _Line(curve.steps), _Line(curve.longer)
        self._propose = {costs.method: _Line(costs.propose) for costs in curve.methods}
        self._read = {costs.method: costs.read for costs in curve.methods}
        self._measured_step = lru_cache(maxsize=4096)(self._step)
        self._measured_propose = lru_cache(maxsize=4096)(self._proposing)

    def step(self, batch: int, tokens: int, text: int) -> float:
        """Seconds of a step that verifies ``tokens`` tokens a slot after ``text`` tokens, without proposing."""
        return self._measured_step(batch, tokens, text) * self._factors.get((None, batch, tokens), 1.0)

    def propose(self, method: str, batch: int, nodes: int) -> float:
        """Seconds of proposing a tree of this many nodes for each slot."""
        return self._measured_propose(method, batch, nodes) * self._factors.get((method, batch, nodes), 1.0)

    def refine(self, method: str | None, batch: int, tokens: int, expected: float, seconds: float) -> None:
        """Refines the costs by the time of a call.

        Args:
            method: the method that proposed; None for a step without proposing.
            batch: slots that took part.
            tokens: for a step, T; for proposing, the nodes of the tree.
            expected: seconds by :meth:`step` or :meth:`propose`.
            seconds: measured seconds.
        """
        if not self._refined or expected <= 0.0:
            return
        key, longer = (method, batch, tokens), seconds > expected * self._pace
        self._pace *= _PACE_STEP if longer else 1 / _PACE_STEP
        factor = self._factors.get(key, 1.0) * (_FACTOR_STEP if longer else 1 / _FACTOR_STEP)
        self._factors[key] = min(max(factor, 1 / _MOST), _MOST)

    def _step(self, batch: int, tokens: int, text: int) -> float:
        curve, token = self.curve, 0.0
        if curve.longer:
            more = self._longer.at(1, tokens) - self._steps.at(1, tokens)
            token = max(0.0, more) / (curve.longer_text - curve.text)
        wide = tokens * max(1.0, batch / self._steps.largest)
        return self._steps.at(batch, wide) + token * batch * max(0, text - curve.text)

    def _proposing(self, method: str, batch: int, nodes: int) -> float:
        line = self._propose.get(method)  # methods that need no graph cost next to nothing and may be unmeasured
        if line is None:
            return 0.0
        return line.at(batch, nodes) * max(1.0, batch / line.largest)

    def read(self, method: str) -> float:
        """Seconds in which a method's draft reads a chunk of text; 0 for methods that read nothing."""
        return self._read.get(method, 0.0)


class _Line:
    """Seconds by batch and tokens.

    Attributes:
        largest: the largest batch size.
    """

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._points: dict[int, list[tuple[int, float]]] = {}
        for cost in sorted(costs, key=lambda cost: cost.tokens):
            self._points.setdefault(cost.batch, []).append((cost.tokens, cost.seconds))
        self.largest = max(self._points, default=1)

    def at(self, batch: int, tokens: float) -> float:
        """The cost of a number of tokens, interpolated or extrapolated; more tokens never cost less."""
        points = self._points[batch if batch in self._points else self.largest]
        if tokens <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
        (before, low), (after, high) = points[right - 1], points[right]
        return low + max(0.0, (high - low) / (after - before)) * (tokens - before)


def stored_costs(manifest: Manifest, backend: Backend, slots: int) -> MachineRecord[CostCurve]:
    """The stored curve of a bundle on this machine, by everything that step times depend on."""
    content = msgspec.json.encode(manifest).decode()
    about = (_VERSION, content, backend.device, backend.kernels_build, str(slots), *_versions())
    return MachineRecord("costs", about, CostCurve)


def _versions() -> list[str]:
    """The installed libraries that steps spend their time in, with their versions."""
    versions = []
    for name in ("specexport", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return versions


def measure(
    manifest: Manifest,
    target: Graph,
    loaded_methods: Mapping[str, LoadedMethod],
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> CostCurve:
    """Times steps and proposals, one slot first, then larger batches while there is time.

    For larger batches only steps at most ``_WIDER`` times as wide, all slots together, as a single slot's widest are
    timed. The calls of a batch size take turns, so that a machine whose speed drifts affects them equally; a cost is
    the least of 25 rounds, or of as many as there is time for, at least one after the first, which pays for buffers.

    Args:
        manifest: the bundle's.
        target: the target's graph; nothing else may use it meanwhile, and its slots are emptied.
        loaded_methods: the methods to measure, by name.
        seconds: about how long it may take.
        progress: called with what is being timed, the rounds done and the rounds in all.
    """
    program = HostProgram(manifest, target, {_FIXED: LoadedMethod(Method(), _Fixed())})
    points = manifest.target.graph.points
    tokens = _spaced(sorted({point.tokens for point in points if point.rows == point.tokens}))
    most_text = manifest.max_seq_len - tokens[-1] - 1
    # A chunk for a draft to read; which tokens they are costs nothing.
    length = max(2, min(manifest.prefill_chunk + 1, most_text))
    text, longer_text = (
        [at % min(_PERIOD, manifest.target.vocab_size) for at in range(count)]
        for count in (length, max(length, min(_LONGER * length, most_text)))
    )
    target.shrink_cache(0)
    steps: list[Cost] = []
    proposals: dict[str, list[Cost]] = {name: [] for name in loaded_methods}
    reads = {name: _read(manifest, method, text, target.sizes[-1]) for name, method in loaded_methods.items()}
    noise: list[float] = []
    end, batch_time = time.perf_counter() + seconds, 0.0
    for batch in target.sizes:
        began = time.perf_counter()
        if steps and began + 2 * batch_time > end:  # two rounds, each about as long as the last batch size's
            break
        most = max(_WIDER * tokens[-1] // batch, tokens[min(1, len(tokens) - 1)])
        trials: dict[tuple[str, int], Trial] = {
            ("", width): _step(program, _views(text, batch, TokenTree.chain(width), _FIXED))
            for width in tokens
            if width <= most
        }
        for name, loaded in loaded_methods.items():
            trees = loaded.method.smaller_trees(manifest.target)
            for tree in [tree for tree in trees if len(tree) <= most] or trees[-1:]:
                trials[name, len(tree)] = _propose(loaded.proposer, _views(text, batch, tree, name))
        left = len(target.sizes) - target.sizes.index(batch)
        share = (end - began) * 2 / (left + 1) if batch == 1 else (end - began) / left
        costs = _in_turns(
            trials, share, f"timing steps of {batch}", noise, progress, before=_PLAIN_BEFORE if batch == 1 else 1
        )
        for (name, nodes), least in costs.items():
            (proposals[name] if name else steps).append(Cost(batch=batch, tokens=nodes, seconds=least))
        batch_time = sum(costs.values())
    longer: dict[tuple[str, int], float] = {}
    if len(longer_text) > len(text):
        ends = {
            ("", width): _step(program, _views(longer_text, 1, TokenTree.chain(width), _FIXED))
            for width in sorted({tokens[0], tokens[-1]})
        }
        longer = _in_turns(ends, seconds / 8, f"timing steps after {len(longer_text)} tokens", noise, progress)
    for slot in range(target.sizes[-1]):
        target.copy(slot, slot, 0)
        for loaded in loaded_methods.values():
            loaded.proposer.release(slot)
    target.shrink_cache(0)
    return CostCurve(
        text=len(text),
        steps=tuple(_rising(steps)),
        longer_text=len(longer_text),
        longer=tuple(_rising([Cost(batch=1, tokens=width, seconds=least) for (_, width), least in longer.items()])),
        methods=tuple(
            MethodCosts(method=name, propose=tuple(_rising(costs)), read=reads[name])
            for name, costs in proposals.items()
            if costs
        ),
        noise=statistics.median(noise),
    )


def _spaced(widths: Sequence[int]) -> list[int]:
    """A selection of ascending widths that includes the first and the last."""
    spaced = [widths[0]]
    for width in widths[1:]:
        if width >= _SPACING * spaced[-1] or width == widths[-1]:
            spaced.append(width)
    return spaced


class _Fixed(Proposer):
    """Proposes the token 0 throughout: the cost of a step does not depend on its tokens."""

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        proposals = {}
        for view in views:
            tokens = np.zeros(len(view.tree) - 1, np.int64)
            proposals[view.slot] = Proposal(tokens, view.tree, None, tokens[:, None])
        return proposals


def _views(text: Sequence[int], slots: int, tree: TokenTree, method: str) -> list[SlotView]:
    noise = np.random.default_rng(0)
    return [SlotView(slot, list(text), _GREEDY, noise, tree, text[:_PERIOD], method) for slot in range(slots)]


def _step(program: HostProgram, views: Sequence[SlotView]) -> Trial:
    """A step that can be repeated: it does not grow the text, so it writes the same cache rows each time."""

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


def _read(manifest: Manifest, loaded: LoadedMethod, text: Sequence[int], slots: int) -> float:
    """Has a method read a text in every slot; returns the seconds of a chunk, 0 if no draft reads."""
    method, proposer = loaded.method, loaded.proposer
    views, outputs = _views(text, slots, TokenTree.chain(2), method.name), {}
    if method.target_outputs:
        point = ShapePoint(1, len(text), manifest.target.graph.points[0].cache, 1)
        outputs = {name: array[0] for name, array in buffers(manifest.target_signature)(point)[1].items()}
    times: list[float] = []
    for view in views:
        if outputs:  # zeros: a proposer's cost does not depend on their values
            proposer.observe(view.slot, outputs, 0)
            proposer.observe_text(view, outputs, 0, range(len(text) - 1))
        unread = True
        while unread:
            start = time.perf_counter()
            unread = proposer.prefill(view)
            times.append(time.perf_counter() - start)
    return min(times) if times and not method.reads_embeddings else 0.0


def _in_turns(
    trials: Mapping[tuple[str, int], Trial],
    seconds: float,
    name: str,
    noise: list[float],
    progress: Progress | None,
    before: int = 1,
) -> dict[tuple[str, int], float]:
    """The least time of each trial; the ratio of its median to that is appended to ``noise``.

    ``before`` plain steps come before one that is timed.

    Calls follow each other as in decoding: steps follow ones of their width, and a proposal if they verify any. After
    other calls a plain step takes up to a sixth longer, which it takes several to get over, as what it reads has left
    the nearest caches; and a small draft would stay there if no step came between its runs.
    """
    steps, proposals = ([key for key in trials if bool(key[0]) is proposes] for proposes in (False, True))
    times: dict[tuple[str, int], list[float]] = {key: [] for key in trials}
    end = time.perf_counter() + seconds
    for turn in range(_ROUNDS + 1):
        for at in range(max(len(steps), len(proposals) + 1)):
            step = steps[at % len(steps)]
            for _ in range(1 if at else before):
                trials[step]()
            proposal = (proposals[(at - 1) % len(proposals)],) if at and proposals else ()
            for key in (*proposal, step):
                duration = trials[key]()
                if turn:
                    times[key].append(duration)
        if progress is not None:
            progress(name, turn + 1, _ROUNDS + 1)
        if turn and time.perf_counter() > end:
            break
    if progress is not None:
        progress(name, 1, 1)
    least = {key: max(min(durations), 1e-9) for key, durations in times.items()}
    noise += [statistics.median(durations) / least[key] for key, durations in times.items()]
    return least


def _rising(costs: Sequence[Cost]) -> list[Cost]:
    """Costs, lowered to that of any wider step or larger batch that took less: noise only adds to measurements."""
    return [
        msgspec.structs.replace(
            cost,
            seconds=min(c.seconds for c in costs if c.batch >= cost.batch and c.tokens >= cost.tokens),
        )
        for cost in sorted(costs, key=lambda cost: (cost.batch, cost.tokens))
    ]
