"""A step graph run by itself, without the runtime's buffers: what the build and ``verify`` compare with the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.model import LoweredAs, Model
from specexport.runtime.machine import available_cores
from specexport.runtime.ort import open_session

Array = npt.NDArray[Any]


class StepSession:
    """A step graph under onnxruntime, with the options the engine runs it with; it keeps the cache of one slot.

    The cache has S = ``rows`` rows, and ``fill`` in those that nothing was written to.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """

    def __init__(self, master: Path, lowering: LoweredAs, model: Model, rows: int, fill: float) -> None:
        self._session = open_session(master, available_cores(), lowering, model.precision.weights)
        self._names = [output.name for output in self._session.get_outputs()]
        self._embedding_size = model.embedding_size
        self._caches = {
            name: np.full((1, layer.heads, rows, size), fill, np.float32)
            for index, layer in enumerate(model.cache)
            for name, size in ((tensors.past_key(index), layer.key_size), (tensors.past_value(index), layer.value_size))
        }

    def logits(self, given: Mapping[str, Array]) -> Array:
        """Runs the graph once; its rows are in the cache for the next call.

        Args:
            given: the graph's inputs, caches aside; embeddings may be left out.

        Returns:
            float32 ``[R,V]``.
        """
        tokens, none = given[tensors.INPUT_IDS].shape[1], {}
        if self._embedding_size is not None:
            none[tensors.INPUTS_EMBEDS] = np.zeros((1, tokens, self._embedding_size), np.float32)
            none[tensors.EMBEDS_MASK] = np.zeros((1, tokens), np.bool_)
        outputs = dict(zip(self._names, self._session.run(None, {**none, **given, **self._caches}), strict=True))
        past = int(given[tensors.PAST_LENGTH][0])
        for name, cache in self._caches.items():
            if (whole := outputs.get(name.replace("past_", "present_", 1))) is not None:
                self._caches[name] = whole
            else:  # lowered portably: new rows alone
                rows = outputs[name.replace("past_", "new_", 1)]
                cache[:, :, past : past + rows.shape[2]] = rows
        logits: Array = outputs[tensors.LOGITS][0]
        return logits
