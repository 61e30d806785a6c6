"""Writes a model's weights into one file, a tensor at a time, quantizing on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.contract import tensors
from specexport.contract.model import StoredAs
from specexport.exporter.passes.matching import needed_only_for
from specexport.exporter.quantize import column_scales, pack_int4, quantize_blocks, quantize_columns

Precision = StoredAs
PRECISIONS: tuple[Precision, ...] = get_args(StoredAs)
QUANTIZED: tuple[Precision, ...] = ("int8", "int4", "fp8")
"""Those that round more than half precision does, so that a build says by how much."""


@dataclass(frozen=True)
class Storage:
    """How matrices are stored.

    Attributes:
        kind: ``fp16`` and ``bf16`` are cast to fp32 in the graph. ``int8`` and ``int4`` are symmetric, in blocks along
            the summed axis, and undone by DequantizeLinear; so is ``fp8`` (float8_e4m3fn), with one scale a column.
        block_size: weights that share a scale; halved for a matrix it does not divide. None, for int8 only, gives each
            column one scale, as opset 20 knows no blocks; rows that are looked up are then stored in fp16.
    """

    kind: Precision
    block_size: int | None


_Half = Literal["fp16", "bf16"]
_HALVES: dict[_Half, tuple[ir.DataType, npt.DTypeLike]] = {
    "fp16": (ir.DataType.FLOAT16, np.float16),
    "bf16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16),
}
_Scalar = TypeVar("_Scalar", bound=np.generic)

INLINE_BYTES = 1024
"""Smaller constants stay in the graph: shapes, axes, scales of one element."""

_ALIGN = 4096
_CHUNK_ELEMENTS = 4 << 20


@dataclass
class WeightsReport:
    """What was written.

    Attributes:
        bytes_written: size of the file.
        quantized: names of the quantized matrices.
        left: names of matrices left in fp32, and why.
        rms_error: root of the summed squared error over the root of the summed squared weights, of all quantized ones.
    """

    bytes_written: int = 0
    quantized: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    _error: float = 0.0
    _energy: float = 0.0

    @property
    def rms_error(self) -> float:
        return float(np.sqrt(self._error / self._energy)) if self._energy else 0.0

    def add_error(self, original: npt.NDArray[np.float32], restored: npt.NDArray[np.float32]) -> None:
        """Adds one chunk to :attr:`rms_error`."""
        self._error += float(np.square(original - restored, dtype=np.float64).sum())
        self._energy += float(np.square(original, dtype=np.float64).sum())


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
        self.report = WeightsReport()

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.report.bytes_written = self._path.stat().st_size

    def write(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...], chunks: Iterator[npt.NDArray[np.generic]]
    ) -> ir.ExternalTensor:
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

    def externalize(self, graph: ir.Graph, stored: Storage, heads: Storage | None = None) -> None:
        """Moves the weights of a graph, and of the graphs inside it, into the file.

        Args:
            graph: changed in place.
            stored: how matrices are that are multiplied or looked up; everything else (norms, biases) is in fp32.
            heads: how Medusa heads are; None for ``stored``.
        """
        of_heads = set() if heads is None else needed_only_for(graph, tensors.CANDIDATES)
        for value in list(graph.initializers.values()):
            storage = heads if heads is not None and value in of_heads else stored
            kind, block_size = storage.kind, storage.block_size
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= INLINE_BYTES:
                continue
            array = tensor.numpy()
            readers = {_role(node, index) for node, index in value.uses()}
            if kind == "fp32" or array.dtype != np.float32 or not readers <= {"matmul", "lookup", "tied"}:
                value.const_value = self.write(_name(value), tensor.dtype, array.shape, _row_chunks(array))
            elif kind == "fp16" or kind == "bf16":
                restored = self._half(graph, value, array, kind)
                if restored is not None:
                    for reader, index in list(value.uses()):
                        reader.replace_input_with(index, restored)
                    del graph.initializers[_name(value)]
            elif kind == "fp8" or block_size is None:
                self._quantize_columns(graph, value, array, "fp8" if kind == "fp8" else "int8")
            else:
                self._quantize(graph, value, array, kind, block_size)
            self._progress(array.nbytes)
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    self.externalize(attribute.as_graph(), stored, heads)

    def _half(self, graph: ir.Graph, value: ir.Value, array: npt.NDArray[np.float32], kind: _Half) -> ir.Value | None:
        """Stores a matrix in 16 bits: the fp32 value to read instead of it, or None where it was left as it is."""
        dtype, numpy_dtype = _HALVES[kind]
        largest = max(float(np.abs(chunk).max(initial=0.0)) for chunk in _row_chunks(array))
        if largest > float(ml_dtypes.finfo(numpy_dtype).max):
            self.report.left[_name(value)] = f"its largest weight, {largest:.3g}, does not fit {kind}"
            value.const_value = self.write(_name(value), ir.DataType.FLOAT, array.shape, _row_chunks(array))
            return None
        chunks = (chunk.astype(numpy_dtype).view(np.uint16) for chunk in _row_chunks(array))
        stored = self._initializer(graph, f"{value.name}.{kind}", dtype, array.shape, chunks)
        cast = ir.node("Cast", [stored], attributes={"to": ir.DataType.FLOAT.value}, name=f"{value.name}.cast")
        cast.outputs[0].name = f"{value.name}.fp32"
        graph.insert_before(next(iter(graph)), cast)
        return cast.outputs[0]

    def _initializer(
        self,
        graph: ir.Graph,
        name: str,
        dtype: ir.DataType,
        shape: tuple[int, ...],
        chunks: Iterator[npt.NDArray[np.generic]],
    ) -> ir.Value:
        tensor = self.write(name, dtype, shape, chunks)
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
        graph.register_initializer(value)
        return value

    def _quantize_columns(
        self, graph: ir.Graph, value: ir.Value, array: npt.NDArray[np.float32], kind: Literal["int8", "fp8"]
    ) -> None:
        """Stores ``[K,N]`` in 8 bits with N scales where it is multiplied, ``[V,H]`` in fp16 where it is looked up."""
        readers = [(node, index, _role(node, index)) for node, index in value.uses()]
        multiplied = [reader for reader in readers if reader[2] != "lookup"]
        looked_up = [reader for reader in readers if reader[2] == "lookup"]
        if looked_up:
            # Compilers that take 8-bit constants only before a DequantizeLinear could not gather from them.
            restored = self._half(graph, value, array, "fp16")
            if restored is None:
                return
            for node, index, _ in looked_up:
                node.replace_input_with(index, restored)
        for node, index, role in multiplied:
            name = f"{value.name}.{kind}.{role}.{len(graph.initializers)}"
            stored, scales = self._store_columns(graph, name, array.T if role == "tied" else array, kind)
            dequantize = _dequantized(graph, node, stored, scales, {"axis": 1}, name)
            if role == "matmul":
                node.replace_input_with(index, dequantize)
            else:
                for reader, position in list(node.outputs[0].uses()):
                    reader.replace_input_with(position, dequantize)
            self.report.quantized.append(name)
        del graph.initializers[_name(value)]

    def _store_columns(
        self, graph: ir.Graph, name: str, matrix: npt.NDArray[np.float32], kind: Literal["int8", "fp8"]
    ) -> tuple[ir.Value, ir.Value]:
        """Writes the numbers ``[K,N]``, then the scales ``[N]``."""
        scale = column_scales(np.max([np.abs(chunk).max(axis=0) for chunk in _row_chunks(matrix)], axis=0), kind)
        dtype = ir.DataType.INT8 if kind == "int8" else ir.DataType.FLOAT8E4M3FN

        def numbers() -> Iterator[npt.NDArray[np.generic]]:
            for chunk in _row_chunks(matrix):
                quantized = quantize_columns(chunk, scale, kind)
                self.report.add_error(chunk, quantized.astype(np.float32) * scale)
                yield quantized.view(np.uint8)

        stored = self._initializer(graph, name, dtype, matrix.shape, numbers())
        return stored, self._initializer(graph, f"{name}.scale", ir.DataType.FLOAT, scale.shape, iter([scale]))

    def _quantize(
        self, graph: ir.Graph, value: ir.Value, array: npt.NDArray[np.float32], precision: Precision, block_size: int
    ) -> None:
        """Stores a matrix once for each way it is read: [K,N] for multiplication, [V,H] for look-ups."""
        for node, index in list(value.uses()):
            role = _role(node, index)
            # A tied head reads Transpose(embedding): quantize the transposed matrix, so that blocks lie along K again.
            matrix, axis = (array.T, 0) if role == "tied" else (array, 0) if role == "matmul" else (array, 1)
            block = _block(matrix.shape[axis], block_size)
            if block is None:
                self.report.left[_name(value)] = f"its {matrix.shape[axis]} inputs are not a multiple of 16"
                value.const_value = self.write(_name(value), ir.DataType.FLOAT, array.shape, _row_chunks(array))
                return
            # Rows are looked up as int8 whatever the precision: no backend gathers four-bit rows.
            kind: Precision = "int8" if role == "lookup" else precision
            # One name a reader: ONNX Runtime fuses a dequantization only where a single node reads it.
            name = f"{value.name}.{kind}.{role}"
            if name in graph.initializers:
                name = f"{name}.{len(graph.initializers)}"
            stored, scales = self._store_blocks(graph, name, matrix, axis, block, kind)
            restored = (
                _lookup(graph, node, stored, scales, block, name)
                if role == "lookup"
                else _dequantized(graph, node, stored, scales, {"axis": 0, "block_size": block}, name)
            )
            if role == "matmul":
                node.replace_input_with(index, restored)
            else:
                for reader, position in list(node.outputs[0].uses()):
                    reader.replace_input_with(position, restored)
            self.report.quantized.append(name)
        del graph.initializers[_name(value)]

    def _store_blocks(
        self,
        graph: ir.Graph,
        name: str,
        matrix: npt.NDArray[np.float32],
        axis: int,
        block: int,
        precision: Precision,
    ) -> tuple[ir.Value, ir.Value]:
        """Writes the integers, then the scales; only the scales, one in ``block`` weights, are held meanwhile."""
        dtype = ir.DataType.INT8 if precision == "int8" else ir.DataType.INT4
        scales: list[npt.NDArray[np.float32]] = []

        def integers() -> Iterator[npt.NDArray[np.generic]]:
            # Chunks are whole blocks of rows, so that a block is never cut.
            for chunk in _row_chunks(matrix, multiple=block if axis == 0 else 1):
                quantized, scale = quantize_blocks(chunk, axis, block, 127 if precision == "int8" else 7)
                scales.append(scale)
                restored = quantized.astype(np.float32) * np.repeat(scale, block, axis=axis)
                self.report.add_error(chunk, restored)
                yield quantized if precision == "int8" else pack_int4(quantized)

        stored = self._initializer(graph, name, dtype, matrix.shape, integers())
        joined = np.concatenate(scales)
        return stored, self._initializer(graph, f"{name}.scale", ir.DataType.FLOAT, joined.shape, iter([joined]))


def _name(value: ir.Value) -> str:
    """The name of an initializer; they all have one."""
    assert value.name is not None
    return value.name


def _role(node: ir.Node, index: int) -> str:
    """How a node reads an initializer: as ``matmul`` weight, row ``lookup``, ``tied`` (transposed head), or other."""
    if node.op_type == "MatMul" and index == 1:
        return "matmul"
    if node.op_type == "Gather" and index == 0 and _axis(node) == 0:
        return "lookup"
    if node.op_type == "Transpose" and all(use.op_type == "MatMul" and at == 1 for use, at in node.outputs[0].uses()):
        return "tied"
    return "other"


def _axis(node: ir.Node) -> int:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else 0


def _block(length: int, preferred: int) -> int | None:
    """The preferred block size, or the largest half of it that divides ``length``; at least 16."""
    block = preferred
    while block >= 16:
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


def _dequantized(
    graph: ir.Graph, before: ir.Node, stored: ir.Value, scales: ir.Value, attributes: dict[str, int], name: str
) -> ir.Value:
    # TensorRT wants nodes to have other names than weights.
    node = ir.node("DequantizeLinear", [stored, scales], attributes=attributes, name=f"{name}.dequantize")
    node.outputs[0].name = f"{name}.fp32"
    graph.insert_before(before, node)
    return node.outputs[0]


def _lookup(graph: ir.Graph, gather: ir.Node, stored: ir.Value, scales: ir.Value, block: int, name: str) -> ir.Value:
    """Looks up integers and scales and multiplies only the rows found: ids ``[B,T]`` make ``[B,T,H]``."""
    ids = gather.inputs[1]
    rows = ir.node("Gather", [stored, ids], attributes={"axis": 0}, name=f"{name}.rows")
    row_scales = ir.node("Gather", [scales, ids], attributes={"axis": 0}, name=f"{name}.row_scales")
    restored = ir.node(
        "DequantizeLinear",
        [rows.outputs[0], row_scales.outputs[0]],
        attributes={"axis": 2, "block_size": block},
        name=f"{name}.dequantize",
    )
    for node in (rows, row_scales, restored):
        node.outputs[0].name = node.name
        graph.insert_before(gather, node)
    return restored.outputs[0]
