"""``specexport verify`` on engines: where their GPU is, each must compute what its ONNX graph computes on the CPU.

Both sides are Polygraphy's runners. The ONNX side is the bundle's own graph in float32 without optimisation, so that it
rounds nothing; the engine computes in its own type, and may differ by what that rounds.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import FormattedArray, TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.datatype import DataType
from polygraphy.logger import G_LOGGER

from specexport.contract import tensors
from specexport.contract.engines import ENGINE_RUNTIMES, CompiledEngine, ComputedIn, ProgramGraph
from specexport.contract.manifest import Manifest
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter.engines.library import Library, load_library
from specexport.exporter.quality import relative_rms
from specexport.runtime.bundle import Bundle
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.trt import check_version, choose, load_engine
from specexport.verify.feeds import CACHE_TYPES, FIRST_CHOICES, Array, Call, Feed

LIMITS: dict[ComputedIn, float] = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 0.2}
"""Largest root-mean-square difference of an output, relative to the output. On the CPU, fp16 graphs of two layers are
within 0.01; unrelated outputs differ by 1.4."""
_SHARED = 0.9
"""Least share of the most probable tokens that both sides must name."""

_PROFILE = "profile"
"""int64 ``[]``, an input of the engine's side only: the optimization profile."""
_BEFORE = " before"
"""Behind the name of a cache: its rows that a run must leave as they are."""
_WRITTEN = "rows"
"""int64 ``[2]``, an input of both sides: the first cache row that is written, and the one behind the last."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Subject:
    """A graph of a bundle, and one of its engines that runs here.

    Attributes:
        master: the ONNX graph.
        of: what the bundle says of it.
        engine: the engine.
    """

    master: str
    of: Model | ProgramGraph
    engine: CompiledEngine


@dataclass
class EnginesResult:
    """What :func:`compare_engines` found.

    Attributes:
        engines: how many were compared.
        shapes: at how many shapes in all.
        worst: the largest difference of an output from its graph's, over what is allowed; up to 1 is right.
        wrong: engine, shape and output of each difference that is larger, in words.
    """

    engines: int = 0
    shapes: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)


def runnable(manifest: Manifest) -> tuple[Library, list[Subject]]:
    """The library and the engines that can be compared on this machine, one for each graph that has some.

    Raises:
        SpecExportError: there is no GPU, no library, or no engine for them; says which.
    """
    device = Cuda.load().device
    runtime = next((one for one in ENGINE_RUNTIMES if one == manifest.backend), manifest.engines[0].runtime)
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

    Args:
        bundle: the bundle.
        subjects: what to compare.
        runner: makes what runs an engine; :func:`tensorrt_runner` on a GPU.
        progress: called with how many engines are done, and how many there are.
    """
    result = EnginesResult()
    for done, subject in enumerate(subjects):
        progress(done, len(subjects))
        _compare(bundle, subject, runner(subject.engine), result)
    return result


def tensorrt_runner(library: Library, folder: Path) -> Callable[[CompiledEngine], BaseRunner]:
    """Makes Polygraphy's runners of a bundle's engines."""

    def make(engine: CompiledEngine) -> BaseRunner:
        def load() -> Any:
            logger = library.trt.Logger(library.trt.Logger.ERROR)
            return load_engine(library.trt, logger, library.trt.Runtime(logger), folder, engine)

        return library.polygraphy.TrtRunner(load, optimization_profile=0)

    return make


def _compare(bundle: Bundle, subject: Subject, runner: BaseRunner, result: EnginesResult) -> None:
    engine, path = subject.engine, bundle.file(subject.master)
    graph = onnx.load(path, load_external_data=False).graph
    limit = LIMITS[engine.compute]
    given = [_feed(bundle.manifest, subject, graph, index) for index in range(len(engine.profiles))]
    seen: list[tuple[str, float]] = []

    def compare(reference: Feed, found: Feed) -> OrderedDict[str, bool]:
        index = len(seen)
        found = _on_the_same_tokens(reference, found, given[index])
        compared = {name: _difference(name, reference, found, limit) for name in reference}
        name, worst = max(compared.items(), key=lambda item: item[1])
        seen.append((name, worst))
        if worst > 1:
            result.wrong.append(f"{engine.file} at {engine.profiles[index]}: {name}, {worst:.2g} times what is allowed")
        return OrderedDict((name, over <= 1) for name, over in compared.items())

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        runs = Comparator.run([GraphRunner(path), EngineRunner(runner, engine.compute, graph)], given)
        Comparator.compare_accuracy(runs, comparisons=[(0, 1)], compare_func=compare)
    result.engines += 1
    result.shapes += len(seen)
    result.worst = max(result.worst, *(worst for _, worst in seen))


def _feed(manifest: Manifest, subject: Subject, graph: onnx.GraphProto, index: int) -> Feed:
    point = subject.engine.profiles[index]
    call = Call(
        graph=graph,
        of=subject.of,
        point=point,
        tree=_tree(manifest, point, isinstance(subject.of, Model)),
        vocab=manifest.target.vocab_size,
        compute=subject.engine.compute,
        random=np.random.default_rng(index),
    )
    rows = np.array([call.past, call.past + call.written])
    return {**call.feed(), _PROFILE: np.array(index), _WRITTEN: rows}


def _tree(manifest: Manifest, point: ShapePoint, of_model: bool) -> TokenTree:
    """A tree of the bundle that has the shape, or a chain."""
    trees = (tree for method in manifest.methods for tree in method.token_trees() if len(tree) == point.tokens)
    fitting = (tree for tree in trees if of_model or point.drafts in (0, tree.depth))
    return next(fitting, TokenTree.chain(point.tokens))


# --- differences ------------------------------------------------------------------------------------------------------


def _on_the_same_tokens(reference: Feed, found: Feed, given: Feed) -> Feed:
    """What was found, but for what a speculator's stages say after other tokens than the reference's.

    A level's tokens are those that the stage before it ranked. Where two of them nearly tie, rounding exchanges them;
    what follows cannot be compared, and stands as the reference has it.
    """
    if tensors.LEVEL_PARENTS not in given:
        return found
    parents, ranks = given[tensors.LEVEL_PARENTS], given[tensors.LEVEL_RANKS]
    slots = np.arange(len(parents))[:, None]
    same, found = np.ones((len(parents), 1), np.bool_), dict(found)
    for stage in range(1, parents.shape[1]):
        above = tensors.of_stage(tensors.DRAFT_IDS, stage - 1)
        theirs, ours = (made[above][slots, parents[:, stage], ranks[:, stage]] for made in (reference, found))
        same = same[slots, parents[:, stage]] & (theirs == ours)
        for name in (tensors.of_stage(kind, stage) for kind in tensors.DRAFTED):
            rows = same if found[name].ndim == same.ndim else same[..., None]
            found[name] = np.where(rows, found[name], reference[name])
    return found


def _difference(name: str, reference: Feed, found: Feed, limit: float) -> float:
    """How far an output is from the reference's, over what is allowed."""
    ours, theirs = found[name], reference[name]
    if ours.shape != theirs.shape or not np.isfinite(ours).all():
        return np.inf
    kind = name.partition(".")[0]  # a speculator's outputs have their stage behind it
    ids = name.replace(tensors.DRAFT_TOKENS, tensors.DRAFT_IDS)
    if kind == tensors.DRAFT_TOKENS and ids in reference:
        # Drawn with the least noise: the most probable token, or one that ties with it.
        return 0.0 if (reference[ids][..., :FIRST_CHOICES] == ours[..., None]).any(-1).all() else np.inf
    if kind in (tensors.CANDIDATES, tensors.DRAFT_IDS):
        shared = (ours[..., :, None] == theirs[..., None, :]).any(-1).mean()
        return float((1 - shared) / (1 - _SHARED))
    if ours.dtype.kind != "f" or name.endswith(_BEFORE):
        return 0.0 if (ours == theirs).all() else np.inf
    error, total = (float(np.square(array, dtype=np.float64).sum()) for array in (ours - theirs, theirs))
    return relative_rms(error, total) / limit if total else error


def _visible(outputs: Feed, rows: Array) -> Feed:
    """What is compared: of caches the rows that were written, and apart from them those that had to stay."""
    start, end = (int(row) for row in rows)
    found: Feed = OrderedDict()
    for name, array in outputs.items():
        if name.startswith("present_"):
            found[name], found[name + _BEFORE] = array[:, :, start:end], array[:, :, :start]
        else:
            found[name] = array
    return found


# --- runners ----------------------------------------------------------------------------------------------------------


class GraphRunner(OnnxrtRunner):  # type: ignore[misc]
    """An ONNX graph on the CPU as it is written: quantized weights are undone, activations are not rounded.

    Args:
        path: the graph.
    """

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        super().__init__(lambda: onnxruntime.InferenceSession(str(path), options), name="graph")

    def get_input_metadata_impl(self) -> Any:
        metadata = super().get_input_metadata_impl()
        metadata.add(_WRITTEN, DataType.INT64, (2,))
        return metadata

    def infer_impl(self, feed_dict: Feed) -> Feed:
        began = time.perf_counter()
        names = [output.name for output in self.sess.get_outputs()]
        given = {name: array for name, array in feed_dict.items() if name != _WRITTEN}
        outputs = dict(zip(names, self.sess.run(None, given), strict=True))
        self.inference_time = time.perf_counter() - began
        return _visible(outputs, feed_dict[_WRITTEN])


class EngineRunner(BaseRunner):  # type: ignore[misc]
    """An engine behind the interface of its ONNX graph: caches go in and come out as float32.

    Args:
        inner: runs the engine.
        compute: what its caches hold.
        graph: the ONNX graph, without weights.
    """

    def __init__(self, inner: BaseRunner, compute: ComputedIn, graph: onnx.GraphProto) -> None:
        super().__init__(name="engine")
        self._inner = inner
        self._cache_type = np.dtype(CACHE_TYPES[compute])
        # A draft's engine has its one pass unrolled, and asks for no number of them.
        self._inputs = [value for value in graph.input if value.name != tensors.NUM_DRAFT_TOKENS]
        self._types = {
            value.name: self._cache_type
            if value.name.startswith(tensors.CACHES)
            else onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            for value in (*graph.input, *graph.output)
        }

    def activate_impl(self) -> None:
        self._inner.activate()

    def deactivate_impl(self) -> None:
        self._inner.deactivate()

    def get_input_metadata_impl(self) -> Any:
        metadata = TensorMetadata()
        for value in self._inputs:
            given = DataType.from_dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            metadata.add(value.name, given, tuple(dim.dim_value or None for dim in value.type.tensor_type.shape.dim))
        metadata.add(_PROFILE, DataType.INT64, ())
        metadata.add(_WRITTEN, DataType.INT64, (2,))
        return metadata

    def infer_impl(self, feed_dict: Feed) -> Feed:
        began = time.perf_counter()
        self._inner.set_profile(int(feed_dict[_PROFILE]))
        given = {value.name: self._given(value.name, feed_dict[value.name]) for value in self._inputs}
        raw = self._inner.infer(given, check_inputs=False, return_raw_buffers=True)
        outputs = {name: self._read(name, array) for name, array in raw.items()}
        self.inference_time = time.perf_counter() - began
        return _visible(outputs, feed_dict[_WRITTEN])

    def _given(self, name: str, array: Array) -> Any:
        """An input as bytes of the engine's type: NumPy and Polygraphy have no common bfloat16."""
        made = np.ascontiguousarray(array).astype(self._types[name])
        return FormattedArray(made.view(np.uint8).reshape(-1), shape=array.shape) if made.ndim else made

    def _read(self, name: str, array: Any) -> Array:
        """An output from its bytes; a copy, as runners use their buffers again."""
        found: Array = np.frombuffer(array.array.tobytes(), self._types[name]).reshape(array.shape)
        return found.astype(np.float32) if name.startswith(tensors.CACHES) else found
