"""``specexport verify`` of engines: compares each engine on its GPU with its ONNX graph on the CPU.

The bundle's graph runs in float32 without optimizations; Polygraphy runs the engine, which computes in its own type and
may differ by its rounding. Inputs are synthetic but valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from polygraphy.backend.base import BaseRunner
from polygraphy.common import FormattedArray
from polygraphy.logger import G_LOGGER

from specexport.contract import tensors
from specexport.contract.engines import ENGINE_RUNTIMES, Accept, Commit, CompiledEngine, ComputedIn, Fill, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.manifest import GenerationDefaults, Manifest
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.tensors import Array
from specexport.contract.tree import TokenTree
from specexport.contract.values import Progress
from specexport.exporter.engines.compiler import CompilerLibrary, load_library
from specexport.exporter.engines.source import CompileJob
from specexport.exporter.graph_checks import relative_rms
from specexport.runtime.backends.cuda.api import Cuda
from specexport.runtime.backends.cuda.library import choose
from specexport.runtime.backends.cuda.trt import check_version, load_engine
from specexport.runtime.backends.links import open_linked
from specexport.runtime.backends.onnxruntime.session import import_onnxruntime
from specexport.runtime.bundle import Bundle

Feed = dict[str, Array]
_Values = dict[str, npt.ArrayLike]

CACHE_TYPES: dict[ComputedIn, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
_PAST = 40
"""Maximum number of rows in the cache before a run."""
FIRST_CHOICES = 3
"""Number of most probable tokens that each level of a speculator's tree continues."""
_SPREAD = 3.0
"""Standard deviation of random logits; some draft tokens are then accepted and some are not."""
LIMITS: dict[ComputedIn, float] = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 0.2}
"""Maximum root-mean-square difference of an output, relative to the output. On the CPU, fp16 graphs of two layers
differ by less than 0.01; unrelated outputs differ by 1.4."""
_SHARED = 0.9
"""Minimum share of the most probable tokens that both sides must have in common."""
_BEFORE = " before"
"""Suffix of a cache's name for rows that a run must not change."""


@dataclass(frozen=True)
class GraphRun:
    """A run of a graph over the tokens of a tree."""

    graph: onnx.GraphProto
    of: Model | ProgramGraph
    point: ShapePoint
    tree: TokenTree
    vocab: int
    compute: ComputedIn
    random: np.random.Generator

    @property
    def past(self) -> int:
        return max(0, min(_PAST, self.point.cache - self.written))

    @property
    def written(self) -> int:
        return self.point.tokens if isinstance(self.of, Commit) else self.point.fed

    def feed(self) -> Feed:
        """The graph's inputs, with caches in float32; slots get different values."""
        slots = [self._slot() for _ in range(self.point.batch)]
        feed: Feed = {}
        for value in self.graph.input:
            names = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
            parts = [slot[value.name] for slot in slots]
            feed[value.name] = np.concatenate(parts, names.index("B")) if "B" in names else parts[0]
        return feed

    def _slot(self) -> Feed:
        values = _INPUTS[type(self.of)](self)
        sizes = CompileJob((self.point,), self.vocab).sizes[0] | {"B": 1}
        feed: Feed = {}
        for value in self.graph.input:
            kind = value.type.tensor_type
            shape = tuple(dim.dim_value or sizes.get(dim.dim_param, 0) for dim in kind.shape.dim)
            if value.name.startswith(tensors.CACHES):
                rows = self.random.standard_normal(shape, np.float32)
                feed[value.name] = rows.astype(CACHE_TYPES[self.compute]).astype(np.float32)
            elif value.name in values:
                dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
                feed[value.name] = np.broadcast_to(values[value.name], shape).astype(dtype)
            else:
                feed[value.name] = tensors.DECLARED[value.name].shaped(*shape).array(sizes)
        return feed


def _model(call: GraphRun) -> _Values:
    """The inputs of a step graph or a propose graph, with sampling parameters but greedy noise."""
    assert isinstance(call.of, Model)
    tokens = call.point.tokens
    # The initial noise, 0, draws the most probable token, however the others are rounded.
    values: _Values = {**_SAMPLING}
    for value in call.graph.input:
        if value.name in (tensors.HIDDEN_STATE, tensors.LAYER_STATES, tensors.OWN_STATE):
            rows = (tokens,) if value.name == tensors.LAYER_STATES else ()
            width = value.type.tensor_type.shape.dim[-1].dim_value
            values[value.name] = call.random.standard_normal((*rows, width))
    if not call.of.cache:  # an MLP speculator, which continues from hidden states; the levels of its tree are full
        levels = (call.point.drafts, tokens)
        parents = call.random.integers(0, tokens, levels)
        parents[:2] = 0  # the root is alone
        return values | {
            tensors.INPUT_IDS: call.random.integers(0, call.of.vocab_size),
            tensors.LEVEL_PARENTS: parents,
            tensors.LEVEL_RANKS: call.random.integers(0, FIRST_CHOICES, levels),
        }
    (ids,) = (value for value in call.graph.input if value.name == tensors.INPUT_IDS)
    length = ids.type.tensor_type.shape.dim[1].dim_value or tokens  # a block begins with one token
    return values | {
        tensors.INPUT_IDS: call.random.integers(0, min(call.vocab, call.of.vocab_size), length),
        tensors.POSITION_IDS: call.past + call.tree.depths,
        tensors.TREE_MASK: call.tree.mask,
        tensors.PAST_LENGTH: call.past,
        tensors.LOGITS_ROWS: np.arange(tokens)[tokens - call.point.rows :],
        tensors.BLOCK_ROWS: call.point.drafts + 1,
    }


def _accept(call: GraphRun) -> _Values:
    assert isinstance(call.of, Accept)
    parents = np.array(call.tree.parents)
    logits = _SPREAD * call.random.standard_normal((len(parents), call.vocab)).astype(np.float32)
    # Tokens that are probable for the target, so that some are accepted; siblings have different ranks.
    likely = np.argsort(-logits[parents[1:]], axis=-1)
    ids = likely[:, : call.of.candidates]
    tokens = likely[np.arange(len(likely)), np.array(call.tree.ranks[1:], np.int64)]
    if call.of.candidates == 1:
        ids = tokens[:, None]
    probs = call.random.dirichlet(np.ones(ids.shape[1]), len(ids)) if len(ids) else np.zeros(ids.shape)
    return {
        tensors.LOGITS: logits,
        tensors.PARENTS: parents,
        tensors.TREE_MASK: call.tree.mask,
        tensors.DRAFT_TOKENS: tokens,
        tensors.DRAFT_IDS: ids,
        tensors.DRAFT_PROBS: probs,
        tensors.UNIFORM: call.random.random(1 if call.of.rule == "typical" else len(parents)),
        tensors.THRESHOLD: GenerationDefaults().posterior_threshold,
        tensors.ALPHA: GenerationDefaults().posterior_alpha,
        **_SAMPLING,
    }


def _fill(call: GraphRun) -> _Values:
    assert isinstance(call.of, Fill)
    stages, candidates = call.of.stages, call.of.candidates
    values: _Values = {
        tensors.TREE_ROWS: call.tree.depths[1:] - 1,  # the first row of each stage, if there are stages
        tensors.TREE_RANKS: np.array(call.tree.ranks[1:], np.int64),
    }
    for stage in range(max(1, stages)):
        rows = 1 if stages and not stage else call.point.rows if stages else call.point.drafts
        ids = np.stack([call.random.permutation(call.vocab)[:candidates] for _ in range(rows)])
        drawn, probs = ids[:, call.random.integers(candidates)], call.random.dirichlet(np.ones(candidates), rows)
        for kind, array in zip(tensors.DRAFTED, (drawn, ids, probs), strict=True):
            values |= {kind.of_stage(stage): array} if stages else {kind: array[:, None]}
    return values


def _commit(call: GraphRun) -> _Values:
    nodes = np.arange(len(call.tree))
    path = nodes[call.tree.mask[-1]]
    return {tensors.PAST_LENGTH: call.past, tensors.PATH: np.pad(path, (0, len(nodes) - len(path)))}


_SAMPLING: _Values = {tensors.TEMPERATURE: 0.8, tensors.TOP_K: 0, tensors.TOP_P: 0.95}
_INPUTS: dict[type, Callable[[GraphRun], _Values]] = {Model: _model, Accept: _accept, Fill: _fill, Commit: _commit}


@dataclass(frozen=True)
class Subject:
    """A graph of a bundle, and an engine of it that runs here."""

    master: str
    of: Model | ProgramGraph
    engine: CompiledEngine


def runnable(manifest: Manifest) -> tuple[CompilerLibrary, list[Subject]]:
    """The library and the engines that can be compared on this machine, for each graph with engines.

    Raises:
        SpecExportError: there is no GPU, no library, or no engine for them.
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
) -> list[tuple[float, str]]:
    """Compares engines with their ONNX graphs at all shapes that they were compiled for.

    ``runner`` creates the runner of an engine: :func:`tensorrt_runner` on a GPU.

    Returns:
        For each shape, the largest difference of an output from its graph's, relative to the limit, and where it is.
    """
    differences: list[tuple[float, str]] = []
    for index, subject in enumerate(subjects):
        progress("engines", index, len(subjects))
        differences += _compare(bundle, subject, runner(subject.engine))
    return differences


def tensorrt_runner(library: CompilerLibrary, folder: Path, engine: CompiledEngine) -> BaseRunner:
    """Polygraphy's runner of an engine."""

    def load() -> Any:
        runtime = library.trt.Runtime(library.trt.Logger(library.trt.Logger.ERROR))
        return load_engine(library.trt, runtime, folder, engine)

    return library.polygraphy.TrtRunner(load, optimization_profile=0)


def _compare(bundle: Bundle, subject: Subject, runner: BaseRunner) -> Iterator[tuple[float, str]]:
    engine, path = subject.engine, bundle.file(subject.master)
    graph = onnx.load(path, load_external_data=False).graph
    calls = [
        GraphRun(
            graph=graph,
            of=subject.of,
            point=point,
            tree=_tree(bundle.manifest, point, isinstance(subject.of, Model)),
            vocab=bundle.manifest.target.vocab_size,
            compute=engine.compute,
            random=np.random.default_rng(index),
        )
        for index, point in enumerate(engine.profiles)
    ]
    feeds = [call.feed() for call in calls]
    # One side after the other, as a board's memory may not hold both.
    expected = _run_graph(path, feeds)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), runner:
        for index, (call, feed, reference) in enumerate(zip(calls, feeds, expected, strict=True)):
            outputs = run_engine(runner, engine.compute, graph, index, feed)
            target, actual = (_visible(side, call.past, call.written) for side in (reference, outputs))
            actual = _align(target, actual, feed)
            compared = {name: _difference(name, target, actual, LIMITS[engine.compute]) for name in target}
            name, worst = max(compared.items(), key=lambda item: item[1])
            yield worst, f"{engine.file} at {call.point}: {name}, {worst:.2g} times the limit"


def _tree(manifest: Manifest, point: ShapePoint, of_model: bool) -> TokenTree:
    """A tree of the bundle with this shape, or a chain."""
    trees = (tree for method in manifest.methods for tree in method.token_trees() if len(tree) == point.tokens)
    fitting = (tree for tree in trees if of_model or point.drafts in (0, tree.depth))
    return next(fitting, TokenTree.chain(point.tokens))


def _run_graph(path: Path, feeds: Sequence[Feed]) -> list[Feed]:
    """Runs an ONNX graph on the CPU without optimizations: weights are dequantized, activations are not rounded."""
    onnxruntime = import_onnxruntime("portable")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = open_linked(path, lambda graph: onnxruntime.InferenceSession(str(graph), options))
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(None, feed), strict=True)) for feed in feeds]


def run_engine(runner: BaseRunner, compute: ComputedIn, graph: onnx.GraphProto, profile: int, feed: Feed) -> Feed:
    """Runs an engine with the inputs of its ONNX graph; caches are float32 on both sides."""
    types = {
        value.name: np.dtype(CACHE_TYPES[compute])
        if value.name.startswith(tensors.CACHES)
        else onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        for value in (*graph.input, *graph.output)
    }
    inputs: dict[str, Any] = {}
    for name, array in feed.items():
        if name != tensors.NUM_DRAFT_TOKENS:  # the engine of a draft has a single pass
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


def _visible(outputs: Feed, past: int, written: int) -> Feed:
    """The outputs to compare: of caches, the written rows, and, separately, the rows that must not change."""
    compared: Feed = {}
    for name, array in outputs.items():
        if name.startswith("present_"):
            compared[name], compared[name + _BEFORE] = array[:, :, past : past + written], array[:, :, :past]
        else:
            compared[name] = array
    return compared


def _align(reference: Feed, outputs: Feed, feed: Feed) -> Feed:
    """The outputs of a speculator, with the reference's values after tokens that differ from the reference's.

    The tokens of a level follow from the ranking of the previous stage. Rounding may exchange tokens that nearly tie,
    and later outputs then cannot be compared.
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
    """The difference of an output from the reference, relative to the limit."""
    actual, expected = outputs[name], reference[name]
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.inf
    kind = name.partition(".")[0]  # names of a speculator's outputs end with the stage
    ids = name.replace(tensors.DRAFT_TOKENS, tensors.DRAFT_IDS)
    if kind == tensors.DRAFT_TOKENS and ids in reference:
        # With noise of 0, the most probable token is drawn, or a tie.
        return 0.0 if (reference[ids][..., :FIRST_CHOICES] == actual[..., None]).any(-1).all() else np.inf
    if kind in (tensors.CANDIDATES, tensors.DRAFT_IDS):
        shared = (actual[..., :, None] == expected[..., None, :]).any(-1).mean()
        return float((1 - shared) / (1 - _SHARED))
    if actual.dtype.kind != "f" or name.endswith(_BEFORE):
        return 0.0 if (actual == expected).all() else np.inf
    error, total = (float(np.square(array, dtype=np.float64).sum()) for array in (actual - expected, expected))
    return relative_rms(error, total) / limit if total else error
