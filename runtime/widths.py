"""How many tokens a step runs with: at least those it is asked for, and so many that its rows are exact.

Kernels take different ways for one row and for several, some for the last of an odd number. They round differently, and
where activations become integers that grows into other tokens. So what a token's row says must not depend on how many
others run beside it. Which widths agree is not known from a list of processors: the graph is run, and rows compared.
"""

from __future__ import annotations

import contextlib
from typing import Literal, Protocol

import msgspec
import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.manifest import Manifest
from specexport.runtime.graph import TILE, Array, Graph
from specexport.runtime.machine import Remembered

Exactness = Literal["exact", "fast"]
"""Whether steps take the widths, and accept the tokens, that make greedy text that of plain decoding bit for bit, or
those that take least time, so that texts may part where two tokens are about equally likely."""
EXACTNESS: tuple[Exactness, ...] = ("exact", "fast")

COMPARED = "prompts in tiles"
"""What is compared: what is known of less is not taken."""
_SPARE = (1, 2, 4, 6, 8, *range(12, 161, 4))
"""Widths to take beside those of the bundle: few, as each keeps arrays of its own."""
_TRIED = 8
"""Wider than asked for by this many tokens a step may become."""
_TEXT = 24
"""Tokens that are read before rows are compared, as attention over nothing shows little."""
_EVIDENCE = 2
"""Slots whose rows are compared; the kernels are the same for all."""


class Widths(Protocol):
    """Chooses T of a step."""

    @property
    def exact(self) -> bool:
        """Whether rows are the same at all the widths it chooses."""

    @property
    def parted(self) -> int:
        """For how many kinds of steps no width was found whose rows are exact."""

    @property
    def chunks(self) -> bool:
        """Whether rows that a prefill chunk makes are those that steps make, or that does not matter."""

    def choose(self, slots: range, needed: int) -> int:
        """T for a window of slots whose largest tree has ``needed`` nodes."""


class BuiltWidths:
    """The narrowest width a bundle was built for; see :class:`Widths`.

    Args:
        target: the target's graph.
    """

    exact = False
    parted = 0
    chunks = True

    def __init__(self, target: Graph) -> None:
        self._widths = {size: target.widths(size) for size in target.sizes}

    def choose(self, slots: range, needed: int) -> int:
        return next(width for width in self._widths[len(slots)] if width >= needed)


class Agreement(msgspec.Struct, forbid_unknown_fields=True):
    """What is known of a graph on a machine.

    Attributes:
        steps: whether a row is the same with the tokens before it in the same step and in the cache; where it is not,
            as lowered portably, nothing makes speculation exact to the last bit.
        chunks: whether rows that a prefill chunk makes are those that steps make.
        widths: T to take, by batch size and by the tokens that are needed.
        parted: batch sizes and needed tokens for which no width was found whose rows are exact.
    """

    steps: bool
    chunks: bool
    widths: dict[int, dict[int, int]]
    parted: list[tuple[int, int]]


class ExactWidths:
    """The narrowest width whose rows are, bit for bit, those of wide runs; see :class:`Widths`.

    What it finds out about a bundle is remembered. One slot alone is looked at when a bundle is opened, larger batches
    when they first run, beside the texts that are in the slots then.

    Args:
        target: the target's graph, which must run steps of any width; its slots are empty.
        manifest: the bundle's.
        memory: remembers what was found.
    """

    def __init__(self, target: Graph, manifest: Manifest, memory: Remembered[Agreement]) -> None:
        self._target = target
        self._memory = memory
        self._chunk = manifest.prefill_chunk
        self._longest = manifest.max_seq_len
        self._last_position = manifest.target.max_positions - 1
        self._tokens = np.random.default_rng(0).integers(0, manifest.target.vocab_size, 256)
        self._reference: Array | None = None  # while several widths are compared with the same rows
        known = memory.load()
        self.agreement = known if known is not None else self._begin()

    @property
    def exact(self) -> bool:
        return self.agreement.steps

    @property
    def parted(self) -> int:
        return len(self.agreement.parted)

    @property
    def chunks(self) -> bool:
        return self.agreement.chunks or not self.exact

    def choose(self, slots: range, needed: int) -> int:
        known = self.agreement.widths.get(len(slots), {})
        return known[needed] if needed in known else self._find(slots, needed)

    def _begin(self) -> Agreement:
        """Compares prefill chunks with steps, and the cache with the step, then the widths of one slot."""
        slot, count, half = range(1), min(_TEXT, self._chunk, self._longest // 2), TILE // 2
        made = []
        chunks = {self._chunk, *(self._target.chunk(self._chunk, tokens) for tokens in (TILE, 2 * TILE))}
        for width in (*sorted(chunks), half):
            self._target.copy(0, 0, 0)
            for past in range(0, count, width):
                more = min(width, count - past)
                self._run(slot, width, rows=1 if width in chunks else width, start=past, known=more)
                self._target.commit(0, past, range(more))
            made.append(self._run(slot, TILE, start=count)[0].copy())
        self._target.commit(0, count, range(half))
        later = self._run(slot, TILE, start=count + half)[0]
        self.agreement = Agreement(
            steps=np.array_equal(made[-1][half:], later[:half]),
            chunks=all(np.array_equal(rows, made[-1]) for rows in made),
            widths={},
            parted=[],
        )
        built = self._target.widths(1)
        with contextlib.suppress(BackendError):  # a context too short for it
            self._reference = self._run(slot, _wider(built[-1] + _TRIED))[0].copy()
        for width in built:
            self.choose(slot, width)
        self._reference = None
        self._target.copy(0, 0, 0)
        self._memory.save(self.agreement)
        return self.agreement

    def _find(self, slots: range, needed: int) -> int:
        """Finds the width to take and remembers it, unless the slots hold too little to show it."""
        built = self._target.widths(len(slots))
        tried = [width for width in sorted({*_SPARE, *built}) if needed <= width <= needed + _TRIED]
        narrowest = next((width for width in built if width >= needed), tried[0])
        if not self.exact:
            return narrowest
        if len(slots) > 1:  # the best guess until they show another
            narrowest = self.choose(range(1), needed)
        shown = [slot for slot in slots if self._target.filled(slot) >= min(_TEXT, self._longest // 2) // 2]
        widest = _wider(tried[-1])
        try:
            self._target.reserve(max(map(self._target.filled, slots)) + widest)
        except BackendError:  # a step at the end of the context
            return narrowest
        if not shown:
            return narrowest
        if self._reference is not None:
            alone = {slots.start: self._reference[:needed]}
        else:
            alone = {slot: self._run(range(slot, slot + 1), widest)[0, :needed].copy() for slot in shown[:_EVIDENCE]}

        def agrees(width: int) -> bool:
            beside = self._run(slots, width)
            return all(np.array_equal(beside[slot - slots.start, :needed], rows) for slot, rows in alone.items())

        width: int | None = next(filter(agrees, tried), None)
        if width is None:
            width = narrowest
            self.agreement.parted.append((len(slots), needed))
        self.agreement.widths.setdefault(len(slots), {})[needed] = width
        self._memory.save(self.agreement)
        return width

    def _run(
        self, slots: range, width: int, rows: int | None = None, start: int | None = None, known: int = 0
    ) -> Array:
        """Logits ``[B,R,V]`` of a step of the same tokens in every slot of a window, behind what the slots hold.

        The first ``known`` of the tokens are to stay there.
        """
        rows = width if rows is None else rows
        self._target.reserve(max(map(self._target.filled, slots)) + width)
        given = self._target.inputs(width, rows, slots=slots)
        self._target.protect_rows(width, rows, slots=slots)
        at = 0 if start is None else start
        given[tensors.INPUT_IDS][:] = np.resize(self._tokens[at:], width)
        past = given[tensors.PAST_LENGTH][:, None]
        given[tensors.POSITION_IDS][:] = np.minimum(past + np.arange(width), self._last_position)
        if tensors.TREE_MASK in given and rows == width:
            given[tensors.TREE_MASK][:] = np.tri(width, dtype=np.bool_)
        if tensors.EMBEDS_MASK in given:
            given[tensors.EMBEDS_MASK][:] = False
        if tensors.KNOWN_TOKENS in given:
            given[tensors.KNOWN_TOKENS][:] = known
        made: Array = self._target.run(width, rows, slots=slots)[tensors.LOGITS]
        return made


def _wider(width: int) -> int:
    """The width of a run that rows of another are compared with."""
    return (width // TILE + 1) * TILE
