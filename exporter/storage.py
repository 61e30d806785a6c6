"""How a bundle stores the matrices of a model, and the report of storing them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import numpy.typing as npt

from specexport.contract.model import StoredAs

SMALLEST_BLOCK = 16

Precision = StoredAs
PRECISIONS: tuple[Precision, ...] = get_args(StoredAs)
QUANTIZED: tuple[Precision, ...] = ("int8", "int4", "fp8", "stored")
"""Precisions that round more than half precision does; builds report by how much."""


@dataclass(frozen=True)
class Storage:
    """How matrices are stored.

    Attributes:
        kind: ``fp16`` and ``bf16`` are cast to fp32 in the graph. ``int8`` and ``int4`` are symmetric, in blocks along
            the summed axis, and undone by DequantizeLinear; so is ``fp8`` (float8_e4m3fn), with one scale a column.
            ``stored`` takes for each matrix what holds it as the checkpoint does, or else ``int8``.
        block_size: weights that share a scale; halved for a matrix it does not divide. None, for int8 only, gives each
            column one scale, as opset 20 knows no blocks; rows that are looked up are then stored in fp16.
        rest: how matrices are that a quantized checkpoint has not quantized; None for ``kind``.
        any_scales: whether scales may be of any kind that a checkpoint has (with zero points or offsets, in fp16, in
            two levels, of blocks of fp8), and an embedding that is also the head is stored once: for CPUs only, as
            TensorRT refuses some, and ONNX Runtime was not tried with them on GPUs. int4 then has zero points.
        branches: whether each expert of a mixture has a branch of its own: for CPUs only, as compiled engines and
            captured graphs know no control flow.
    """

    kind: Precision
    block_size: int | None
    rest: Precision | None = None
    any_scales: bool = False
    branches: bool = False


@dataclass
class WeightsReport:
    """The result of writing a model: quantized matrices by name, and those stored in fp32, with the reason.

    Attributes:
        quantized: names in the graph.
        not_quantized: names, and why.
        kept: names in the checkpoint of matrices that kept its own integers and scales.
        converted: those that were quantized there, and rounded again.
        kept_block: weights that share a scale in what was kept, at most.
        any_scales: whether one was kept with zero points, or in fp8 with blocks.
    """

    quantized: list[str] = field(default_factory=list)
    not_quantized: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    kept_block: int | None = None
    any_scales: bool = False
    _error: float = 0.0
    _energy: float = 0.0
    _second_error: float = 0.0
    _second_energy: float = 0.0

    @property
    def rms_error(self) -> float:
        """Root of the summed squared error over the root of the summed squared weights, of all quantized matrices."""
        return float(np.sqrt(self._error / self._energy)) if self._energy else 0.0

    @property
    def converted_error(self) -> float:
        """:attr:`rms_error` of the matrices that were rounded again."""
        return float(np.sqrt(self._second_error / self._second_energy)) if self._second_energy else 0.0

    def add(self, error: float, energy: float) -> None:
        """Adds squares to :attr:`rms_error`."""
        self._error, self._energy = self._error + error, self._energy + energy

    def add_error(
        self, original: npt.NDArray[np.float32], restored: npt.NDArray[np.float32], *, again: bool = False
    ) -> None:
        """Adds one chunk to :attr:`rms_error`, and to :attr:`converted_error` if it was rounded ``again``."""
        error = float(np.square(original - restored, dtype=np.float64).sum())
        energy = float(np.square(original, dtype=np.float64).sum())
        self.add(error, energy)
        if again:
            self._second_error, self._second_energy = self._second_error + error, self._second_energy + energy


def block_for(length: int, preferred: int | None) -> int | None:
    """The preferred block size, or the largest half of it that divides ``length``; None below the smallest block."""
    block = preferred or 0
    while block >= SMALLEST_BLOCK:
        if length % block == 0:
            return block
        block //= 2
    return None
