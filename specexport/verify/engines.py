"""``specexport verify`` of engines: on their GPU, each must compute what its ONNX graph computes on the CPU.

The ONNX side is the bundle's own graph in float32 without optimisation; the engine, run by Polygraphy, computes in its
own type, and may differ by its rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from polygraphy.backend.base import BaseRunner
from polygraphy.common import FormattedArray
from polygraphy.logger import G_LOGGER

from specexport.contract import tensors
from specexport.contract.engines import ENGINE_RUNTIMES, CompiledEngine, ComputedIn, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.manifest import Manifest
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter.engines.compiler import CompilerLibrary, load_library
from specexport.exporter.quality import relative_rms
from specexport.runtime.backends.cuda.api import Cuda
from specexport.runtime.backends.cuda.library import choose
from specexport.runtime.backends.cuda.trt import check_version, load_engine
from specexport.runtime.bundle import Bundle, open_linked
from specexport.verify.feeds import CACHE_TYPES, FIRST_CHOICES, Feed, GraphRun

LIMITS: dict[ComputedIn, float] = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 0.2}
"""Largest root-mean-square difference of an output, relative to the output. On the CPU, fp16 graphs of two layers are
within 0.01; unrelated outputs differ by 1.4."""
_SHARED = 0.9
"""Least share of the most probable tokens that both sides must have in common."""
_BEFORE = " before"
"""Suffix of a cache's name for the rows that a run must not change."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Subject:
    """A graph of a bundle, and one of its engines that runs here."""

    master: str
    of: Model | ProgramGraph
    engine: CompiledEngine


@dataclass
class EnginesResult:
    """The result of :func:`compare_engines`.

    Attributes:
        worst: the largest difference of an output from its graph's, relative to the limit; at most 1 is right.
        wrong: engine, shape and output of each larger difference, for the report.
    """

    engines: int = 0
    shapes: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)


def runnable(manifest: Manifest) -> tuple[CompilerLibrary, list[Subject]]:
    """The library and the engines that can be compared on this machine, one for each graph with engines.

    Raises:
        SpecExportError: there is no GPU, no library, or no engine for them; says which.
    """
    if manifest.target.ranks:
        raise BackendError(
            f"the target is split among {len(manifest.target.ranks)} ranks, whose engines run only together"
        )
    device = Cuda.load().device
    runtime = next((name for name in ENGINE_RUNTIMES if name == manifest.backend), manifest.engines[0].runtime)
    graphs: list[tuple[str, Model | ProgramGraph]] = [(m.graph.master, m) for m in manifest.models.values()]
    graphs += [(graph.file, graph) for graph in manifest.program]
    library = load_library(runtime)
    subjects = [
        Subject(master, of, engine)
        for master, of in graphs
        if of.engines
        for engine in choose(of.engines, runtime, device)
    ]
    for subject in subjects:
        check_version(subject.engine, library.version)
    return library, subjects


def compare_engines(
    bundle: Bundle,
    subjects: Sequence[Subject],
    runner: Callable[[CompiledEngine], BaseRunner],
    progress: Progress,
) -> EnginesResult:
    """Compares engines with their ONNX graphs at every shape they were compiled for.

    ``runner`` creates an engine's runner: :func:`tensorrt_runner` on a GPU.
    """
    result = EnginesResult()
    for index, subject in enumerate(subjects):
        progress(index, len(subjects))
        _compare(bundle, subject, runner(subject.engine), result)
    return result


def tensorrt_runner(library: CompilerLibrary, folder: Path) -> Callable[[CompiledEngine], BaseRunner]:
    """Returns a function that creates Polygraphy's runners of a bundle's engines."""

    def make(engine: CompiledEngine) -> BaseRunner:
        def load() -> Any:
            runtime = library.trt.Runtime(library.trt.Logger(library.trt.Logger.ERROR))
            return load_engine(library.trt, runtime, folder, engine)

        return library.polygraphy.TrtRunner(load, optimization_profile=0)

    return make


def _compare(bundle: Bundle, subject: Subject, runner: BaseRunner, result: EnginesResult) -> None:
    engine, path = subject.engine, bundle.file(subject.master)
    graph = onnx.load(path, load_external_data=False).graph
    calls = [_call(bundle.manifest, subject, graph, index) for index in range(len(engine.profiles))]
    feeds = [call.feed() for call in calls]
    # One side after the other: a board's memory may not hold both.
    expected = _run_graph(path, feeds)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), runner:
        for index, (call, feed, reference) in enumerate(zip(calls, feeds, expected, strict=True)):
            outputs = run_engine(runner, engine.compute, graph, index, feed)
            target, actual = (_visible(side, call.past, call.written) for side in (reference, outputs))
            actual = _aligned(target, actual, feed)
            compared = {name: _difference(name, target, actual, LIMITS[engine.compute]) for name in target}
            name, worst = max(compared.items(), key=lambda item: item[1])
            result.shapes += 1
            result.worst = max(result.worst, worst)
            if worst > 1:
                at = f"{engine.file} at {engine.profiles[index]}"
                result.wrong.append(f"{at}: {name}, {worst:.2g} times the limit")
    result.engines += 1


def _call(manifest: Manifest, subject: Subject, graph: onnx.GraphProto, index: int) -> GraphRun:
    point = subject.engine.profiles[index]
    return GraphRun(
        graph=graph,
        of=subject.of,
        point=point,
        tree=_tree(manifest, point, isinstance(subject.of, Model)),
        vocab=manifest.target.vocab_size,
        compute=subject.engine.compute,
        random=np.random.default_rng(index),
    )


def _tree(manifest: Manifest, point: ShapePoint, of_model: bool) -> TokenTree:
    """A tree of the bundle that has the shape, or a chain."""
    trees = (tree for method in manifest.methods for tree in method.token_trees() if len(tree) == point.tokens)
    fitting = (tree for tree in trees if of_model or point.drafts in (0, tree.depth))
    return next(fitting, TokenTree.chain(point.tokens))


# --- running ----------------------------------------------------------------------------------------------------------


def _run_graph(path: Path, feeds: Sequence[Feed]) -> list[Feed]:
    """Runs an unoptimised ONNX graph on the CPU: weights are dequantized, activations are not rounded."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = open_linked(path, options, lambda graph: onnxruntime.InferenceSession(str(graph), options))
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(None, feed), strict=True)) for feed in feeds]


def run_engine(runner: BaseRunner, compute: ComputedIn, graph: onnx.GraphProto, profile: int, feed: Feed) -> Feed:
    """Runs an engine with the inputs of its ONNX graph: caches go in and come out as float32."""
    types = {
        value.name: np.dtype(CACHE_TYPES[compute])
        if value.name.startswith(tensors.CACHES)
        else onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        for value in (*graph.input, *graph.output)
    }
    inputs: dict[str, Any] = {}
    for name, array in feed.items():
        if name != tensors.NUM_DRAFT_TOKENS:  # a draft's engine has its single pass unrolled
            # As bytes of the engine's type: NumPy and Polygraphy have no common bfloat16.
            cast = np.ascontiguousarray(array).astype(types[name])
            inputs[name] = FormattedArray(cast.view(np.uint8).reshape(-1), shape=array.shape) if cast.ndim else cast
    runner.set_profile(profile)
    outputs: Feed = {}
    for name, raw in runner.infer(inputs, check_inputs=False, return_raw_buffers=True).items():
        # A copy, as runners reuse their buffers.
        array = np.frombuffer(raw.array.tobytes(), types[name]).reshape(raw.shape)
        outputs[name] = array.astype(np.float32) if name.startswith(tensors.CACHES) else array
    return outputs


# --- differences ------------------------------------------------------------------------------------------------------


def _visible(outputs: Feed, past: int, written: int) -> Feed:
    """The compared outputs: of caches the written rows, and separately the rows that must not change."""
    compared: Feed = {}
    for name, array in outputs.items():
        if name.startswith("present_"):
            compared[name], compared[name + _BEFORE] = array[:, :, past : past + written], array[:, :, :past]
        else:
            compared[name] = array
    return compared


def _aligned(reference: Feed, outputs: Feed, feed: Feed) -> Feed:
    """A speculator's outputs, with the reference's values where they follow other tokens than the reference.

    A level's tokens come from the ranking of the stage before it. Rounding may exchange two that nearly tie; the
    outputs after them cannot be compared.
    """
    if tensors.LEVEL_PARENTS not in feed:
        return outputs
    parents, ranks = feed[tensors.LEVEL_PARENTS], feed[tensors.LEVEL_RANKS]
    slots = np.arange(len(parents))[:, None]
    equal, outputs = np.ones((len(parents), 1), np.bool_), dict(outputs)
    for stage in range(1, parents.shape[1]):
        above = tensors.DRAFT_IDS.of_stage(stage - 1)
        expected, actual = (side[above][slots, parents[:, stage], ranks[:, stage]] for side in (reference, outputs))
        equal = equal[slots, parents[:, stage]] & (expected == actual)
        for name in (kind.of_stage(stage) for kind in tensors.DRAFTED):
            rows = equal if outputs[name].ndim == equal.ndim else equal[..., None]
            outputs[name] = np.where(rows, outputs[name], reference[name])
    return outputs


def _difference(name: str, reference: Feed, outputs: Feed, limit: float) -> float:
    """The difference of an output from the reference's, relative to the limit."""
    actual, expected = outputs[name], reference[name]
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.inf
    kind = name.partition(".")[0]  # a speculator's outputs have their stage as a suffix
    ids = name.replace(tensors.DRAFT_TOKENS, tensors.DRAFT_IDS)
    if kind == tensors.DRAFT_TOKENS and ids in reference:
        # Drawn with the least noise: the most probable token, or a tie.
        return 0.0 if (reference[ids][..., :FIRST_CHOICES] == actual[..., None]).any(-1).all() else np.inf
    if kind in (tensors.CANDIDATES, tensors.DRAFT_IDS):
        shared = (actual[..., :, None] == expected[..., None, :]).any(-1).mean()
        return float((1 - shared) / (1 - _SHARED))
    if actual.dtype.kind != "f" or name.endswith(_BEFORE):
        return 0.0 if (actual == expected).all() else np.inf
    error, total = (float(np.square(array, dtype=np.float64).sum()) for array in (actual - expected, expected))
    return relative_rms(error, total) / limit if total else error
