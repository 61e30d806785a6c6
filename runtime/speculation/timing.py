"""Measures the costs of steps when a bundle is first opened on a machine, and stores them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
from msgspec.structs import replace

from specexport.contract.manifest import Manifest
from specexport.contract.methods import Method
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.contract.values import Progress
from specexport.runtime.backend import Backend, Graph
from specexport.runtime.machine import MachineRecord
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import Proposal, Proposer, SlotView
from specexport.runtime.speculation.costs import Cost, CostCurve, Costs, MethodCosts
from specexport.runtime.step import StepProgram

SECONDS = 3.0
"""Default limit of a measurement in seconds, unless single steps are slower than that allows."""
MOST_NOISE = 1.5
"""Limit of ``CostCurve.noise``: on a busier machine costs are not stored, and measured again at the next opening."""
_VERSION = "whole steps on devices"
"""Version of the measurement; older results are discarded."""
_ROUNDS = 25
_PLAIN_BEFORE = 5
"""Plain steps of a single request before one that is timed."""
_SPACING = 1.15
"""Least ratio of neighbouring measured widths; costs between them are interpolated."""
_WIDER = 2
"""Widest measured steps of a batch, all slots together, relative to a single slot's widest."""
_LONGER = 8
"""Length of the longer text, from which the cost of a further token is computed, relative to the other text's."""
_PERIOD = 11
"""Tokens after which the text repeats itself, so that look-ups have matches."""
_LEAST = 1e-9
"""Least seconds of a cost."""
_GREEDY = SamplingParams(temperature=0.0)
_FIXED = "fixed"

Key = tuple[str, int]
"""Name of a timed call: a method's name and the nodes of its tree; or no name, and T of a step without proposing."""
Trial = Callable[[], float]
"""Runs a call once and returns the seconds that it took."""


def stored_costs(manifest: Manifest, backend: Backend, slots: int) -> MachineRecord[CostCurve]:
    """The record of a bundle's costs on this machine, named by everything that step times depend on."""
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
    program: StepProgram,
    target: Graph,
    proposers: Mapping[str, Proposer],
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> CostCurve:
    """Times steps and proposals, of one slot first, then of larger batches while there is time.

    A cost is the least of 25 rounds, or of as many as there is time for: at least one after the first, which pays for
    buffers. The calls of a batch size take turns, so that a machine whose speed drifts affects them equally. A larger
    batch takes only steps at most ``_WIDER`` times as wide, all slots together, as a single slot's widest, and the
    widest, as costs beyond it would be guessed.

    A device that drafts in the target's run takes whole steps, of the kinds that decoding takes: the cost of proposing
    is then the difference between a step of the method and one of the same width whose draft tokens the host wrote.

    Args:
        manifest: the bundle's.
        program: the engine's steps.
        target: the target's graph; nothing else may use it meanwhile, and its slots are emptied.
        proposers: those to measure, by method.
        seconds: about how long it may take.
        progress: reports the progress.
    """
    sizes, fixed = target.sizes, program.with_proposers({_FIXED: _Fixed()})
    points = manifest.target.graph.points
    widths = _spaced(sorted({point.tokens for point in points if point.rows == point.tokens}))
    most_text = manifest.max_seq_len - widths[-1] - 1
    text = _text(manifest, max(2, min(manifest.prefill_chunk + 1, most_text)))  # a chunk for a draft to read
    longer_text = _text(manifest, max(len(text), min(_LONGER * len(text), most_text)))

    def trials(batch: int) -> dict[Key, Trial]:
        most = widths[-1]
        if batch > sizes[0]:
            most = max(_WIDER * most // batch, widths[min(1, len(widths) - 1)])
        result = _steps(fixed, text, batch, [width for width in widths if width <= most or width == widths[-1]])
        for name, proposer in proposers.items():
            call = program.step if program.fuses else proposer.propose
            trees = proposer.method.smaller_trees(manifest.target)
            for tree in [tree for tree in trees if len(tree) <= most] or trees[-1:]:
                result[name, len(tree)] = timed(partial(call, _views(text, batch, tree, name)))
        return result

    target.shrink_cache(0)
    reads = {name: _read(manifest, proposer, text, sizes[-1]) for name, proposer in proposers.items()}
    measured: dict[int, dict[Key, float]] = {}
    longer: dict[Key, float] = {}
    noise: list[float] = []
    end, round_time = time.perf_counter() + seconds, 0.0
    for index, batch in enumerate(sizes):
        left, sizes_left = end - time.perf_counter(), len(sizes) - index
        if measured and 2 * round_time > left:  # two rounds, each about as long as one of the last batch size
            break
        share = left * 2 / (sizes_left + 1) if batch == 1 else left / sizes_left
        before = _PLAIN_BEFORE if batch == 1 else 1
        measured[batch], ratios = in_turns(trials(batch), share, f"timing steps of {batch}", progress, before)
        noise += ratios
        round_time = sum(measured[batch].values())
    if len(longer_text) > len(text):
        steps = _steps(fixed, longer_text, sizes[0], sorted({widths[0], widths[-1]}))
        longer, ratios = in_turns(steps, seconds / 8, f"timing steps after {len(longer_text)} tokens", progress)
        noise += ratios
    for slot in range(sizes[-1]):
        target.copy(slot, slot, 0)
        for proposer in proposers.values():
            proposer.release(slot)
    target.shrink_cache(0)
    curve = CostCurve(
        text=len(text),
        steps=_rising(_costs(measured)),
        longer_text=len(longer_text),
        longer=_rising(_costs({sizes[0]: longer})),
        methods=(),
        noise=statistics.median(noise),
    )
    methods = []
    for name, proposer in proposers.items():
        proposals = _costs(measured, name)
        if program.fuses:
            proposals = _proposing(curve, proposer.method, proposals)
        if proposals:
            methods.append(MethodCosts(method=name, propose=_rising(proposals), read=reads[name]))
    return replace(curve, methods=tuple(methods))


def _costs(measured: Mapping[int, Mapping[Key, float]], name: str = "") -> list[Cost]:
    """The costs of a method's calls, or of steps without proposing, from seconds by batch size and call."""
    return [
        Cost(batch=batch, tokens=nodes, seconds=seconds)
        for batch, of_calls in measured.items()
        for (method, nodes), seconds in of_calls.items()
        if method == name
    ]


def _text(manifest: Manifest, length: int) -> list[int]:
    """A text that repeats itself; costs do not depend on its tokens."""
    return [at % min(_PERIOD, manifest.target.vocab_size) for at in range(length)]


def _spaced(widths: Sequence[int]) -> list[int]:
    """A selection of ascending widths that includes the first and the last."""
    spaced = [widths[0]]
    for width in widths[1:]:
        if width >= _SPACING * spaced[-1] or width == widths[-1]:
            spaced.append(width)
    return spaced


class _Fixed(Proposer):
    """Always proposes the token 0: the cost of a step does not depend on its tokens."""

    method = Method()

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        proposals = {}
        for view in views:
            tokens = np.zeros(len(view.tree) - 1, np.int64)
            proposals[view.slot] = Proposal(tokens, view.tree, None, tokens[:, None])
        return proposals


def _views(text: Sequence[int], slots: int, tree: TokenTree, method: str) -> list[SlotView]:
    noise = np.random.default_rng(0)
    return [SlotView(slot, list(text), _GREEDY, noise, tree, text[:_PERIOD], method) for slot in range(slots)]


def _steps(fixed: StepProgram, text: Sequence[int], batch: int, widths: Sequence[int]) -> dict[Key, Trial]:
    """Steps of these widths. They do not grow the text, so they can be repeated and write the same cache rows."""

    def step(views: Sequence[SlotView]) -> float:
        start = time.perf_counter()
        result = fixed.step(views)
        return time.perf_counter() - start - result.propose

    chains = {width: TokenTree.chain(width) for width in widths}
    return {("", width): partial(step, _views(text, batch, tree, _FIXED)) for width, tree in chains.items()}


def timed(call: Callable[[], object]) -> Trial:
    """Times a call."""

    def trial() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return trial


def _read(manifest: Manifest, proposer: Proposer, text: Sequence[int], slots: int) -> float:
    """Has a proposer read a text in every slot; returns the seconds of a chunk, 0 if it reads nothing."""
    method = proposer.method
    views, outputs = _views(text, slots, TokenTree.chain(2), method.name), {}
    if method.target_outputs:
        point = ShapePoint(1, len(text), manifest.target.graph.points[0].cache, 1)
        outputs = {name: array[0] for name, array in manifest.target_signature.buffers(point)[1].items()}
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


def in_turns(
    trials: Mapping[Key, Trial], seconds: float, name: str, progress: Progress | None, before: int = 1
) -> tuple[dict[Key, float], list[float]]:
    """The least time of each trial in about so many ``seconds``, and the ratios of their median times to these.

    Calls follow each other as in decoding: steps follow steps of their width (a plain one ``before`` of them), and a
    proposal if there are any. After other calls a plain step takes up to a sixth longer, and several steps to recover,
    as its weights have left the nearest caches. A small draft would stay there if no step came between its runs.
    """
    steps, proposals = ([key for key in trials if bool(key[0]) is proposes] for proposes in (False, True))
    times: dict[Key, list[float]] = {key: [] for key in trials}
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
    least = {key: max(min(durations), _LEAST) for key, durations in times.items()}
    return least, [statistics.median(durations) / least[key] for key, durations in times.items()]


def _proposing(curve: CostCurve, method: Method, whole_steps: Sequence[Cost]) -> list[Cost]:
    """The costs of proposing: the costs of whole steps less those of verifying."""

    def seconds(cost: Cost) -> float:
        return cost.seconds - verify(cost.batch, method.extra_nodes + cost.tokens, curve.text)

    verify = Costs(curve).step
    return [replace(cost, seconds=max(seconds(cost), _LEAST)) for cost in whole_steps]


def _rising(costs: Sequence[Cost]) -> tuple[Cost, ...]:
    """Costs, each lowered to that of any wider step or larger batch that took less: noise only adds to times."""
    return tuple(
        replace(cost, seconds=min(c.seconds for c in costs if c.batch >= cost.batch and c.tokens >= cost.tokens))
        for cost in sorted(costs, key=lambda cost: (cost.batch, cost.tokens))
    )
