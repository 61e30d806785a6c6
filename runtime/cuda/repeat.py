"""A draft's engine drafts one token a call: K calls, one after another on the stream, are one run that drafts K."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

import msgspec
import numpy as np

from specexport.contract import tensors
from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint
from specexport.runtime.cuda.executor import Enqueue
from specexport.runtime.cuda.memory import Device, Tensor
from specexport.runtime.graph import Array, Buffers

PASTS = "pasts"
"""int64 ``[K,B]`` beside a propose graph's inputs: the cache rows before each call."""
_ID, _UNIFORM = np.dtype(np.int64).itemsize, np.dtype(np.float32).itemsize


def repeated_points(built_for: Collection[ShapePoint], engine: Collection[ShapePoint]) -> set[ShapePoint]:
    """Points at which a draft is wanted, and its engine is there for one token a call only."""
    wanted = {point.drafts for point in built_for if point.drafts and point.tokens == CATCH_UP_TOKENS}
    one = [point for point in engine if point.drafts == 1 and point.tokens == CATCH_UP_TOKENS]
    return {msgspec.structs.replace(point, drafts=drafts) for point in one for drafts in wanted} - set(engine)


def call_of(point: ShapePoint) -> ShapePoint:
    """The shape of one of the calls that make up a run."""
    return msgspec.structs.replace(point, drafts=1)


def call_arrays(point: ShapePoint, buffers: Buffers) -> dict[str, Array]:
    """The arrays of a call that are not the run's: its noise and its outputs."""
    inputs, outputs = buffers(call_of(point))
    return {tensors.UNIFORM: inputs[tensors.UNIFORM], **outputs}


def note_pasts(inputs: Mapping[str, Array]) -> None:
    """Works out what each call's ``past_length`` is, from the run's; on the host."""
    np.add(inputs[tensors.PAST_LENGTH], np.arange(len(inputs[PASTS]))[:, None], out=inputs[PASTS])


class Repeated:
    """The calls of one run.

    A call sees the last two tokens of each text and what was drafted so far, so between two calls the tokens move up by
    one. Tokens, noise and q are copied on the device; nothing is waited for.

    ``inputs`` and ``outputs`` are the run's on the device, the inputs with :data:`PASTS` and the outputs with a row for
    each call; ``call`` are a call's noise and outputs, as :func:`call_arrays` gives them. The rest of its inputs is the
    run's memory.

    ``prepare`` makes what runs the engine once over a call's inputs and outputs.

    Attributes:
        calls: each call with its copies, to be given to the stream in this order.
    """

    def __init__(
        self,
        device: Device,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        call: Mapping[str, Tensor],
        prepare: Callable[[dict[str, Tensor]], Enqueue],
    ) -> None:
        self._device = device
        self._inputs = inputs
        self._outputs = outputs
        self._noise = call[tensors.UNIFORM]
        self._made = {name: tensor for name, tensor in call.items() if name != tensors.UNIFORM}
        self._enqueue = prepare({**inputs, **call})
        drafts = inputs[PASTS].shape[0]
        self.calls: list[Enqueue] = [functools.partial(self._call, index) for index in range(drafts)]

    def _call(self, index: int) -> None:
        slots, drafts = self._inputs[tensors.UNIFORM].shape
        if index:
            tokens, pair = self._inputs[tensors.INPUT_IDS].address, CATCH_UP_TOKENS * _ID
            self._column(tokens, pair, tokens + _ID, pair, _ID)
            self._column(tokens + _ID, pair, self._made[tensors.DRAFT_TOKENS].address, _ID, _ID)
            pasts = self._inputs[PASTS].address + index * slots * _ID
            self._device.copy(self._inputs[tensors.PAST_LENGTH].address, pasts, slots * _ID)
        noise = self._inputs[tensors.UNIFORM].address + index * _UNIFORM
        self._column(self._noise.address, _UNIFORM, noise, drafts * _UNIFORM, _UNIFORM)
        self._enqueue()
        for name, made in self._made.items():
            self._device.copy(self._outputs[name].address + index * made.nbytes, made.address, made.nbytes)

    def _column(self, to: int, to_pitch: int, source: int, pitch: int, nbytes: int) -> None:
        """Copies an element of each slot; pitches are bytes from one slot's to the next one's."""
        self._device.copy_rows(to, to_pitch, source, pitch, nbytes, self._noise.shape[0])
