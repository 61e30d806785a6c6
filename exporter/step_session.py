"""Runs a step graph without the runtime's buffers, for the build and ``verify`` to compare with the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.model import LoweredAs, Model
from specexport.contract.signature import caches, embedding_inputs
from specexport.runtime.backends.onnxruntime.segments import open_whole
from specexport.runtime.machine import available_cores
from specexport.runtime.states import KeptStates

Array = npt.NDArray[Any]


class StepSession:
    """A step graph under onnxruntime, with the options the engine runs it with; it keeps the cache of one slot.

    ``file`` says where a file of the bundle is. The cache has S = ``rows`` rows, and ``fill`` in those that nothing was
    written to.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """

    def __init__(self, file: Callable[[str], Path], lowering: LoweredAs, model: Model, rows: int, fill: float) -> None:
        self._session = open_whole(file, model, lowering, available_cores())
        self._names = [output.name for output in self._session.get_outputs()]
        self._embeddings = embedding_inputs(model.embedding_size)
        self._caches = {
            str(cache): np.full(cache.shape({"B": 1, "S": rows}), fill, np.float32) for cache in caches(model.cache)
        }
        self._states = KeptStates(model.states, 1)
        self._last: tuple[int, list[Array]] = (0, [])  # cache rows before the last call, and its new rows

    def logits(self, inputs: Mapping[str, Array]) -> Array:
        """Runs the graph once; its rows are in the cache for the next call.

        Args:
            inputs: the graph's, without caches; embeddings may be left out, and without recurrent layers
                ``known_tokens`` is not read.

        Returns:
            float32 ``[R,V]``.
        """
        tokens = inputs[tensors.INPUT_IDS].shape[1]
        embeddings = {str(tensor): tensor.zeros({"B": 1, "T": tokens}) for tensor in self._embeddings}
        past = int(inputs[tensors.PAST_LENGTH][0])
        states, blocks, parts = self._state_inputs(past, tokens)
        feed = {**embeddings, **inputs, **states, **self._caches}
        if tensors.CELL_ROWS not in states:
            feed.pop(tensors.KNOWN_TOKENS, None)
        outputs = dict(zip(self._names, self._session.run(None, feed), strict=True))
        for name, part in parts.items():
            part[:] = outputs[name]
        if tensors.CELL_ROWS in states:
            self._states.ran(range(1), [past], inputs[tensors.KNOWN_TOKENS].tolist())
        self._last = past, blocks
        for name, cache in self._caches.items():
            if (whole := outputs.get(name.replace("past_", "present_", 1))) is not None:
                self._caches[name] = whole
            else:  # lowered portably: new rows alone
                rows = outputs[name.replace("past_", "new_", 1)]
                cache[:, :, past : past + rows.shape[2]] = rows
        logits: Array = outputs[tensors.LOGITS][0]
        return logits

    def _state_inputs(self, past: int, tokens: int) -> tuple[dict[str, Array], list[Array], dict[str, Array]]:
        """Inputs of layers without attention, and buffers for their new rows.

        How much of the last call became text is known only now.
        """
        before, rows = self._last
        if past == 0:
            self._states.clear(0)
        elif past > before:
            self._states.commit(0, before, range(past - before), rows, 0)
        blocks, parts = self._states.outputs(1, tokens)
        return {**self._states.arrays, **self._states.cells(range(1), [past], tokens)}, blocks, parts
