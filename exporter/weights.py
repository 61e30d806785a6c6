"""Writes a model's weights into one file, a tensor at a time, quantizing on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.contract import tensors
from specexport.exporter.checkpoints.quantized import Factors, QuantizedTensor, Scales
from specexport.exporter.checkpoints.stored import StoredTensor
from specexport.exporter.dequantize import StoredFactors, StoredMatrix, looked_up, restored
from specexport.exporter.options import Precision, Storage
from specexport.exporter.passes.editing import needed_only_for, op, producer, replace_value
from specexport.exporter.passes.names import names_in
from specexport.exporter.quantize import (
    apply_scales,
    column_scales,
    fit_blocks,
    fits_half,
    pack_int4,
    pair_int4,
    quantize_blocks,
    quantize_columns,
)

_EXACT = Storage("fp32", None)

_STORED: dict[str, Precision] = {"F16": "fp16", "BF16": "bf16"}
_WIDTHS: tuple[Precision, ...] = ("int4", "int8", "fp16", "bf16", "fp32")
"""What ``stored`` may become, the fewest bits first."""

_Half = Literal["fp16", "bf16"]
_Quantized = Literal["int8", "int4", "fp8"]
_HALVES: dict[_Half, tuple[ir.DataType, npt.DTypeLike]] = {
    "fp16": (ir.DataType.FLOAT16, np.float16),
    "bf16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16),
}
_DTYPES: dict[_Quantized, ir.DataType] = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "fp8": ir.DataType.FLOAT8E4M3FN,
}
_GATHERED = ("lookup", "experts")
_Matrix = npt.NDArray[np.float32]
_OfBlocks = tuple[_Matrix, npt.NDArray[np.int8] | None, _Matrix | None]
_Chunks = Iterator[npt.NDArray[np.generic]]
_Scalar = TypeVar("_Scalar", bound=np.generic)

INLINE_BYTES = 1024
"""Smaller constants stay in the graph: shapes, axes, scales of one element."""

_ALIGN = 4096
_CHUNK_ELEMENTS = 4 << 20
_SMALLEST_BLOCK = 16
_LARGEST_KEPT_BLOCK = 128


@dataclass(frozen=True)
class _Kept:
    """Scales of the checkpoint that a matrix is stored with.

    Attributes:
        block: weights along the summed axis that share one; None where each column has one.
        scale: ``[...,K/block,N]``, or ``[1,N]`` by columns.
        zero: int8 like ``scale``, or None.
        offset: like ``scale``, or None.
    """

    block: int | None
    scale: Factors
    zero: npt.NDArray[np.int8] | None
    offset: Factors | None

    def for_rows(self) -> _OfBlocks:
        """For a matrix that is stored by rows, ``[N,K]``."""
        scale, zero, offset = self.values()
        return scale.T, None if zero is None else zero.T, None if offset is None else offset.T

    def values(self) -> _OfBlocks:
        """Scales, zero points and offsets in full."""
        scale = self.scale.values()
        offset = None if self.offset is None else self.offset.values()
        return (scale[0] if self.block is None else scale), self.zero, offset


@dataclass(frozen=True, kw_only=True)
class RoundedTensor(QuantizedTensor):
    """A matrix that this build has rounded before it writes it.

    Attributes:
        error: sum of the squares of what that changed.
        energy: of the weights.
    """

    error: float
    energy: float


@dataclass
class WeightsReport:
    """What was written: quantized matrices by name, and those left in fp32, with the reason.

    Attributes:
        quantized: names in the graph.
        left: names, and why.
        kept: names in the checkpoint of matrices that kept its own integers and scales.
        converted: those that were quantized there, and rounded again.
        kept_block: weights that share a scale in what was kept, at most.
        any_scales: whether one was kept with zero points, or in fp8 with blocks.
    """

    quantized: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
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

    def add_error(self, original: _Matrix, restored: _Matrix, *, again: bool = False) -> None:
        """Adds one chunk to :attr:`rms_error`, and to :attr:`converted_error` if it was rounded ``again``."""
        error = float(np.square(original - restored, dtype=np.float64).sum())
        energy = float(np.square(original, dtype=np.float64).sum())
        self.add(error, energy)
        if again:
            self._second_error, self._second_energy = self._second_error + error, self._second_energy + energy


class WeightsFile:
    """An open weights file: ONNX external data, every tensor on a page boundary so that it can be mapped.

    Args:
        path: the file; graphs that refer to it must lie in the same folder.
        progress: called with the number of fp32 bytes read from the checkpoint after each tensor.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._progress = progress or (lambda _: None)
        # By size and content: graphs of one model share what they have in common.
        self._places: dict[tuple[int, bytes], int] = {}
        self._tensors: Mapping[str, StoredTensor] = {}
        self._quantized: set[str] = set()
        self.report = WeightsReport()

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, name: str, dtype: ir.DataType, shape: tuple[int, ...], chunks: _Chunks) -> ir.ExternalTensor:
        """Appends a tensor given as consecutive chunks of its bytes; one that is there already is not stored again."""
        end = self._file.tell()
        self._file.write(b"\0" * (-end % _ALIGN))
        start = self._file.tell()
        digest = hashlib.sha256()
        for chunk in chunks:
            data = np.ascontiguousarray(chunk).data
            digest.update(data)
            self._file.write(data)
        length = self._file.tell() - start
        there = self._places.setdefault((length, digest.digest()), start)
        if there != start:
            self._file.seek(end)
            self._file.truncate()
            start = there
        return ir.ExternalTensor(
            self._path.name, start, length, dtype, shape=ir.Shape(shape), name=name, base_dir=self._path.parent
        )

    def externalize(
        self,
        graph: ir.Graph,
        stored: Storage,
        heads: Storage | None = None,
        checkpoint: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        """Moves the weights of a graph, and of the graphs inside it, into the file.

        Args:
            graph: changed in place.
            stored: how matrices are that are multiplied or looked up; everything else (norms, biases) is in fp32.
            heads: how Medusa heads are; None for ``stored``.
            checkpoint: its tensors by name. Those that it has quantized are stored with their scales where these fit.
        """
        self._tensors = checkpoint or {}
        self._quantized = {name for name, one in self._tensors.items() if isinstance(one, QuantizedTensor)}
        for one in (graph, *graph.subgraphs()):
            routers = _routers(one)
            of_heads = set() if heads is None else needed_only_for(one, tensors.CANDIDATES)
            for value in list(one.initializers.values()):
                storage = heads if heads is not None and value in of_heads else stored
                self._move(one, value, _EXACT if value in routers else storage)

    def _move(self, graph: ir.Graph, value: ir.Value, storage: Storage) -> None:
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= INLINE_BYTES:
            return
        array = tensor.numpy()
        if storage.kind == "stored" or (storage.kind == "int4" and self._rounded(value)):
            storage = replace(storage, kind=self._as_stored(value))
        if storage.rest is not None and not self._quantized_before(value):
            storage = Storage(storage.rest, storage.block_size)
        readers = {_role(node, index) for node, index in value.uses()}
        if storage.kind == "fp32" or array.dtype != np.float32 or "other" in readers:
            value.const_value = self.write(_name(value), tensor.dtype, array.shape, _row_chunks(array))
        elif storage.kind == "fp16" or storage.kind == "bf16":
            restored = self._half(graph, value, array, storage.kind)
            if restored is not None:
                value.replace_all_uses_with(restored)
                del graph.initializers[_name(value)]
        else:
            assert storage.kind != "stored", "what it becomes is chosen above"
            self._quantize(graph, value, array, storage.kind, storage)
        self._progress(array.nbytes)

    def _rounded(self, value: ir.Value) -> list[RoundedTensor]:
        """What this build has rounded of a matrix, if all of it."""
        found = [self._tensors.get(name) for name in names_in(_name(value))]
        rounded = [one for one in found if isinstance(one, RoundedTensor)]
        return rounded if len(rounded) == len(found) else []

    def _as_stored(self, value: ir.Value) -> Precision:
        """What holds a matrix as the checkpoint has it; of several in one, the widest."""
        kinds: list[Precision] = []
        for name in names_in(_name(value)):
            tensor = self._tensors.get(name.partition("[")[0])
            if isinstance(tensor, QuantizedTensor):
                kinds.append(tensor.kind)
            else:
                kinds.append("int8" if tensor is None else _STORED.get(tensor.dtype, "fp32"))
        return max(kinds, key=_WIDTHS.index)

    def _half(self, graph: ir.Graph, value: ir.Value, array: _Matrix, kind: _Half) -> ir.Value | None:
        """Stores a matrix in 16 bits: the fp32 value to read instead of it, or None where it was left as it is."""
        dtype, numpy_dtype = _HALVES[kind]
        largest = max(float(np.abs(chunk).max(initial=0.0)) for chunk in _row_chunks(array))
        if largest > float(ml_dtypes.finfo(numpy_dtype).max):
            self._leave(value, array, f"its largest weight, {largest:.3g}, does not fit {kind}")
            return None
        chunks = (chunk.astype(numpy_dtype).view(np.uint16) for chunk in _row_chunks(array))
        stored = self._initializer(graph, f"{value.name}.{kind}", dtype, array.shape, chunks)
        cast = op("Cast", [stored], f"{value.name}.fp32", to=ir.DataType.FLOAT.value)
        graph.insert_before(graph[0], cast)
        return cast.outputs[0]

    def _leave(self, value: ir.Value, array: _Matrix, why: str) -> None:
        self.report.left[_name(value)] = why
        value.const_value = self.write(_name(value), ir.DataType.FLOAT, array.shape, _row_chunks(array))

    def _quantize(self, graph: ir.Graph, value: ir.Value, array: _Matrix, kind: _Quantized, storage: Storage) -> None:
        """Stores a matrix once for each way it is read: ``[K,N]`` for multiplication, ``[V,H]`` for look-ups.

        A stack of experts, ``[E,K,N]``, is one that is looked up.
        """
        block_size = storage.block_size
        by_column = kind == "fp8" or block_size is None
        readers = [(node, index, _role(node, index)) for node, index in value.uses()]
        half = None
        if by_column and any(role in _GATHERED for _, _, role in readers):
            # Compilers that take 8-bit constants only before a DequantizeLinear could not gather from them.
            half = self._half(graph, value, array, "fp16")
            if half is None:
                return
        for node, index, role in readers:
            if role in _GATHERED and half is not None:
                node.replace_input_with(index, half)
                continue
            # A tied head reads Transpose(embedding). It is stored as the embedding is, which is in int8 whatever the
            # precision, as rows are looked up; elsewhere again, transposed, so that blocks lie along K.
            by_rows = role == "lookup" or (role == "tied" and not by_column and storage.any_scales)
            matrix, axis = (
                (array.T, 0) if role == "tied" and not by_rows else (array, int(by_rows or role == "experts"))
            )
            kept = self._kept(value, role, matrix.shape, storage)
            block = None if by_column else block_for(matrix.shape[axis], block_size)
            if kept is not None:
                block = kept.block
                self.report.kept_block = max(self.report.kept_block or 0, block or 0) or None
            elif block is None and not by_column:
                self._leave(value, array, f"its {matrix.shape[axis]} inputs are not a multiple of {_SMALLEST_BLOCK}")
                return
            # Experts, most of a mixture's weights, are gathered as bytes of two integers.
            width: _Quantized = "int8" if by_rows else kind
            # One name a reader: ONNX Runtime fuses a dequantization only where a single node reads it.
            name = f"{value.name}.{width}.{role}"
            if by_column or name in graph.initializers:
                name = f"{name}.{len(graph.initializers)}"
            again = kept is None and self._quantized_before(value)
            rounded = self._rounded(value) if kept is not None else []
            if again or (kept is not None and not rounded):
                (self.report.converted if again else self.report.kept).extend(names_in(_name(value)))
            gathered = role in _GATHERED
            # int8 stays what every backend reads: its scales are a ninth of it at most.
            any_scales = storage.any_scales and storage.kind != "int8"
            held = self._store(
                graph,
                name,
                matrix,
                axis,
                block,
                width,
                kept,
                again=again,
                gathered=gathered,
                any_scales=any_scales,
                rounded=rounded,
            )
            if gathered:
                replace_value(node.outputs[0], looked_up(graph, node, held, pairs=width == "int4"))
            else:
                for product in [node] if role == "matmul" else list(node.outputs[0].consumers()):
                    restored(graph, held, product)
            self.report.quantized.append(name)
        del graph.initializers[_name(value)]

    def _quantized_before(self, value: ir.Value) -> bool:
        """Whether the checkpoint has a matrix quantized; experts stacked while loading are if one of them is."""
        names = names_in(_name(value))
        stack = f"{names[0].rpartition('.')[0]}."
        quantized = self._quantized
        return all(name.partition("[")[0] in quantized for name in names) or (
            stack.endswith(".experts.") and any(name.startswith(stack) for name in quantized)
        )

    def _scales_of(self, name: str) -> Scales | None:
        """The checkpoint's own scales of a matrix, which may be one of a stack: ``stack[3]``."""
        stack, bracket, rest = name.partition("[")
        tensor = self._tensors.get(stack)
        scales = tensor.scales() if isinstance(tensor, QuantizedTensor) else None
        return scales.of_expert(int(rest.removesuffix("]"))) if scales is not None and bracket else scales

    def _kept(self, value: ir.Value, role: str, shape: tuple[int, ...], storage: Storage) -> _Kept | None:
        """The checkpoint's own scales of a matrix ``[...,K,N]``, if the numbers they give can be stored so."""
        found = [self._scales_of(name) for name in names_in(_name(value))]
        scales = [one for one in found if one is not None]
        by_rows = role == "lookup" or (role == "tied" and storage.any_scales)
        if by_rows:
            shape = shape[::-1]
        if (role not in ("matmul", "experts") and not (by_rows and storage.any_scales)) or len(scales) < len(found):
            return None
        # Pairs of experts' integers hold -7 to 7 only.
        kinds = {"int4": {"int4"}, "int8": {"int4", "int8"}, "fp8": {"fp8"}}["int8" if by_rows else storage.kind]
        if not {one.kind for one in scales} <= kinds or (role, storage.kind) == ("experts", "int4"):
            return None
        by_column = all(one.group == shape[-2] for one in scales)
        if storage.block_size is None or storage.kind == "fp8":
            block = None
            if not by_column:
                if storage.kind != "fp8" or not storage.any_scales or storage.block_size is None:
                    return None
                block = min(one.group & -one.group for one in scales)
        else:
            block = min(_LARGEST_KEPT_BLOCK, *(one.group & -one.group for one in scales))
        zeros = any(one.zero is not None for one in scales)
        if (block is not None and block < _SMALLEST_BLOCK) or (role == "experts" and (zeros or block is None)):
            return None

        zeros, offsets = any(one.zero is not None for one in scales), any(one.offset is not None for one in scales)
        rest = (zeros or offsets, *(one.scale.fine is not None for one in scales))
        if role == "experts" and any(rest):
            return None

        def joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
            each = [shape[-2] if block is None else block] * len(parts)
            wide = [np.repeat(part, one.group // size, -2) for part, one, size in zip(parts, scales, each, strict=True)]
            return np.concatenate(wide, axis=-1)

        def factors(parts: list[Factors]) -> Factors:
            alike = {(one.group == block, part.fine is None) for one, part in zip(scales, parts, strict=True)}
            if not storage.any_scales or len(alike) > 1 or not alike.pop()[0]:
                return Factors(joined([part.values() for part in parts]))
            fine = [part.fine for part in parts if part.fine is not None]
            coarse = np.concatenate([part.coarse for part in parts], axis=-1)
            return Factors(coarse, np.concatenate(fine, axis=-1) if fine else None)

        scale = factors([one.scale for one in scales])
        zero = joined([_zero(one) for one in scales]) if zeros else None
        offset = factors([_offset(one) for one in scales]) if offsets else None
        columns = scale.coarse.shape[-1]
        if columns != shape[-1] or (any(rest) and not storage.any_scales) or (zeros and columns % 2):
            return None
        self.report.any_scales |= any(rest) or (storage.kind == "fp8" and block is not None)
        return _Kept(block, scale, zero, offset)

    def _store(
        self,
        graph: ir.Graph,
        name: str,
        matrix: _Matrix,
        axis: int,
        block: int | None,
        kind: _Quantized,
        kept: _Kept | None,
        *,
        again: bool,
        gathered: bool,
        any_scales: bool,
        rounded: list[RoundedTensor],
    ) -> StoredMatrix:
        """Writes the numbers, then the scales, and zero points and offsets if there are some.

        A scale is for ``block`` weights along ``axis``, or, without, for a column.
        """
        for one in rounded:
            self.report.add(one.error, one.energy)
        scales: list[_Matrix] = []
        zeros: list[npt.NDArray[np.int8]] = []
        zero_points = any_scales and block is not None and axis == 0 and matrix.size // block % 2 == 0
        if kept is None and block is None:
            largest = np.max([np.abs(chunk).max(axis=0) for chunk in _row_chunks(matrix)], axis=0)
            scales.append(column_scales(largest, "fp8" if kind == "fp8" else "int8"))
        by_rows = axis == 1 and matrix.ndim == 2
        of_block = None if kept is None else kept.for_rows() if by_rows else kept.values()
        # Integers without a sign, where offsets say what they begin at.
        unsigned = kind == "int4" and kept is not None and kept.offset is not None

        def numbers() -> _Chunks:
            # Chunks are whole blocks of rows, so that a block is never cut; only the scales are held meanwhile.
            start = 0
            for chunk in _row_chunks(matrix, multiple=block if block is not None and axis == 0 else 1):
                end = start + len(chunk)
                if of_block is not None:
                    scale = _of_rows(of_block[0], start, end, axis, block)
                    zero = None if of_block[1] is None else _of_rows(of_block[1], start, end, axis, block)
                    offset = None if of_block[2] is None else _of_rows(of_block[2], start, end, axis, block)
                    integers, restored = apply_scales(chunk, scale, zero, kind, offset)
                    if not rounded:
                        self.report.add_error(chunk, restored)
                    yield pack_int4(integers) if kind == "int4" else integers
                elif block is None:
                    quantized, scale = quantize_columns(chunk, scales[0], "fp8" if kind == "fp8" else "int8"), scales[0]
                    self.report.add_error(chunk, quantized.astype(np.float32) * scale, again=again)
                    yield quantized.view(np.uint8)
                else:
                    if kind == "int8":
                        blocks = quantize_blocks(chunk, axis, block, 127)
                    else:
                        blocks = fit_blocks(chunk, axis, block, -8 if zero_points else -7, 7, zero_points=zero_points)
                    scales.append(blocks.scale)
                    if blocks.zero is not None:
                        zeros.append(blocks.zero)
                    self.report.add_error(chunk, blocks.restored(axis), again=again)
                    if kind == "int4" and axis:
                        yield pair_int4(blocks.integers.reshape(len(chunk), *shape[1:]))
                    else:
                        yield blocks.integers if kind == "int8" else pack_int4(blocks.integers)
                start = end

        dtype, shape = ir.DataType.UINT4 if unsigned else _DTYPES[kind], matrix.shape
        if block is not None and gathered:
            # What is looked up is divided into its blocks, so that scales broadcast.
            dtype, shape = ir.DataType.INT8, (len(matrix), matrix.shape[1] // block, block, *matrix.shape[2:])
        held = (*shape[:2], shape[2] // 2, *shape[3:]) if gathered and kind == "int4" else shape
        stored = self._initializer(graph, name, dtype, held, numbers())

        def factors(which: str, values: Factors) -> StoredFactors:
            return self._factors(graph, f"{name}.{which}", values, by_rows=by_rows, gathered=gathered)

        if kept is None:
            joined = np.concatenate(scales)
            halved = any_scales and block is not None and matrix.ndim == 2 and fits_half(joined)
            found = Factors(joined.astype(np.float16) if halved else joined)
            self.report.any_scales |= halved
        elif block is None:
            found = Factors(kept.scale.values()[0])
        else:
            found = kept.scale.turned() if by_rows else kept.scale
        zero = offset = None
        if zeros or (kept is not None and kept.zero is not None):
            each = np.concatenate(zeros) if kept is None or kept.zero is None else kept.zero
            packed = pack_int4(each) if kind == "int4" else each
            zero = self._initializer(graph, f"{name}.zero", dtype, each.shape, iter([packed]))
            self.report.any_scales = True
        if kept is not None and kept.offset is not None:
            offset = factors("offset", kept.offset.turned() if by_rows else kept.offset)
        return StoredMatrix(name, stored, factors("scale", found), zero, offset, block, by_rows)

    def _factors(self, graph: ir.Graph, name: str, factors: Factors, *, by_rows: bool, gathered: bool) -> StoredFactors:
        """Writes scales or offsets, in the shapes that :class:`StoredFactors` says."""
        coarse, fine = factors.coarse, factors.fine
        if gathered and not by_rows:
            coarse = np.expand_dims(coarse, 2)
        if fine is not None and not gathered:
            blocks = coarse.shape[1 if by_rows else 0]
            each = fine.shape[1 if by_rows else 0] // blocks
            coarse = np.expand_dims(coarse, 2 if by_rows else 1)
            fine = fine.reshape(len(fine), blocks, each) if by_rows else fine.reshape(blocks, each, fine.shape[1])
        dtype = ir.DataType.FLOAT16 if coarse.dtype == np.float16 else ir.DataType.FLOAT
        first = self._initializer(graph, name, dtype, coarse.shape, iter([coarse]))
        if fine is None:
            return StoredFactors(first)
        return StoredFactors(
            first, self._initializer(graph, f"{name}.fine", ir.DataType.INT8, fine.shape, iter([fine]))
        )

    def _initializer(
        self, graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], chunks: _Chunks
    ) -> ir.Value:
        value = ir.val(name, const_value=self.write(name, dtype, shape, chunks))
        graph.register_initializer(value)
        return value


def _zero(scales: Scales) -> npt.NDArray[np.int8]:
    return np.zeros(scales.scale.values().shape, np.int8) if scales.zero is None else scales.zero


def _offset(scales: Scales) -> Factors:
    return Factors(np.zeros(scales.scale.values().shape, np.float32)) if scales.offset is None else scales.offset


def _of_rows(array: npt.NDArray[_Scalar], start: int, end: int, axis: int, block: int | None) -> npt.NDArray[_Scalar]:
    """Scales or zero points of some rows of a matrix, one for each of its weights along ``axis``."""
    if block is None:
        return array
    return np.repeat(array[start // block : end // block] if axis == 0 else array[start:end], block, axis=axis)


def _name(value: ir.Value) -> str:
    """The name of an initializer; they all have one."""
    assert value.name is not None
    return value.name


def _role(node: ir.Node, index: int) -> str:
    """How a node reads an initializer: ``matmul``, row ``lookup``, ``experts``, ``tied`` (transposed head) or other."""
    if node.op_type == "MatMul" and index == 1:
        return "matmul"
    axis = node.attributes.get("axis")
    if node.op_type == "Gather" and index == 0 and (axis is None or axis.as_int() == 0):
        return "experts" if of_experts(node, 3) else "other" if of_experts(node, 2) else "lookup"
    if node.op_type == "Transpose" and all(use.op_type == "MatMul" and at == 1 for use, at in node.outputs[0].uses()):
        return "tied"
    return "other"


def of_experts(node: ir.Node, rank: int) -> bool:
    """Whether a node gathers experts from a stack of that rank: 3 for their matrices, 2 for their biases."""
    stack, ids = node.inputs[:2] if node.op_type == "Gather" else (None, None)
    if stack is None or ids is None or stack.const_value is None or ids.shape is None:
        return False
    return len(ids.shape) == 1 and len(stack.const_value.shape) == rank


def _routers(graph: ir.Graph) -> set[ir.Value]:
    """The matrices whose products choose experts: rounded, they would choose others.

    They are those that experts' indices are computed from first, with a column for each expert.
    """
    found: set[ir.Value] = set()
    chosen: dict[ir.Value | None, int] = {}
    for node in graph:
        stack = node.inputs[0].const_value if of_experts(node, 3) and node.inputs[0] is not None else None
        if stack is not None:
            chosen[node.inputs[1]] = stack.shape.numpy()[0]
        elif node.op_type == "If" and (each := producer(node.inputs[0], "Split")) is not None:
            chosen[each.inputs[0]] = len(each.outputs)
    for start, experts in chosen.items():
        seen, waiting = set[ir.Value](), [start]
        while waiting:
            value = waiting.pop()
            made_by = value.producer() if value is not None and value not in seen else None
            if value is None or made_by is None:
                continue
            seen.add(value)
            weight = made_by.inputs[1] if made_by.op_type == "MatMul" else None
            if weight is None or weight.const_value is None:
                waiting += made_by.inputs
            elif weight.const_value.shape[-1] == experts:
                found.add(weight)
    return found


def block_for(length: int, preferred: int | None) -> int | None:
    """The preferred block size, or the largest half of it that divides ``length``; None below the smallest block."""
    block = preferred or 0
    while block >= _SMALLEST_BLOCK:
        if length % block == 0:
            return block
        block //= 2
    return None


def _row_chunks(array: npt.NDArray[_Scalar], multiple: int = 1) -> Iterator[npt.NDArray[_Scalar]]:
    """Consecutive rows, a few megabytes at a time, as contiguous arrays."""
    if array.ndim == 0:
        yield array
        return
    width = max(1, array.size // max(1, array.shape[0]))
    rows = max(1, _CHUNK_ELEMENTS // width // multiple) * multiple
    for start in range(0, array.shape[0], rows):
        yield np.ascontiguousarray(array[start : start + rows])
