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


def repeated_calls(
    device: Device,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    call: Mapping[str, Tensor],
    prepare: Callable[[int, dict[str, Tensor]], Enqueue],
) -> list[Enqueue]:
    """The calls of one run with their copies, to be enqueued in this order.

    A call of a draft model reads the last two tokens of text and draft so far, so between two calls the tokens move up
    by one. A draft that continues from its own state reads that state and the token that it drafted. Tokens, noise,
    states and q are copied on the device, without waiting.

    Args:
        device: the device.
        inputs: the run's inputs, with :data:`PASTS`.
        outputs: the run's outputs, with a row for each call.
        call: a call's arrays, see :func:`call_arrays`; its other inputs share the run's memory.
        prepare: prepares a call, given its number of tokens, and its inputs and outputs.
    """
    stream, tokens, all_noise, noise = (
        device.stream,
        inputs[tensors.INPUT_IDS],
        inputs[tensors.UNIFORM],
        call[tensors.UNIFORM],
    )
    slots, drafts = all_noise.shape
    continues_state = tensors.OWN_STATE in call
    results = {name: call[name] for name in outputs}
    first = prepare(tokens.shape[1], {**inputs, tensors.UNIFORM: noise, **results})
    further = prepare(call[tensors.INPUT_IDS].shape[1], {**inputs, **call}) if continues_state else first

    def copy_column(to: int, to_pitch: int, source: int, pitch: int, nbytes: int) -> None:
        """Copies an element of each slot; pitches are the bytes from one slot's element to the next."""
        stream.copy_rows(to, to_pitch, source, pitch, nbytes, slots)

    def run(index: int) -> None:
        if index:
            drafted = call[tensors.DRAFT_TOKENS].address
            if continues_state:
                state = call[tensors.OWN_STATE]
                stream.copy(state.address, call[tensors.NEXT_STATE].address, state.nbytes)
                stream.copy(call[tensors.INPUT_IDS].address, drafted, slots * _ID)
            else:
                pair = CATCH_UP_TOKENS * _ID
                copy_column(tokens.address, pair, tokens.address + _ID, pair, _ID)
                copy_column(tokens.address + _ID, pair, drafted, _ID, _ID)
            stream.copy(inputs[tensors.PAST_LENGTH].address, inputs[PASTS].address + index * slots * _ID, slots * _ID)
        copy_column(noise.address, _UNIFORM, all_noise.address + index * _UNIFORM, drafts * _UNIFORM, _UNIFORM)
        (further if index else first)()
        for name in tensors.DRAFTED:
            result = call[name]
            stream.copy(outputs[name].address + index * result.nbytes, result.address, result.nbytes)

    return [functools.partial(run, index) for index in range(drafts)]
