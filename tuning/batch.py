"""Measures what steps cost on this device, at every batch size and width, and keeps it in the bundle."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from specexport.contract.costs import Cost, CostCurve, MethodCosts
from specexport.contract.methods import Method
from specexport.contract.reading import changing, exchange_manifest
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Backend
from specexport.runtime.buffers import buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.graph import Array
from specexport.runtime.opening import DEFAULT_UTILIZATION, open_backend
from specexport.runtime.params import SamplingParams
from specexport.runtime.program import Speculation
from specexport.runtime.proposal import Proposal, Proposer, SlotView
from specexport.runtime.proposers.opening import Opening, open_proposer
from specexport.runtime.step import HostProgram

DEFAULT_SECONDS = 60.0
LARGEST_CACHE = 2048
"""Cache rows beyond which nothing is measured: attention costs the same for each further row."""
_ROUNDS = 25
_LEAST_ROUNDS = 3
_PERIOD = 11
"""Tokens after which the text repeats itself, so that there is something to look up."""
_GREEDY = SamplingParams(temperature=0.0)
_FIXED = "fixed"

Progress = Callable[[str, int, int], None]
Trial = Callable[[], float]
"""Runs something once; the seconds it took."""


def is_measured(folder: Path, threads: int | None = None, backend: str | None = None) -> bool:
    """Whether a bundle holds a curve of this device; arguments and errors are those of :func:`measure_into`."""
    bundle = Bundle.open(folder, check_hashes=False)
    running = open_backend(bundle, backend, threads, DEFAULT_UTILIZATION)
    try:
        return bundle.manifest.curve(running.device) is not None
    finally:
        running.close()


def measure_into(
    folder: Path,
    *,
    threads: int | None = None,
    backend: str | None = None,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
    keep: bool = True,
) -> CostCurve:
    """Measures a bundle on this device and writes the curve into its manifest, in place of an older one of the device.

    ``seconds`` is about how long it may take, beside warming up. Without ``keep`` the manifest stays as it is.

    Raises:
        BundleError: the bundle is incomplete, altered or too new.
        BackendError: its backend is not installed, refuses a graph, or has no device or no room for it.
    """
    bundle = Bundle.open(folder, check_hashes=False)
    running = open_backend(bundle, backend, threads, DEFAULT_UTILIZATION)
    try:
        curve = _measure(bundle, running, seconds, progress)
    finally:
        running.close()
    if not keep:
        return curve
    # Read again: somebody may have measured on another device meanwhile.
    with changing(bundle.folder) as manifest:
        others = tuple(one for one in manifest.costs if one.device != curve.device)
        exchange_manifest(bundle.folder, msgspec.structs.replace(manifest, costs=(*others, curve)))
    return curve


def _measure(bundle: Bundle, backend: Backend, seconds: float, progress: Progress | None) -> CostCurve:
    """Times steps and proposals of a bundle at its smallest cache size and at its largest, at most ``LARGEST_CACHE``.

    All are taken in turns, so that a device whose speed drifts treats them alike; a figure is the least of 25
    turns, or of as many as there is time for, at least three.
    """
    manifest = bundle.manifest
    sizes = tuple(size for size in manifest.batch_sizes if size <= backend.default_slots)
    target = backend.open(manifest.target, sizes[-1], buffers(manifest.target_signature))
    methods = {method.name: method for method in manifest.methods}
    opening = Opening(bundle, backend, sizes[-1])
    proposers = {name: open_proposer(method, opening) for name, method in methods.items()}
    widths_to_run = backend.widths(target)
    program = HostProgram(manifest, target, {_FIXED: Speculation(Method(), _Fixed())}, widths_to_run)
    points = manifest.target.graph.points
    widths = sorted({point.tokens for point in points if point.rows == point.tokens})
    caches = sorted({point.cache for point in points})
    measured = sorted({caches[0], max(size for size in caches if size <= max(caches[0], LARGEST_CACHE))})
    steps: list[Cost] = []
    proposals: dict[str, list[Cost]] = {name: [] for name in methods}
    reads: dict[str, list[float]] = {name: [] for name in methods}
    for cache in measured:
        target.reserve(cache)
        length = max(2, min(cache - widths[-1], manifest.max_seq_len - 1))
        text = [at % min(_PERIOD, manifest.target.vocab_size) for at in range(length)]
        trials: dict[tuple[str, int, int], Trial] = {}
        for batch, width in itertools.product(sizes, widths):
            trials["", batch, width] = _step(program, _views(text, batch, TokenTree.chain(width), _FIXED))
        for name, proposer in proposers.items():
            views = _views(text, sizes[-1], TokenTree.chain(2), name)
            if methods[name].target_outputs:
                _show(proposer, views, buffers(manifest.target_signature)(ShapePoint(1, length, cache, 1))[1])
            reads[name] += _read(proposer, views)
            for batch, tree in itertools.product(sizes, methods[name].smaller_trees(manifest.target)):
                trials[name, batch, len(tree)] = _propose(proposer, _views(text, batch, tree, name))
        found = _in_turns(trials, seconds / len(measured), f"timing steps at {cache} cache rows", progress)
        for (name, batch, tokens), least in found.items():
            kept = proposals[name] if name else steps
            kept.append(Cost(batch=batch, tokens=tokens, cache=cache, seconds=least))
    drafts = {name for name, method in methods.items() if not method.reads_embeddings}
    return CostCurve(
        device=backend.device,
        versions=_versions(),
        steps=tuple(_rising(steps)),
        methods=tuple(
            MethodCosts(
                method=name,
                propose=tuple(_rising(costs)),
                read=min(reads[name]) if name in drafts and reads[name] else 0.0,
            )
            for name, costs in proposals.items()
        ),
    )


def _versions() -> dict[str, str]:
    """Of what is installed of the libraries that steps take their time in."""
    found = {}
    for name in ("specexport", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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


def _show(proposer: Proposer, views: Sequence[SlotView], outputs: Mapping[str, Array]) -> None:
    """Lets a proposer go on in every slot from what the target makes; its cost does not depend on what that is."""
    seen = {name: array[0] for name, array in outputs.items()}
    for view in views:
        proposer.observe(view.slot, seen, 0)
        proposer.observe_text(view, seen, 0, range(len(view.tokens) - 1))


def _read(proposer: Proposer, views: Sequence[SlotView]) -> list[float]:
    """Has a proposer read a text in every slot; seconds of each chunk."""
    times: list[float] = []
    for view in views:
        more = True
        while more:
            start = time.perf_counter()
            more = proposer.prefill(view)
            times.append(time.perf_counter() - start)
    return times


def _in_turns(
    trials: dict[tuple[str, int, int], Trial], seconds: float, name: str, progress: Progress | None
) -> dict[tuple[str, int, int], float]:
    """The least time of each trial."""
    times: dict[tuple[str, int, int], list[float]] = {key: [] for key in trials}
    began = 0.0
    for turn in range(_ROUNDS + 1):
        for done, (key, trial) in enumerate(trials.items()):
            taken = trial()
            if turn:  # the first turn pays for buffers
                times[key].append(taken)
            if progress is not None:
                progress(name, turn * len(trials) + done + 1, (_ROUNDS + 1) * len(trials))
        began = began or time.perf_counter()
        if turn >= _LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
    if progress is not None:
        progress(name, 1, 1)
    return {key: max(min(taken), 1e-9) for key, taken in times.items()}


def _rising(costs: Sequence[Cost]) -> list[Cost]:
    """Costs of which those of wider steps are never lower; where they look so, that is noise."""
    found = []
    for _, members in itertools.groupby(
        sorted(costs, key=lambda one: (one.batch, one.cache, one.tokens)), key=lambda one: (one.batch, one.cache)
    ):
        ordered = list(members)
        seconds = itertools.accumulate((one.seconds for one in ordered), max)
        found += [msgspec.structs.replace(one, seconds=most) for one, most in zip(ordered, seconds, strict=True)]
    return found
