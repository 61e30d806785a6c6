"""States of layers without attention, kept so that a step can continue from any token that was accepted.

A convolution reads the inputs of the last few tokens; the inputs of committed tokens are kept as rows.

A recurrent state cannot be reversed, so it advances only over tokens that are certainly text. The *updates* of later
tokens are kept as rows too, until the state has seen them. A draft keeps its draft tokens like text, and its state
waits until they can no longer be taken back. A step reads the state, then the kept updates and its tokens' updates, in
*cells* of ``CELL`` tokens that begin at multiples of ``CELL``. A state has seen whole cells only, and sums within a
cell have a fixed order, so a token's row does not depend on how the text was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.model import CELL, StateLayer
from specexport.contract.tensors import Array


def cell_rows(past: Sequence[int], seen: Sequence[int], tokens: int, rows: int) -> npt.NDArray[np.int64]:
    """The places of the updates of a step's cells.

    Args:
        past: number of tokens in each slot's cache.
        seen: number of these tokens that the slot's states have seen, a multiple of ``CELL``.
        tokens: T of the step.
        rows: R, the number of kept updates; the update of position p is at p modulo R.

    Returns:
        int64 ``[C,B,G]``: each update's place among the R kept and then the T new updates; -1 after the last token. C
        is as large as the slot with the most updates needs.
    """
    cells = max(-(-(end + tokens - start) // CELL) for end, start in zip(past, seen, strict=True))
    positions = np.array(seen)[None, :, None] + np.arange(cells * CELL).reshape(cells, 1, CELL)
    after = positions - np.array(past)[None, :, None]
    return np.where(after < 0, positions % rows, np.where(after < tokens, rows + after, -1))


class KeptStates:
    """The states of all slots, in memory that step graphs read directly; none if all layers have attention.

    Attributes:
        arrays: by the names of ``signature.states``, ``[slots, ...]`` each.
        back: number of a text's last tokens that may be taken back.
    """

    def __init__(self, layers: Sequence[StateLayer], slots: int) -> None:
        self.back = max((layer.back for layer in layers), default=0)
        self._seen = [0] * slots
        self._written = [0] * slots  # end of the rows that were kept, including those taken back since
        self._kept = 0  # R
        self._names: dict[tuple[int, int], list[str]] = {}
        self._states: dict[str, Array] = {}
        self._new_states: dict[int, dict[str, Array]] = {}
        for index, layer in enumerate(layers):
            self._names.setdefault((layer.kept_rows, layer.conv_size), []).append(f"conv.{index}")
            if (state := layer.recurrence) is not None:
                self._kept = state.rows
                self._names.setdefault((state.rows, state.update_size), []).append(f"updates.{index}")
                shape = (slots, state.heads, state.key_size, state.value_size)
                self._states[f"past_state.{index}"] = np.zeros(shape, np.float32)
        # Rows of one shape lie in one block, so that a commit is one copy over all their layers.
        self._blocks = [np.zeros((len(n), slots, *shape), np.float32) for shape, n in self._names.items()]
        self.arrays = self._states | self._parts("past", self._blocks)

    def outputs(self, batch: int, tokens: int) -> tuple[list[Array], dict[str, Array]]:
        """Memory for the outputs of a step: the blocks of rows for :meth:`commit`, and all outputs by name.

        States have the same memory for every number of tokens.
        """
        blocks = [np.zeros((len(n), batch, tokens, width), np.float32) for (_, width), n in self._names.items()]
        if batch not in self._new_states:
            self._new_states[batch] = {
                name.replace("past_", "new_", 1): np.zeros((batch, *state.shape[1:]), np.float32)
                for name, state in self._states.items()
            }
        return blocks, self._new_states[batch] | self._parts("new", blocks)

    def _parts(self, kind: str, blocks: Sequence[Array]) -> dict[str, Array]:
        named = zip(self._names.values(), blocks, strict=True)
        return {f"{kind}_{name}": part for names, block in named for name, part in zip(names, block, strict=True)}

    def can_continue(self, slot: int, tokens: int) -> bool:
        """Whether a text may continue after ``tokens`` of a slot's tokens."""
        return not self.arrays or (self._seen[slot] <= tokens and self._written[slot] - tokens <= self.back)

    def cells(self, slots: range, past: Sequence[int], tokens: int) -> dict[str, Array]:
        """A step's inputs in addition to :attr:`arrays`; clears slots whose text begins anew with the step."""
        if not self._kept:
            return {}
        for slot, end in zip(slots, past, strict=True):
            if end < self._seen[slot]:
                self.clear(slot)
        return {tensors.CELL_ROWS: cell_rows(past, [self._seen[slot] for slot in slots], tokens, self._kept)}

    def advance(self, slots: range, past: Sequence[int], known: Sequence[int]) -> None:
        """Advances the states after a step of these slots; ``known`` counts each slot's tokens that are text."""
        new_states = self._new_states.get(len(slots), {})
        for at, (slot, end, text_tokens) in enumerate(zip(slots, past, known, strict=True)):
            seen = (end + text_tokens) // CELL * CELL
            if seen > self._seen[slot]:
                self._seen[slot] = seen
                for name, state in self._states.items():
                    state[slot] = new_states[name.replace("past_", "new_", 1)][at]

    def commit(self, slot: int, past: int, nodes: Sequence[int], blocks: Sequence[Array], at: int) -> None:
        """Keeps the rows of a step's tokens ``nodes``, which became text after a slot's first ``past`` tokens.

        The rows are in the ``blocks`` of :meth:`outputs`, at the slot's index ``at``.
        """
        self._written[slot] = max(self._written[slot] if past else 0, past + len(nodes))
        for block, new in zip(self._blocks, blocks, strict=True):
            rows = block.shape[2]
            last = list(nodes[-rows:])
            first = past + len(nodes) - len(last)
            block[:, slot][:, np.arange(first, first + len(last)) % rows] = new[:, at][:, last]

    def copy(self, source: int, to: int) -> None:
        for array in (*self._states.values(), *(part for block in self._blocks for part in block)):
            array[to] = array[source]
        self._seen[to], self._written[to] = self._seen[source], self._written[source]

    def clear(self, slot: int) -> None:
        """Resets a slot to the states of an empty text."""
        for state in self._states.values():
            state[slot] = 0
        self._seen[slot] = self._written[slot] = 0
