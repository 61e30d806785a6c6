"""Calls an engine that drafts one token K times, as one run that drafts K tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

import msgspec
import numpy as np

from specexport.contract import tensors
from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint
from specexport.runtime.backend import Array, Buffers
from specexport.runtime.backends.cuda.library import Enqueue
from specexport.runtime.backends.cuda.memory import Device, Tensor

PASTS = "pasts"
"""An input besides a propose graph's, int64 ``[K,B]``: the number of cache rows before each call."""
_STATE_INPUTS = (tensors.OWN_STATE, tensors.READS_OWN)
_ID, _UNIFORM = np.dtype(np.int64).itemsize, np.dtype(np.float32).itemsize


def repeated_points(built_for: Collection[ShapePoint], engine: Collection[ShapePoint]) -> set[ShapePoint]:
    """The points of a draft that its engine, compiled for one token a call, runs by several calls."""
    first = min((point.tokens for point in built_for if point.drafts), default=0)
    counts = {point.drafts for point in built_for if point.drafts and point.tokens == first}
    single = [point for point in engine if point.drafts == 1 and point.tokens == first]
    return {msgspec.structs.replace(point, drafts=drafts) for point in single for drafts in counts} - set(engine)


def call_of(point: ShapePoint, tokens: int) -> ShapePoint:
    """The shape of a call, with T = ``tokens``, in a run at a point."""
    return msgspec.structs.replace(point, tokens=tokens, drafts=1)


def call_arrays(point: ShapePoint, tokens: int, buffers: Buffers) -> dict[str, Array]:
    """The arrays of follow-up calls, with T = ``tokens``, that they do not share with the run: noise and outputs.

    A draft that continues from its own state also has the inputs that go with that state.
    """
    inputs, outputs = buffers(call_of(point, tokens))
    if tensors.OWN_STATE not in inputs:
        return {tensors.UNIFORM: inputs[tensors.UNIFORM], **outputs}
    inputs[tensors.READS_OWN][:] = True
    names = (*_STATE_INPUTS, tensors.INPUT_IDS, tensors.LAYER_STATES, tensors.LAST_ROW, tensors.UNIFORM)
    return {**{name: inputs[name] for name in names}, **outputs}


def write_pasts(inputs: Mapping[str, Array]) -> None:
    """Writes each call's ``past_length``, which follows from the run's, into :data:`PASTS`."""
    pasts, first = inputs[PASTS], inputs[tensors.PAST_LENGTH]
    np.add(first, np.arange(len(pasts))[:, None], out=pasts)
    if tensors.OWN_STATE in inputs:  # follow-up calls come after the first one's rows without padding
        pasts[1:] += inputs[tensors.LAST_ROW]


class RepeatedCalls:
    """The calls of one run.

    A call of a draft model reads the last two tokens of text and draft so far, so between two calls the tokens move up
    by one. A draft that continues from its own state reads that state and the token that it drafted. Tokens, noise,
    states and q are copied on the device, without waiting.

    Args:
        inputs: the run's inputs on the device, with :data:`PASTS`.
        outputs: the run's outputs on the device, with a row for each call.
        call: a call's arrays, see :func:`call_arrays`; its other inputs share the run's memory.
        prepare: prepares a call, given its number of tokens, and its inputs and outputs.
    """

    def __init__(
        self,
        device: Device,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        call: Mapping[str, Tensor],
        prepare: Callable[[int, dict[str, Tensor]], Enqueue],
    ) -> None:
        self._device = device
        self._inputs = inputs
        self._outputs = outputs
        self._call_of = call
        self._noise = call[tensors.UNIFORM]
        results = {name: call[name] for name in outputs}
        first = prepare(inputs[tensors.INPUT_IDS].shape[1], {**inputs, tensors.UNIFORM: self._noise, **results})
        self._continues_state = tensors.OWN_STATE in call
        further = prepare(call[tensors.INPUT_IDS].shape[1], {**inputs, **call}) if self._continues_state else first
        drafts = inputs[PASTS].shape[0]
        self._enqueues = (first, *([further] * (drafts - 1)))

    def calls(self) -> list[Enqueue]:
        """The calls with their copies, to be enqueued in this order."""
        # Not stored: a reference cycle would keep the library's session and weights alive.
        return [functools.partial(self._call, index, call) for index, call in enumerate(self._enqueues)]

    def _call(self, index: int, enqueue: Enqueue) -> None:
        slots, drafts = self._inputs[tensors.UNIFORM].shape
        if index:
            drafted = self._call_of[tensors.DRAFT_TOKENS].address
            if self._continues_state:
                state = self._call_of[tensors.OWN_STATE]
                self._device.stream.copy(state.address, self._call_of[tensors.NEXT_STATE].address, state.nbytes)
                self._device.stream.copy(self._call_of[tensors.INPUT_IDS].address, drafted, slots * _ID)
            else:
                tokens, pair = self._inputs[tensors.INPUT_IDS].address, CATCH_UP_TOKENS * _ID
                self._column(tokens, pair, tokens + _ID, pair, _ID)
                self._column(tokens + _ID, pair, drafted, _ID, _ID)
            pasts = self._inputs[PASTS].address + index * slots * _ID
            self._device.stream.copy(self._inputs[tensors.PAST_LENGTH].address, pasts, slots * _ID)
        noise = self._inputs[tensors.UNIFORM].address + index * _UNIFORM
        self._column(self._noise.address, _UNIFORM, noise, drafts * _UNIFORM, _UNIFORM)
        enqueue()
        for name in tensors.DRAFTED:
            result = self._call_of[name]
            self._device.stream.copy(self._outputs[name].address + index * result.nbytes, result.address, result.nbytes)

    def _column(self, to: int, to_pitch: int, source: int, pitch: int, nbytes: int) -> None:
        """Copies an element of each slot; pitches are the bytes from one slot's element to the next."""
        self._device.stream.copy_rows(to, to_pitch, source, pitch, nbytes, self._noise.shape[0])
