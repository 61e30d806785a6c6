"""A step graph run by itself, without the runtime's buffers: what the build and ``verify`` compare with the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.model import LoweredAs, Model
from specexport.contract.states import KeptStates
from specexport.runtime.backends.onnxruntime.segments import open_whole
from specexport.runtime.machine import available_cores

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
        self._embedding_size = model.embedding_size
        self._caches = {
            name: np.full((1, layer.heads, rows, size), fill, np.float32)
            for index, layer in enumerate(model.cache)
            for name, size in ((tensors.past_key(index), layer.key_size), (tensors.past_value(index), layer.value_size))
        }
        self._states = KeptStates(model.states, 1)
        self._made: tuple[int, list[Array]] = (0, [])  # rows of the last call, and what was there before it

    def logits(self, given: Mapping[str, Array]) -> Array:
        """Runs the graph once; its rows are in the cache for the next call.

        Args:
            given: the graph's inputs, caches aside; embeddings may be left out, and without recurrent layers
                ``known_tokens`` is not read.

        Returns:
            float32 ``[R,V]``.
        """
        tokens, none = given[tensors.INPUT_IDS].shape[1], {}
        if self._embedding_size is not None:
            none[tensors.INPUTS_EMBEDS] = np.zeros((1, tokens, self._embedding_size), np.float32)
            none[tensors.EMBEDS_MASK] = np.zeros((1, tokens), np.bool_)
        past = int(given[tensors.PAST_LENGTH][0])
        own, blocks, parts = self._states_given(past, tokens)
        if tensors.CELL_ROWS not in own:
            given = {name: array for name, array in given.items() if name != tensors.KNOWN_TOKENS}
        every = {**none, **given, **own, **self._caches}
        outputs = dict(zip(self._names, self._session.run(None, every), strict=True))
        for name, part in parts.items():
            part[:] = outputs[name]
        if tensors.CELL_ROWS in own:
            self._states.ran(range(1), [past], given[tensors.KNOWN_TOKENS].tolist())
        self._made = past, blocks
        for name, cache in self._caches.items():
            if (whole := outputs.get(name.replace("past_", "present_", 1))) is not None:
                self._caches[name] = whole
            else:  # lowered portably: new rows alone
                rows = outputs[name.replace("past_", "new_", 1)]
                cache[:, :, past : past + rows.shape[2]] = rows
        logits: Array = outputs[tensors.LOGITS][0]
        return logits

    def _states_given(self, past: int, tokens: int) -> tuple[dict[str, Array], list[Array], dict[str, Array]]:
        """What layers without attention are given, and room for the rows they make.

        How much of the last call became text shows only now.
        """
        before, made = self._made
        if past == 0:
            self._states.clear(0)
        elif past > before:
            self._states.commit(0, before, range(past - before), made, 0)
        blocks, parts = self._states.outputs(1, tokens)
        return {**self._states.arrays, **self._states.cells(range(1), [past], tokens)}, blocks, parts
