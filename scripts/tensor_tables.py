"""The documentation's tables of tensors, from contract/signature.py; ``scripts/docs.py`` writes them."""

from __future__ import annotations

from collections.abc import Iterable

from specexport.contract import signature, tensors
from specexport.contract.tensors import Tensor
from specexport.methods.dflash.spec import block_inputs
from specexport.methods.hidden_states.spec import own_state_inputs
from specexport.methods.mlp_speculator.spec import speculator_inputs

_STEP = signature.step_signature((), "H")
_PROPOSE = signature.propose_signature("M")
_ACCEPT = (signature.accept_signature("lossless", "M"), signature.accept_signature("typical", "M"))
_FILL = signature.fill_signature("M")
_LAYERED = (f"{tensors.LAYER_STATES}.", *tensors.CACHES, *tensors.STATES)


def _without_sampling(declared: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(dict.fromkeys(tensor for tensor in declared if tensor not in tensors.SAMPLING))


TABLES: dict[str, tuple[Tensor, ...]] = {
    "sampling": tensors.SAMPLING,
    "caches": (
        tensors.PAST_KEY,
        tensors.PAST_VALUE,
        tensors.PRESENT_KEY,
        tensors.PRESENT_VALUE,
        tensors.NEW_KEY,
        tensors.NEW_VALUE,
    ),
    "step-inputs": _STEP.inputs,
    "step-outputs": (tensors.LOGITS, tensors.CANDIDATES, tensors.HIDDEN, tensors.LAYER_STATES),
    "states": (
        tensors.KNOWN_TOKENS,
        tensors.CELL_ROWS,
        tensors.PAST_CONV,
        tensors.NEW_CONV,
        tensors.PAST_UPDATES,
        tensors.NEW_UPDATES,
        tensors.PAST_STATE,
        tensors.NEW_STATE,
    ),
    "propose-inputs": _without_sampling(_PROPOSE.inputs),
    "propose-outputs": _PROPOSE.outputs,
    "own-state": (*own_state_inputs("n*H", "H"), tensors.NEXT_STATE),
    "block": (*block_inputs("n*H")[:2], tensors.BLOCK_ROWS),
    "speculator": speculator_inputs("stages", "H"),
    "accept-inputs": _without_sampling(tensor for accept in _ACCEPT for tensor in accept.inputs),
    "accept-outputs": _ACCEPT[0].outputs,
    "fill": (tensors.TREE_ROWS, tensors.TREE_RANKS, *_FILL.outputs),
}


def table(name: str) -> str:
    """Name, type, shape and meaning of each tensor; layers have theirs by number."""
    rows = ["| tensor | type | shape | |", "|---|---|---|---|"]
    for tensor in TABLES[name]:
        shown = f"{tensor}.{{i}}" if f"{tensor}." in _LAYERED and tensor.dims[-1] != "n*H" else str(tensor)
        rows.append(f"| `{shown}` | {tensor.dtype} | `[{', '.join(map(str, tensor.dims))}]` | {tensor.meaning} |")
    return "\n".join(rows)
