"""Every graph that a build wrote is run once: one whose numbers are not finite is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.model import LoweredAs, Model
from specexport.contract.states import cell_rows
from specexport.runtime.backends.onnxruntime.graph import MINIMUM
from specexport.runtime.backends.onnxruntime.segments import open_whole
from specexport.runtime.machine import available_cores, disable_telemetry

_SIZES = {"B": 1, "T": 16, "R": 16, "K": 1, "S": 24, "C": 1}
"""First tokens of a vocabulary are special ones, such as padding, whose embedding is often zero."""
_FLOATS: dict[str, float] = {tensors.TEMPERATURE: 1.0, tensors.TOP_P: 1.0, tensors.UNIFORM: 0.5}
"""Of inputs that are not zeros."""


def require_finite(folder: Path, model: Model, lowering: LoweredAs) -> None:
    """Runs a model's master graph over the first tokens of its vocabulary and an empty cache.

    Without an onnxruntime that can run such graphs, nothing is checked.

    Raises:
        BuildError: an output holds numbers that are not finite; it names the graph and the output.
        BackendError: onnxruntime refuses the graph.
    """
    disable_telemetry()
    try:
        import onnxruntime
    except ImportError:
        return
    if tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < MINIMUM[lowering]:
        return
    session = open_whole(folder.joinpath, model, lowering, available_cores())
    given = {
        value.name: _given(value.name, value.shape, value.type, model.vocab_size) for value in session.get_inputs()
    }
    if tensors.CELL_ROWS in given:
        kept = next(array.shape[1] for name, array in given.items() if name.startswith("past_updates."))
        given[tensors.CELL_ROWS] = cell_rows([0], [0], _SIZES["T"], kept)
    names = [value.name for value in session.get_outputs()]
    for name, made in zip(names, session.run(names, given), strict=True):
        wrong = int((~np.isfinite(made)).sum()) if made.dtype == np.float32 else 0
        if wrong:
            raise BuildError(
                f"{model.source}: model family '{model.family}': {model.graph.master}: {wrong} of {made.size} numbers "
                f"of its output '{name}' are not finite; expected finite numbers. Check the checkpoint's weights with "
                "transformers; if they are sound there, this model family is not supported"
            )


def _given(name: str, shape: Iterable[int | str], kind: str, vocab: int) -> npt.NDArray[Any]:
    sizes = [size if isinstance(size, int) else _SIZES[size] for size in shape]
    if kind == "tensor(bool)":
        return np.tril(np.ones(sizes, np.bool_)) if name == tensors.TREE_MASK else np.zeros(sizes, np.bool_)
    if kind == "tensor(float)":
        return np.full(sizes, _FLOATS.get(name, 0.0), np.float32)
    if name in (tensors.INPUT_IDS, tensors.POSITION_IDS, tensors.LOGITS_ROWS):
        most = vocab if name == tensors.INPUT_IDS else sizes[-1]
        ids: npt.NDArray[Any] = np.broadcast_to(np.arange(sizes[-1]) % most, sizes).copy()
        return ids
    return np.full(sizes, int(name == tensors.NUM_DRAFT_TOKENS), np.int64)
