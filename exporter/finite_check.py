"""Runs every graph of a build once, and refuses one whose numbers are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.model import LoweredAs, Model
from specexport.contract.signature import GraphSignature, cache_inputs
from specexport.runtime.backends.onnxruntime.graph import MINIMUM
from specexport.runtime.backends.onnxruntime.segments import open_whole
from specexport.runtime.machine import available_cores, disable_telemetry
from specexport.runtime.states import cell_rows

_TOKENS = 16
"""The first tokens of a vocabulary are special ones, such as padding, whose embeddings are often zero."""
_SIZES = {"B": 1, "T": _TOKENS, "R": _TOKENS, "K": 1, "S": 24, "C": 1}


def require_finite(folder: Path, model: Model, signature: GraphSignature, lowering: LoweredAs) -> None:
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
    inputs = {str(tensor): tensor.array(_SIZES) for tensor in (*signature.inputs, *cache_inputs(model))}
    for name, limit in ((tensors.INPUT_IDS, model.vocab_size), (tensors.POSITION_IDS, _TOKENS)):
        if name in inputs:
            inputs[name][:] = np.arange(inputs[name].shape[1]) % limit
    if tensors.TOP_K in inputs:
        inputs[tensors.TOP_K][:] = 0
    for layer in model.states:
        if layer.recurrence is not None:
            inputs[tensors.CELL_ROWS] = cell_rows([0], [0], _TOKENS, layer.recurrence.rows)
    names = [output.name for output in session.get_outputs()]
    for name, output in zip(names, session.run(names, inputs), strict=True):
        wrong = int((~np.isfinite(output)).sum()) if output.dtype == np.float32 else 0
        if wrong:
            raise BuildError(
                f"{model.source}: model family '{model.family}': {model.graph.master}: {wrong} of {output.size} "
                f"numbers of its output '{name}' are not finite; expected finite numbers. Check the checkpoint's "
                "weights with transformers; if they are sound there, this model family is not supported"
            )
