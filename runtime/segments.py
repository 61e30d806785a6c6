"""The graph of a model that is split among ranks: each has it in segments, and between two of them the ranks meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specexport.contract.model import LoweredAs, Model
from specexport.contract.tensors import CACHES, CARRIED, MEETINGS
from specexport.runtime.graph import Array
from specexport.runtime.ort import import_onnxruntime, open_session

_SUM, _JOIN = MEETINGS
Meet = Callable[[str, Array, Array], None]
"""Writes what the ranks have together: given its name, a rank's own part and room for the whole."""


class Segments:
    """One rank's sessions, run one after the other as if they were one ``onnxruntime.InferenceSession``.

    Args:
        sessions: over the segments.
        ranks: how many there are.
        lowering: of their operators.
        meet: called between them.
    """

    def __init__(self, sessions: Sequence[Any], ranks: int, lowering: LoweredAs, meet: Meet) -> None:
        self.sessions = sessions
        self.ranks = ranks
        self.meet = meet
        self.value_of = import_onnxruntime(lowering).OrtValue.ortvalue_from_numpy
        self.read = [[one.name for one in session.get_inputs()] for session in sessions]
        self.made = [[one.name for one in session.get_outputs()] for session in sessions]
        inside = {name for names in self.made for name in names}
        given = (one for session in sessions for one in session.get_inputs())
        returned = (one for session in sessions for one in session.get_outputs())
        self._inputs = {one.name: one for one in given if one.name not in inside}
        self._outputs = [one for one in returned if not one.name.startswith((CARRIED, *MEETINGS))]

    def get_inputs(self) -> list[Any]:
        """What the whole is given."""
        return list(self._inputs.values())

    def get_outputs(self) -> list[Any]:
        """What the whole makes."""
        return self._outputs

    def get_provider_graph_assignment_info(self) -> list[Any]:
        """What runs the nodes of the whole."""
        return [part for session in self.sessions for part in session.get_provider_graph_assignment_info()]

    def io_binding(self) -> _Binding:
        """Holds what the whole reads and writes."""
        return _Binding(self)

    def run_with_iobinding(self, binding: _Binding) -> None:
        """Runs all of them."""
        binding.run()


class _Binding:
    """What segments read and write; what goes from one to another has its place once they ran."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._each = [session.io_binding() for session in segments.sessions]
        self._bound: list[list[str]] = [[] for _ in self._each]  # outputs, in the order of get_outputs()
        self._meetings: list[list[tuple[str, Array, Array]]] = []

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        """Has every segment that reads it read it there."""
        for names, binding in zip(self._segments.read, self._each, strict=True):
            if name in names:
                binding.bind_ortvalue_input(name, value)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        """Has the segment that makes it write it there, and those after it read it."""
        at = next(at for at, names in enumerate(self._segments.made) if name in names)
        self._each[at].bind_ortvalue_output(name, value)
        self._bound[at].append(name)
        self.bind_ortvalue_input(name, value)

    def run(self) -> None:
        for at, (session, binding) in enumerate(zip(self._segments.sessions, self._each, strict=True)):
            if at < len(self._meetings):
                session.run_with_iobinding(binding)
                for name, part, whole in self._meetings[at]:
                    self._segments.meet(name, part, whole)
            else:
                self._first_run(at)

    def _first_run(self, at: int) -> None:
        """Runs a segment whose outputs onnxruntime finds room for, which stays theirs."""
        segments, binding = self._segments, self._each[at]
        inner = [name for name in segments.made[at] if name not in self._bound[at]]
        for name in inner:
            binding.bind_output(name, "cpu")
        segments.sessions[at].run_with_iobinding(binding)
        meetings = []
        for name, value in zip([*self._bound[at], *inner], binding.get_outputs(), strict=True):
            if name.startswith(MEETINGS):
                part = value.numpy()
                whole = np.empty(_whole(name, part.shape, segments.ranks), part.dtype)
                segments.meet(name, part, whole)
                meetings.append((name, part, whole))
                self.bind_ortvalue_input(name, segments.value_of(whole))
            elif name in inner:
                self.bind_ortvalue_input(name, value)
        self._meetings.append(meetings)


def _whole(name: str, part: Sequence[int], ranks: int) -> tuple[int, ...]:
    return (*part[:-1], part[-1] * (ranks if name.startswith(_JOIN) else 1))


def put_together(name: str, parts: Sequence[Array], whole: Array) -> None:
    """Adds parts up, in the order of their ranks, or joins them along the last axis."""
    if name.startswith(_JOIN):
        np.concatenate(parts, -1, out=whole)
        return
    np.add(parts[0], parts[1], out=whole)
    for part in parts[2:]:
        whole += part


class _Declared(NamedTuple):
    name: str
    shape: list[int | str]
    type: str


class AllRanks:
    """Every rank of a model in this process: each segment of all of them by turns, for builds and ``verify``.

    Given and made are the caches of the whole model.
    """

    def __init__(self, ranks: Sequence[Sequence[Any]]) -> None:
        self._ranks = ranks

    def get_inputs(self) -> list[_Declared]:
        """See ``onnxruntime.InferenceSession``."""
        made = {one.name for session in self._ranks[0] for one in session.get_outputs()}
        return self._declared(one for session in self._ranks[0] for one in session.get_inputs() if one.name not in made)

    def get_outputs(self) -> list[_Declared]:
        """See ``onnxruntime.InferenceSession``."""
        every = (one for session in self._ranks[0] for one in session.get_outputs())
        return self._declared(one for one in every if not one.name.startswith((CARRIED, *MEETINGS)))

    def _declared(self, values: Iterable[Any]) -> list[_Declared]:
        made = {one.name: _Declared(one.name, list(one.shape), one.type) for one in values}
        for one in made.values():
            if one.name.startswith(CACHES):
                one.shape[1] *= len(self._ranks)
        return list(made.values())

    def run(self, wanted: Sequence[str] | None, given: Mapping[str, Array]) -> list[Array]:
        """See ``onnxruntime.InferenceSession``."""
        count = len(self._ranks)
        known: list[dict[str, Array]] = [{} for _ in self._ranks]
        for name, array in given.items():
            parts = np.split(array, count, 1) if name.startswith(CACHES) else [array] * count
            for own, part in zip(known, parts, strict=True):
                own[name] = part
        for segments in zip(*self._ranks, strict=True):
            for session, own in zip(segments, known, strict=True):
                names = [one.name for one in session.get_outputs()]
                made = session.run(names, {one.name: own[one.name] for one in session.get_inputs()})
                own.update(zip(names, made, strict=True))
            for name in [one.name for one in segments[0].get_outputs() if one.name.startswith(MEETINGS)]:
                parts = [own[name] for own in known]
                whole = np.empty(_whole(name, parts[0].shape, count), parts[0].dtype)
                put_together(name, parts, whole)
                for own in known:
                    own[name] = whole
        wanted = [one.name for one in self.get_outputs()] if wanted is None else wanted
        return [
            np.concatenate([own[name] for own in known], 1) if name.startswith(CACHES) else known[0][name]
            for name in wanted
        ]


def open_whole(file: Callable[[str], Path], model: Model, lowering: LoweredAs, threads: int) -> Any:
    """A session over a model's graph, whether it is split or not: its ``run``, and what that is given and returns.

    Args:
        file: where a file of the bundle is.
        model: its entry in the manifest.
        lowering: of its operators.
        threads: of its operators.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """

    def opened(name: str) -> Any:
        return open_session(file(name), threads, lowering, model.precision.weights)

    if not model.ranks:
        return opened(model.graph.master)
    return AllRanks([[opened(name) for name in rank.segments] for rank in model.ranks])
