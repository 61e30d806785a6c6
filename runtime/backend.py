"""What the engine asks of an inference backend, and the buffers each kind of graph has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.engines import BACKENDS
from specexport.contract.errors import BackendError, RequestError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import DraftModel, Medusa, MedusaDraft, MlpSpeculator
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.runtime.bundle import Bundle
from specexport.runtime.params import SamplingParams

if TYPE_CHECKING:
    from specexport.runtime.step import Speculation, StepProgram

Array = npt.NDArray[Any]
Buffers = Callable[[ShapePoint], tuple[dict[str, Array], dict[str, Array]]]
"""Makes the input and output arrays of a shape point, caches aside."""


FIRST = range(1)
"""The window of a single request: the first slot alone."""


class Graph(Protocol):
    """A loaded graph with its static buffers and a cache of several slots.

    A run takes a window of neighbouring slots, as many as one of the batch sizes. Inputs are written into the arrays
    :meth:`inputs` returns; results are read from those :meth:`run` returns; their first dimension is the window's. Both
    are the same memory call after call: copy what must outlive the next run.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes a window may have, ascending; the last is the number of slots."""

    def widths(self, slots: int) -> tuple[int, ...]:
        """T of the steps that compute logits of every token, ascending, for a window of so many slots."""

    def drafts(self, slots: int) -> tuple[tuple[int, int], ...]:
        """K and T of the runs of a propose graph, ascending, for a window of so many slots."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache at its present size."""

    def filled(self, slot: int) -> int:
        """How many rows of a slot's cache are what was committed there, from the first on."""

    def reserve(self, rows: int) -> None:
        """Makes every slot's cache hold at least ``rows`` rows, keeping its content."""

    def shrink_cache(self, rows: int) -> None:
        """Makes the cache as small as ``rows`` rows allow, if it is larger; rows beyond its new size are lost."""

    def copy(self, source: int, to: int, rows: int) -> None:
        """Makes the first ``rows`` rows of a slot's cache those of another one."""

    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        """Puts the rows of those tokens of the last run that are kept into the cache, one after the other.

        To be called after every run whose rows are wanted; where they lie already nothing is copied.

        Args:
            slot: one of the run's window.
            past: the run's ``past_length``.
            nodes: which of the tokens fed are kept, ascending; their rows go to ``past``, ``past + 1``, ...
        """

    def inputs(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        """The input arrays of a shape point at the present cache size.

        ``past_length`` is set so that the run leaves every slot's committed rows alone; it is to be set for those that
        take part. (Where a slot is too full for the tokens of a run it has no part in, its last rows are given up.)

        Args:
            tokens: T.
            rows: R, for step graphs.
            drafts: K, for propose graphs.
            slots: the window.
        """

    def run(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        """Runs at that shape point; the outputs by name, without the caches."""


class Backend(Protocol):
    """A library that runs a bundle's graphs on one device, and what all of them share there."""

    @property
    def execution(self) -> str:
        """How work reaches the device; see ``Stats.execution``."""

    @property
    def fallback(self) -> str:
        """Why not in a better way, if there is one; else empty."""

    @property
    def default_slots(self) -> int:
        """How many slots it runs where nobody says how many, one of the bundle's batch sizes."""

    @property
    def device(self) -> str:
        """What it runs on, by library and name, on the CPU with the number of threads: where a measurement holds."""

    def open(self, model: Model, slots: int, buffers: Buffers) -> Graph:
        """Loads a model's graph.

        Args:
            model: the bundle's target or its draft.
            slots: how many its cache has; one of the bundle's batch sizes.
            buffers: see :data:`Buffers`.

        Raises:
            BackendError: the graph is refused, or does not fit.
        """

    def program(self, target: Graph, speculations: Mapping[str, Speculation]) -> StepProgram:
        """What runs the steps of the graphs that were opened.

        Args:
            target: the target's graph.
            speculations: the ways to propose, by the name of their method.

        Raises:
            BackendError: a graph of it is refused, or does not fit.
        """

    def close(self) -> None:
        """Frees everything that was opened; then does nothing."""


DEFAULT_UTILIZATION = 0.9
"""Of a device's memory; the rest is left to what drivers and libraries take without saying."""


def open_backend(bundle: Bundle, name: str | None, threads: int | None, gpu_memory_utilization: float) -> Backend:
    """Opens what a bundle runs on.

    Args:
        bundle: the bundle.
        name: one of :data:`~specexport.contract.engines.BACKENDS`; None for the one it was built for.
        threads: for CPU backends; None for every core this process may use.
        gpu_memory_utilization: for GPU backends, the part of the device's memory that may be used, other programs'
            included.

    Raises:
        BackendError: there is no such backend, or it or its device is missing.
        RequestError: the part of the memory is out of range.
    """
    asked = name or bundle.manifest.backend
    chosen = next((backend for backend in BACKENDS if backend == asked), None)
    if chosen is None:
        raise BackendError(f"there is no backend {name!r}; expected one of {', '.join(BACKENDS)}")
    if not 0 < gpu_memory_utilization <= 1:
        raise RequestError(f"gpu_memory_utilization is {gpu_memory_utilization!r}; expected a number in (0, 1]")
    # Imported here: each backend has dependencies that the others' users need not install.
    if chosen == "onnxruntime":
        from specexport.runtime.ort import OnnxRuntimeBackend

        return OnnxRuntimeBackend(bundle, threads)
    from specexport.runtime.cuda.backend import CudaBackend

    return CudaBackend.load(bundle, chosen, gpu_memory_utilization)


def open_graph(bundle: Bundle, model: Model, slots: int, buffers: Buffers, threads: int | None) -> Graph:
    """Loads a model's graph on the CPU, whatever the bundle was built for.

    Args:
        bundle: the bundle.
        model: its target or its draft.
        slots: how many its cache has; one of the bundle's batch sizes.
        buffers: see :data:`Buffers`.
        threads: None for every core this process may use.

    Raises:
        BackendError: the backend is not installed or refuses the graph.
    """
    return open_backend(bundle, "onnxruntime", threads, 1.0).open(model, slots, buffers)


def step_buffers(manifest: Manifest) -> Buffers:
    """The target's step graph's arrays (see ``contract.tensors``)."""
    vocab, medusa = manifest.target.vocab_size, manifest.method("medusa")
    speculator = manifest.method("mlp_speculator")
    embedding_size = manifest.target.embedding_size

    def make(point: ShapePoint) -> tuple[dict[str, Array], dict[str, Array]]:
        outputs: dict[str, Array] = {tensors.LOGITS: np.zeros((point.batch, point.rows, vocab), np.float32)}
        if isinstance(medusa, Medusa):
            outputs[tensors.CANDIDATES] = _candidates(point, medusa.heads, medusa.candidates)
        if isinstance(speculator, MlpSpeculator):
            outputs[tensors.HIDDEN] = np.zeros((point.batch, point.rows, speculator.hidden), np.float32)
        inputs = _step_inputs(point)
        if embedding_size is not None:
            inputs[tensors.INPUTS_EMBEDS] = np.zeros((point.batch, point.tokens, embedding_size), np.float32)
            inputs[tensors.EMBEDS_MASK] = np.zeros((point.batch, point.tokens), np.bool_)
        return inputs, outputs

    return make


def candidates_buffers(method: MedusaDraft) -> Buffers:
    """The arrays of the step graph of a draft with heads."""

    def make(point: ShapePoint) -> tuple[dict[str, Array], dict[str, Array]]:
        return _step_inputs(point), {tensors.CANDIDATES: _candidates(point, method.heads + 1, method.candidates)}

    return make


def _step_inputs(point: ShapePoint) -> dict[str, Array]:
    batch, tokens, rows = point.batch, point.tokens, point.rows
    return {
        tensors.INPUT_IDS: np.zeros((batch, tokens), np.int64),
        tensors.POSITION_IDS: np.zeros((batch, tokens), np.int64),
        tensors.TREE_MASK: np.broadcast_to(np.tri(tokens, dtype=np.bool_), (batch, tokens, tokens)).copy(),
        tensors.PAST_LENGTH: np.zeros(batch, np.int64),
        tensors.LOGITS_ROWS: np.broadcast_to(np.arange(rows), (batch, rows)).copy(),
    }


def _candidates(point: ShapePoint, depths: int, candidates: int) -> Array:
    return np.zeros((point.batch, depths, point.rows, candidates), np.int64)


def propose_buffers(method: DraftModel) -> Buffers:
    """The propose graph's arrays."""

    def make(point: ShapePoint) -> tuple[dict[str, Array], dict[str, Array]]:
        batch, tokens, drafted = point.batch, point.tokens, point.drafts
        inputs: dict[str, Array] = {
            tensors.INPUT_IDS: np.zeros((batch, tokens), np.int64),
            tensors.PAST_LENGTH: np.zeros(batch, np.int64),
            tensors.LAST_ROW: np.full(batch, tokens - 1, np.int64),
            tensors.NUM_DRAFT_TOKENS: np.array(drafted, np.int64),
            tensors.UNIFORM: np.zeros((batch, drafted), np.float32),
            **_sampling(batch),
        }
        outputs: dict[str, Array] = {
            tensors.DRAFT_TOKENS: np.zeros((drafted, batch), np.int64),
            tensors.DRAFT_IDS: np.zeros((drafted, batch, method.candidates), np.int64),
            tensors.DRAFT_PROBS: np.zeros((drafted, batch, method.candidates), np.float32),
        }
        return inputs, outputs

    return make


def speculator_buffers(method: MlpSpeculator) -> Buffers:
    """The arrays of the propose graph of an MLP speculator; outputs of the stages that a point asks for."""

    def make(point: ShapePoint) -> tuple[dict[str, Array], dict[str, Array]]:
        batch, nodes, support = point.batch, point.tokens, method.candidates
        inputs: dict[str, Array] = {
            tensors.HIDDEN_STATE: np.zeros((batch, method.hidden), np.float32),
            tensors.INPUT_IDS: np.zeros((batch, 1), np.int64),
            tensors.LEVEL_PARENTS: np.zeros((batch, method.stages, nodes), np.int64),
            tensors.LEVEL_RANKS: np.zeros((batch, method.stages, nodes), np.int64),
            tensors.UNIFORM: np.zeros((batch, method.stages, nodes), np.float32),
            **_sampling(batch),
        }
        outputs: dict[str, Array] = {}
        for stage in range(point.drafts):
            rows = nodes if stage else 1
            outputs[tensors.of_stage(tensors.DRAFT_TOKENS, stage)] = np.zeros((batch, rows), np.int64)
            outputs[tensors.of_stage(tensors.DRAFT_IDS, stage)] = np.zeros((batch, rows, support), np.int64)
            outputs[tensors.of_stage(tensors.DRAFT_PROBS, stage)] = np.zeros((batch, rows, support), np.float32)
        return inputs, outputs

    return make


def _sampling(batch: int) -> dict[str, Array]:
    return {
        tensors.TEMPERATURE: np.ones(batch, np.float32),
        tensors.TOP_K: np.ones(batch, np.int64),
        tensors.TOP_P: np.ones(batch, np.float32),
        tensors.MIN_P: np.zeros(batch, np.float32),
    }


def write_sampling(given: Mapping[str, Array], at: int, params: SamplingParams) -> None:
    """Writes how a slot samples into a graph's inputs; greedy decoding is top-k of 1."""
    given[tensors.TEMPERATURE][at] = 1.0 if params.greedy else params.temperature
    given[tensors.TOP_K][at] = 1 if params.greedy else min(max(params.top_k, 0), 2**31)
    given[tensors.TOP_P][at] = params.top_p
    given[tensors.MIN_P][at] = params.min_p
