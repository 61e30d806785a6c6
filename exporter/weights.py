"""Writes a model's weights into one file, tensor by tensor, and quantizes them on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.contract import tensors
from specexport.contract.model import StoredAs
from specexport.exporter import quantize
from specexport.exporter.checkpoints.stored import Factors, Kind, QuantizedTensor, Scales, StoredTensor, transposed
from specexport.exporter.dequantize import (
    GATHERED,
    Role,
    StoredFactors,
    StoredMatrix,
    dequantize_lookup,
    dequantize_product,
    role_of,
    routers,
)
from specexport.exporter.external_data import INLINE_BYTES, Chunks, DataFile, Places, pack_int4, pair_int4
from specexport.exporter.options import Storage
from specexport.exporter.passes.compute_type import HALF_TYPES
from specexport.exporter.passes.editing import needed_only_for, op, replace_value
from specexport.exporter.passes.linear import names_in
from specexport.exporter.quantize import SMALLEST_BLOCK, MatrixCopy, RoundedTensor, RoundingError, block_for, row_chunks

_EXACT = Storage("fp32", None)
_STORED: dict[str, StoredAs] = {"F16": "fp16", "BF16": "bf16"}
_WIDTHS: tuple[StoredAs, ...] = ("int4", "int8", "fp16", "bf16", "fp32")
"""Precisions that ``stored`` may resolve to, the fewest bits first."""
_Matrix = npt.NDArray[np.float32]


@dataclass
class WeightsReport:
    """A report on the stored matrices of a model.

    Attributes:
        not_quantized: names of matrices that had to be stored in fp32, with the reason.
        kept: names of the checkpoint's matrices that kept their integers and scales.
        converted: names of the checkpoint's quantized matrices that were rounded again.
        kept_block: largest number of weights that share a scale, among kept matrices.
        any_scales: whether some scales are of a kind that only CPUs read.
        rounded_again: the rounding error of the converted matrices.
    """

    quantized: list[str] = field(default_factory=list)
    not_quantized: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    kept_block: int | None = None
    any_scales: bool = False
    rounding: RoundingError = field(default_factory=RoundingError)
    rounded_again: RoundingError = field(default_factory=RoundingError)


class WeightsFile(DataFile):
    """A weights file, and the report of writing it.

    Args:
        storage: the storage of matrices that are multiplied or looked up; norms and biases are stored in fp32.
        heads: the storage of the matrices of Medusa heads; None for ``storage``.
        checkpoint: the checkpoint's tensors by name; quantized tensors keep their scales if possible.
        progress: called after each tensor with its size in bytes.
        shared: tensors of the target that a draft may share.
    """

    def __init__(
        self,
        path: Path,
        storage: Storage,
        heads: Storage | None = None,
        checkpoint: Mapping[str, StoredTensor] | None = None,
        progress: Callable[[int], None] = lambda _: None,
        shared: Places | None = None,
    ) -> None:
        super().__init__(path, shared)
        self._storage, self._heads = storage, heads or storage
        self._tensors = checkpoint or {}
        self._quantized = {name for name, tensor in self._tensors.items() if isinstance(tensor, QuantizedTensor)}
        self._progress = progress
        self.report = WeightsReport()

    def externalize(self, model: ir.Model) -> None:
        """Moves the weights of a graph and its subgraphs into the file."""
        for graph in (model.graph, *model.graph.subgraphs()):
            router_matrices, of_heads = routers(graph), needed_only_for(graph, tensors.CANDIDATES)
            for value in list(graph.initializers.values()):
                chosen = self._heads if value in of_heads else self._storage
                self._move(graph, value, _EXACT if value in router_matrices else chosen)

    def _move(self, graph: ir.Graph, value: ir.Value, storage: Storage) -> None:
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= INLINE_BYTES:
            return
        array = tensor.numpy()
        if storage.kind == "stored" or (storage.kind == "int4" and self._rounded(value)):
            kind = self._as_stored(value)  # int4 needs blocks
            storage = replace(storage, kind="int8" if kind == "int4" and storage.block_size is None else kind)
        if storage.rest is not None and not self._quantized_before(value):
            storage = Storage(storage.rest, storage.block_size)
        readers = {role_of(node, index) for node, index in value.uses()}
        if storage.kind == "fp32" or array.dtype != np.float32 or "other" in readers:
            value.const_value = self.write(_name(value), tensor.dtype, array.shape, row_chunks(array))
        elif storage.kind == "fp16" or storage.kind == "bf16":
            restored = self._half(graph, value, array, storage.kind)
            if restored is not None:
                value.replace_all_uses_with(restored)
                del graph.initializers[_name(value)]
        else:
            assert storage.kind != "stored"
            self._quantize(graph, value, array, storage.kind, storage)
        self._progress(array.nbytes)

    def _rounded(self, value: ir.Value) -> list[RoundedTensor]:
        """The parts that a matrix was joined from, if this build calibrated all of them."""
        parts = [self._tensors.get(name) for name in names_in(_name(value))]
        rounded = [part for part in parts if isinstance(part, RoundedTensor)]
        return rounded if len(rounded) == len(parts) else []

    def _as_stored(self, value: ir.Value) -> StoredAs:
        """The precision that stores a matrix as the checkpoint does, given by the part with the most bits."""
        kinds: list[StoredAs] = []
        for name in names_in(_name(value)):
            tensor = self._tensors.get(name.partition("[")[0])
            if isinstance(tensor, QuantizedTensor):
                kinds.append(tensor.kind)
            else:
                kinds.append("int8" if tensor is None else _STORED.get(tensor.dtype, "fp32"))
        return max(kinds, key=_WIDTHS.index)

    def _half(self, graph: ir.Graph, value: ir.Value, array: _Matrix, kind: str) -> ir.Value | None:
        """A matrix, stored in 16 bits and cast to fp32; None if it does not fit, and is stored in fp32."""
        dtype = HALF_TYPES[kind]
        largest = max(float(np.abs(chunk).max(initial=0.0)) for chunk in row_chunks(array))
        if largest > float(ml_dtypes.finfo(dtype.numpy()).max):
            self._store_fp32(value, array, f"its largest weight, {largest:.3g}, does not fit {kind}")
            return None
        chunks = (chunk.astype(dtype.numpy()).view(np.uint16) for chunk in row_chunks(array))
        stored = self._initializer(graph, f"{value.name}.{kind}", dtype, array.shape, chunks)
        cast = op("Cast", [stored], f"{value.name}.fp32", to=ir.DataType.FLOAT.value)
        graph.insert_before(graph[0], cast)
        return cast.outputs[0]

    def _store_fp32(self, value: ir.Value, array: _Matrix, why: str) -> None:
        self.report.not_quantized[_name(value)] = why
        value.const_value = self.write(_name(value), ir.DataType.FLOAT, array.shape, row_chunks(array))

    def _quantize(self, graph: ir.Graph, value: ir.Value, array: _Matrix, kind: Kind, storage: Storage) -> None:
        """Stores a copy of a matrix for each node that reads it: ``[K,N]`` for products, ``[V,H]`` for look-ups.

        Experts are gathered from their stack, ``[E,K,N]``, like rows that are looked up.
        """
        by_column = kind == "fp8" or storage.block_size is None
        readers = [(node, index, role_of(node, index)) for node, index in value.uses()]
        half = None
        if by_column and any(role in GATHERED for _, _, role in readers):
            # Some compilers accept 8-bit constants only before a DequantizeLinear, so they cannot gather from them.
            half = self._half(graph, value, array, "fp16")
            if half is None:
                return
        for node, index, role in readers:
            if role in GATHERED and half is not None:
                node.replace_input_with(index, half)
                continue
            copy = self._copy(graph, value, array, kind, storage, role)
            if isinstance(copy, str):
                self._store_fp32(value, array, copy)
                return
            stored = self._store(graph, copy)
            if role in GATHERED:
                replace_value(node.outputs[0], dequantize_lookup(graph, node, stored, pairs=copy.kind == "int4"))
            else:
                for product in [node] if role == "matmul" else list(node.outputs[0].consumers()):
                    dequantize_product(graph, stored, product)
            self.report.quantized.append(copy.name)
        del graph.initializers[_name(value)]

    def _copy(
        self, graph: ir.Graph, value: ir.Value, array: _Matrix, kind: Kind, storage: Storage, role: Role
    ) -> MatrixCopy | str:
        """The copy of a matrix for a node that reads it, or the reason why it cannot be quantized."""
        by_column = kind == "fp8" or storage.block_size is None
        # A tied head reads Transpose(embedding). On CPUs it shares the embedding's copy, which is always int8, as
        # rows are looked up; on other devices it gets a transposed copy, so that blocks lie along K.
        by_rows = role == "lookup" or (role == "tied" and not by_column and storage.any_scales)
        matrix = array.T if role == "tied" and not by_rows else array
        axis = int(by_rows or role == "experts")
        # Experts, most of a mixture's weights, are gathered as bytes of two integers.
        width: Kind = "int8" if by_rows else kind
        kept = None
        if role == "matmul" or role == "experts" or (by_rows and storage.any_scales):
            kept = self._kept_scales(value, matrix, width, storage, by_rows=by_rows)
        block = None if by_column else block_for(matrix.shape[axis], storage.block_size)
        if kept is not None:
            block = None if by_column and kept.group == matrix.shape[axis] else kept.group
            self.report.any_scales |= not kept.plain or (kind == "fp8" and block is not None)
            self.report.kept_block = max(self.report.kept_block or 0, block or 0) or None
        elif block is None and not by_column:
            return f"its {matrix.shape[axis]} inputs are not a multiple of {SMALLEST_BLOCK}"
        # One copy per reader: ONNX Runtime fuses a dequantization only if a single node reads it.
        name = f"{value.name}.{width}.{role}"
        if by_column or name in graph.initializers:
            name = f"{name}.{len(graph.initializers)}"
        copy = MatrixCopy(
            name=name,
            matrix=matrix,
            axis=axis,
            block=block,
            kind=width,
            gathered=role in GATHERED,
            by_rows=by_rows,
            # int8 keeps scales that every backend reads, as they take at most a ninth of its size.
            any_scales=storage.any_scales and storage.kind != "int8",
            kept=kept,
            rounded=() if kept is None else tuple(self._rounded(value)),
            again=kept is None and self._quantized_before(value),
        )
        if copy.again or (kept is not None and not copy.rounded):
            (self.report.converted if copy.again else self.report.kept).extend(names_in(_name(value)))
        return copy

    def _quantized_before(self, value: ir.Value) -> bool:
        """Whether a matrix, or any expert of a stack composed in loading, is quantized in the checkpoint."""
        names = names_in(_name(value))
        stack = f"{names[0].rpartition('.')[0]}."
        quantized = self._quantized
        return all(name.partition("[")[0] in quantized for name in names) or (
            stack.endswith(".experts.") and any(name.startswith(stack) for name in quantized)
        )

    def _kept_scales(
        self, value: ir.Value, matrix: _Matrix, kind: Kind, storage: Storage, *, by_rows: bool
    ) -> Scales | None:
        """The checkpoint's own scales of a matrix, perhaps stored ``by_rows``, if the bundle can store it with them."""
        parts = [self._scales_of(name) for name in names_in(_name(value))]
        kept = quantize.kept_scales(parts, matrix.shape[::-1] if by_rows else matrix.shape, kind, storage)
        # Rows are looked up without zero points.
        return None if by_rows and kept is not None and kept.zero is not None else kept

    def _scales_of(self, name: str) -> Scales | None:
        """The checkpoint's own scales of a matrix, or of a matrix in a stack, such as ``stack[3]``."""
        stack, bracket, index = name.partition("[")
        tensor = self._tensors.get(stack)
        scales = tensor.scales() if isinstance(tensor, QuantizedTensor) else None
        if scales is None or not bracket:
            return scales
        return scales.each(lambda stacked: stacked[int(index.removesuffix("]"))])

    def _store(self, graph: ir.Graph, copy: MatrixCopy) -> StoredMatrix:
        """Writes the numbers, then the scales, and zero points and offsets if there are any."""
        for tensor in copy.rounded:
            self.report.rounding.add(tensor.rounding)
        scales: list[_Matrix] = []
        zeros: list[npt.NDArray[np.int8]] = []
        kept, offset = copy.kept, None
        if kept is not None:
            values: Sequence[npt.NDArray[Any] | None] = kept.values()
            if copy.by_rows:
                values, kept = [array if array is None else array.T for array in values], kept.each(transposed)
            numbers = self._numbers(copy, values)
        elif copy.block is None:
            largest = np.max([np.abs(chunk).max(axis=0) for chunk in row_chunks(copy.matrix)], axis=0)
            scales.append(quantize.column_scales(largest, copy.kind))
            numbers = self._numbers(copy, (scales[0], None, None))
        else:
            numbers = self._block_numbers(copy, copy.block, scales, zeros)
        stored = self._initializer(graph, copy.name, copy.dtype, copy.stored_shape, numbers)

        def factors(which: str, values: Factors) -> StoredFactors:
            name = f"{copy.name}.{which}"
            return self._factors(graph, name, values, by_rows=copy.by_rows, gathered=copy.gathered)

        if kept is None:
            joined = np.concatenate(scales)
            halved = copy.any_scales and copy.block is not None and copy.matrix.ndim == 2 and quantize.fits_half(joined)
            scale = Factors(joined.astype(np.float16) if halved else joined)
            zero_points = np.concatenate(zeros) if zeros else None
            self.report.any_scales |= halved
        else:
            scale = kept.scale if copy.block is not None else Factors(kept.scale.values()[0])
            zero_points = kept.zero
            offset = None if kept.offset is None else factors("offset", kept.offset)
        zero = None
        if zero_points is not None:
            packed = pack_int4(zero_points) if copy.kind == "int4" else zero_points
            zero = self._initializer(graph, f"{copy.name}.zero", copy.dtype, zero_points.shape, iter([packed]))
            self.report.any_scales = True
        return StoredMatrix(copy.name, stored, factors("scale", scale), zero, offset, copy.block, copy.by_rows)

    def _numbers(self, copy: MatrixCopy, values: Sequence[npt.NDArray[Any] | None]) -> Chunks:
        """The numbers of a matrix for given scales, which are the checkpoint's or belong to columns, ``[N]``."""
        start = 0
        for chunk in copy.chunks():
            end = start + len(chunk)
            scale, zero, offset = (None if array is None else copy.per_weight(array, start, end) for array in values)
            assert scale is not None
            integers, restored = quantize.apply_scales(chunk, scale, zero, copy.kind, offset)
            if not copy.rounded:
                self._add_error(copy, chunk, restored)
            yield pack_int4(integers) if copy.kind == "int4" else integers
            start = end

    def _block_numbers(
        self, copy: MatrixCopy, block: int, scales: list[_Matrix], zeros: list[npt.NDArray[np.int8]]
    ) -> Chunks:
        """The numbers of a matrix in blocks; appends the chosen scales and, if there are any, the zero points."""
        zero_points = copy.any_scales and copy.axis == 0 and copy.matrix.size // block % 2 == 0
        for chunk in copy.chunks():
            if copy.kind == "int8":
                blocks = quantize.quantize_blocks(chunk, copy.axis, block, 127)
            else:
                blocks = quantize.fit_blocks(chunk, copy.axis, block, zero_points=zero_points)
            scales.append(blocks.scale)
            if blocks.zero is not None:
                zeros.append(blocks.zero)
            self._add_error(copy, chunk, blocks.restored(copy.axis))
            if copy.kind == "int8":
                yield blocks.integers
            elif copy.gathered:
                yield pair_int4(blocks.integers.reshape(len(chunk), *copy.blocks_shape[1:]))
            else:
                yield pack_int4(blocks.integers)

    def _add_error(self, copy: MatrixCopy, chunk: _Matrix, restored: _Matrix) -> None:
        error = RoundingError.of(chunk, restored)
        self.report.rounding.add(error)
        if copy.again:
            self.report.rounded_again.add(error)

    def _factors(self, graph: ir.Graph, name: str, factors: Factors, *, by_rows: bool, gathered: bool) -> StoredFactors:
        """Writes scales or offsets, in the shapes of :class:`StoredFactors`."""
        coarse, fine = factors.coarse, factors.fine
        if gathered and not by_rows:
            coarse = np.expand_dims(coarse, 2)
        if fine is not None and not gathered:
            blocks = coarse.shape[1 if by_rows else 0]
            coarse = np.expand_dims(coarse, 2 if by_rows else 1)
            fine = fine.reshape(len(fine), blocks, -1) if by_rows else fine.reshape(blocks, -1, fine.shape[1])
        dtype = ir.DataType.FLOAT16 if coarse.dtype == np.float16 else ir.DataType.FLOAT
        first = self._initializer(graph, name, dtype, coarse.shape, iter([coarse]))
        if fine is None:
            return StoredFactors(first)
        return StoredFactors(
            first, self._initializer(graph, f"{name}.fine", ir.DataType.INT8, fine.shape, iter([fine]))
        )

    def _initializer(
        self, graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], chunks: Chunks
    ) -> ir.Value:
        value = ir.val(name, const_value=self.write(name, dtype, shape, chunks))
        graph.register_initializer(value)
        return value


def _name(value: ir.Value) -> str:
    """The name of an initializer, which always has one."""
    assert value.name is not None
    return value.name
