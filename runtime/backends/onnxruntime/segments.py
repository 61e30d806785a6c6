"""The graphs of a split model: sequences of segments, between which the ranks combine their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specexport.contract.model import LoweredAs, Model
from specexport.contract.tensors import CACHES, CARRIED, COLLECTIVES
from specexport.runtime.backend import Array
from specexport.runtime.backends.onnxruntime.graph import OnnxRuntimeGraph
from specexport.runtime.backends.onnxruntime.session import import_onnxruntime, open_cached, open_session
from specexport.runtime.backends.ranks import Combine, Job, ProcessGroup, combine
from specexport.runtime.bundle import Bundle
from specexport.runtime.machine import available_cores


class Segments:
    """One rank's sessions, run one after the other like a single ``onnxruntime.InferenceSession``.

    ``combine_parts`` combines the ranks' parts between segments.
    """

    def __init__(self, sessions: Sequence[Any], ranks: int, lowering: LoweredAs, combine_parts: Combine) -> None:
        self.sessions = sessions
        self.ranks = ranks
        self.combine = combine_parts
        self.value_of = import_onnxruntime(lowering).OrtValue.ortvalue_from_numpy
        self.inputs = [[value.name for value in session.get_inputs()] for session in sessions]
        self.outputs = [[value.name for value in session.get_outputs()] for session in sessions]

    def get_inputs(self) -> list[Any]:
        return _outer_inputs(self.sessions)

    def get_outputs(self) -> list[Any]:
        return _outer_outputs(self.sessions)

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [part for session in self.sessions for part in session.get_provider_graph_assignment_info()]

    def io_binding(self) -> _Binding:
        return _Binding(self)

    def run_with_iobinding(self, binding: _Binding) -> None:
        binding.run()


class _Binding:
    """The bindings of all segments; tensors between segments get their memory in the first run."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._bindings = [session.io_binding() for session in segments.sessions]
        self._bound: list[list[str]] = [[] for _ in self._bindings]  # outputs, in the order of get_outputs()
        self._collectives: list[list[tuple[str, Array, Array]]] = []

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        """Binds an input of every segment that has it."""
        for names, binding in zip(self._segments.inputs, self._bindings, strict=True):
            if name in names:
                binding.bind_ortvalue_input(name, value)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        """Binds an output of its segment, and the inputs of later segments that read it."""
        at = next(at for at, names in enumerate(self._segments.outputs) if name in names)
        self._bindings[at].bind_ortvalue_output(name, value)
        self._bound[at].append(name)
        self.bind_ortvalue_input(name, value)

    def run(self) -> None:
        for at, (session, binding) in enumerate(zip(self._segments.sessions, self._bindings, strict=True)):
            if at < len(self._collectives):
                session.run_with_iobinding(binding)
                for name, part, whole in self._collectives[at]:
                    self._segments.combine(name, part, whole)
            else:
                self._first_run(at)

    def _first_run(self, at: int) -> None:
        """Runs a segment for the first time: onnxruntime allocates its inner outputs, whose memory later runs reuse."""
        segments, binding = self._segments, self._bindings[at]
        inner = [name for name in segments.outputs[at] if name not in self._bound[at]]
        for name in inner:
            binding.bind_output(name, "cpu")
        segments.sessions[at].run_with_iobinding(binding)
        collectives = []
        for name, value in zip([*self._bound[at], *inner], binding.get_outputs(), strict=True):
            if name.startswith(COLLECTIVES):
                part = value.numpy()
                whole = np.empty(_whole(name, part.shape, segments.ranks), part.dtype)
                segments.combine(name, part, whole)
                collectives.append((name, part, whole))
                self.bind_ortvalue_input(name, segments.value_of(whole))
            elif name in inner:
                self.bind_ortvalue_input(name, value)
        self._collectives.append(collectives)


def _outer_inputs(sessions: Sequence[Any]) -> list[Any]:
    """The inputs of segments that none of them returns."""
    inner = {value.name for session in sessions for value in session.get_outputs()}
    inputs = {value.name: value for session in sessions for value in session.get_inputs()}
    return [value for name, value in inputs.items() if name not in inner]


def _outer_outputs(sessions: Sequence[Any]) -> list[Any]:
    """The outputs of segments that are not for later ones."""
    outputs = (value for session in sessions for value in session.get_outputs())
    return [value for value in outputs if not value.name.startswith((CARRIED, *COLLECTIVES))]


def _whole(name: str, part: Sequence[int], ranks: int) -> tuple[int, ...]:
    return (*part[:-1], part[-1] * (ranks if name.startswith(COLLECTIVES[1]) else 1))


def open_rank(bundle: Bundle, job: Job, group: ProcessGroup) -> OnnxRuntimeGraph:
    """Opens a rank's part of the target; see :func:`open_cached`."""
    model, lowering = bundle.manifest.target, bundle.manifest.lowering
    files = model.ranks[job.rank].segments
    sessions = [open_cached(bundle, model, name, job.options) for name in files]
    segments = Segments(sessions, len(model.ranks), lowering, group)
    buffers = bundle.manifest.target_signature.buffers
    return OnnxRuntimeGraph(bundle.file(files[0]), segments, model.of_rank(job.rank), lowering, job.slots, buffers)


class _Declared(NamedTuple):
    name: str
    shape: list[int | str]
    type: str


class AllRanks:
    """Runs all ranks of a model in this process, segment by segment, for builds and ``verify``.

    Inputs and outputs include the caches of the whole model.
    """

    def __init__(self, ranks: Sequence[Sequence[Any]]) -> None:
        self._ranks = ranks

    def get_inputs(self) -> list[_Declared]:
        return self._declared(_outer_inputs(self._ranks[0]))

    def get_outputs(self) -> list[_Declared]:
        return self._declared(_outer_outputs(self._ranks[0]))

    def _declared(self, values: Iterable[Any]) -> list[_Declared]:
        declared = [_Declared(value.name, list(value.shape), value.type) for value in values]
        for value in declared:
            if value.name.startswith(CACHES):
                value.shape[1] *= len(self._ranks)
        return declared

    def run(self, outputs: Sequence[str] | None, inputs: Mapping[str, Array]) -> list[Array]:
        count = len(self._ranks)
        by_rank: list[dict[str, Array]] = [{} for _ in self._ranks]
        for name, array in inputs.items():
            parts = np.split(array, count, 1) if name.startswith(CACHES) else [array] * count
            for arrays, part in zip(by_rank, parts, strict=True):
                arrays[name] = part
        for segments in zip(*self._ranks, strict=True):
            for session, arrays in zip(segments, by_rank, strict=True):
                names = [value.name for value in session.get_outputs()]
                results = session.run(names, {value.name: arrays[value.name] for value in session.get_inputs()})
                arrays.update(zip(names, results, strict=True))
            for name in [value.name for value in segments[0].get_outputs() if value.name.startswith(COLLECTIVES)]:
                parts = [arrays[name] for arrays in by_rank]
                whole = np.empty(_whole(name, parts[0].shape, count), parts[0].dtype)
                combine(name, parts, whole)
                for arrays in by_rank:
                    arrays[name] = whole
        outputs = [value.name for value in self.get_outputs()] if outputs is None else outputs
        return [
            np.concatenate([arrays[name] for arrays in by_rank], 1) if name.startswith(CACHES) else by_rank[0][name]
            for name in outputs
        ]


def open_whole(file: Callable[[str], Path], model: Model, lowering: LoweredAs) -> Any:
    """Opens a model's graph, split or not, on all cores: with ``run``, ``get_inputs`` and ``get_outputs``."""

    def open_graph(name: str) -> Any:
        return open_session(file(name), available_cores(), lowering, model.precision.weights)

    if not model.ranks:
        return open_graph(model.graph.master)
    return AllRanks([[open_graph(name) for name in rank.segments] for rank in model.ranks])
