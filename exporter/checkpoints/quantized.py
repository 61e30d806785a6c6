"""Reads quantized checkpoints: AWQ, GPTQ, compressed-tensors, FP8 with block scales, MXFP4.

A matrix is dequantized to fp32, and its scales and zero points are kept, so that the exporter can restore its integers
instead of rounding again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from specexport.contract.errors import BuildError, explained
from specexport.contract.shapes import Size
from specexport.exporter.checkpoints.stored import Blocks, Factors, Kind, QuantizedTensor, Scales, StoredTensor

QUANTIZATION = "quantization_config"
_SCALES = ("F32", "F16", "BF16")
_INDICES = ("I32", "I64")
_IGNORED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")
"""Scales of quantized activations and caches, which transformers computes in floating point."""
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of the eight 4-bit numbers in an AWQ word, from the lowest bits."""
_DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of the three lower bits of an MXFP4 number."""
_ORIGINAL = "Build from the checkpoint that it was quantized from, with --precision"


class _Weights(msgspec.Struct):
    num_bits: int | None = None
    block_structure: tuple[Size, Size] | None = None


class _Group(msgspec.Struct):
    format: str | None = None
    weights: _Weights | None = None


class _Module(msgspec.Struct):
    bits: int | None = None


class _Config(msgspec.Struct):
    """The fields read from ``quantization_config``; other keys are ignored."""

    quant_method: str
    bits: int | None = None
    dynamic: dict[str, _Module] | None = None
    version: str | None = None
    checkpoint_format: str | None = None
    sym: bool | None = None
    format: str | None = None
    config_groups: dict[str, _Group] = {}
    transform_config: dict[str, Any] | None = None
    weight_block_size: tuple[Size, Size] | None = None

    @property
    def all_bits(self) -> set[int]:
        """The bits of GPTQ's matrices; ``dynamic`` has those of modules that differ, by regular expressions."""
        return {self.bits or 4, *(module.bits for module in (self.dynamic or {}).values() if module.bits is not None)}

    @property
    def blocks(self) -> set[tuple[int, int]]:
        """The sizes of blocks ``(outputs, inputs)`` that share a scale, in any matrix."""
        sizes = {group.weights.block_structure for group in self.config_groups.values() if group.weights is not None}
        return {size for size in (*sizes, self.weight_block_size) if size is not None}


def quantization(path: Path, document: dict[str, Any]) -> tuple[str, Kind] | None:
    """The format of a quantized checkpoint, from its ``config.json``, and the precision that stores it unchanged.

    Returns:
        None if it is not quantized.
    """
    config = _config(path, document)
    return None if config is None else _format(path, config)


def _format(path: Path, config: _Config) -> tuple[str, Kind]:
    method, bits = config.quant_method, config.bits or 4
    if config.transform_config:
        raise BuildError(
            f"{path}: {QUANTIZATION}: transform_config rotates activations while the model runs, which is not "
            f"supported. {_ORIGINAL}"
        )
    if method == "awq" and bits == 4 and (config.version or "gemm").lower() == "gemm":
        return "AWQ", "int4"
    if method == "gptq" and config.all_bits <= {2, 4, 8} and config.checkpoint_format in (None, "gptq", "gptq_v2"):
        return "GPTQ", "int8" if 8 in config.all_bits else "int4"
    if method == "compressed-tensors":
        groups = config.config_groups.values()
        layouts = {group.format or config.format for group in groups} or {config.format}
        if layouts <= {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}:
            wide = any(group.weights is not None and group.weights.num_bits == 8 for group in groups)
            kind: Kind = "int4" if layouts == {"pack-quantized"} and not wide else "int8"
            return method, "fp8" if layouts == {"float-quantized"} else kind
        method = f"{method} in {', '.join(sorted(map(str, layouts)))}"
    if method == "fp8":
        return "FP8", "fp8"
    if method == "mxfp4":
        return "MXFP4", "int8"  # its fifteen values are integers up to 12 after doubling: too large for four bits
    details = [
        f"{name} {value}" for name, value in msgspec.structs.asdict(config).items() if isinstance(value, str | int)
    ]
    raise BuildError(
        f"{path}: {QUANTIZATION}: {method[:80]!r} ({', '.join(details)[:200]}) is not supported; expected AWQ (gemm), "
        f"GPTQ of 2, 4 or 8 bits, compressed-tensors of integers or FP8, FP8 with block scales, or MXFP4. {_ORIGINAL}"
    )


def _config(path: Path, document: dict[str, Any]) -> _Config | None:
    settings, part = document.get(QUANTIZATION), document.get("text_config")
    if settings is None and isinstance(part, dict):
        settings = part.get(QUANTIZATION)
    named = isinstance(settings, dict) and "quant_method" in settings
    if isinstance(document.get("quantization"), dict) and not named:
        raise BuildError(f"{path}: quantization: the format of MLX is not supported. {_ORIGINAL}")
    try:
        return msgspec.convert(settings, _Config | None)
    except msgspec.ValidationError as error:
        raise BuildError(f"{path}: {QUANTIZATION}: {explained(error)}") from error


def dequantize_tensors(path: Path, document: dict[str, Any], tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """The model's tensors of a quantized checkpoint, from its ``config.json`` and the tensors of its files."""
    config = _config(path, document)
    if config is None:
        yield from tensors
        return
    layout, _ = _format(path, config)
    stored = {tensor.name: tensor for tensor in tensors}
    used: set[str] = set()
    for name in stored:
        stem, _, last = name.rpartition(".")
        parts = _Parts(path.parent, f"{stem}.", f"{stem}.weight", stored, used)
        if last == "qweight":
            yield _awq(parts) if layout == "AWQ" else _gptq(parts, config)
        elif last == "weight_packed":
            yield _packed(parts)
        elif last == "weight" and stored[name].dtype in ("F8_E4M3", "I8"):
            yield _scaled(parts, config.blocks)
        elif last.endswith("_blocks") and layout == "MXFP4":
            matrix = name.removesuffix("_blocks")
            yield _mxfp4(_Parts(path.parent, f"{matrix}_", matrix, stored, used))
    for name, tensor in stored.items():
        if name not in used and name.rpartition(".")[2] not in _IGNORED:
            yield tensor


@dataclass(frozen=True)
class _Parts:
    """The stored parts of a quantized matrix.

    Attributes:
        prefix: the common prefix of the parts' names.
        used: the names of tensors that were used.
    """

    folder: Path
    prefix: str
    name: str
    stored: dict[str, StoredTensor]
    used: set[str]

    def has(self, part: str) -> bool:
        return f"{self.prefix}{part}" in self.stored

    def take(self, part: str, *types: str, rank: int | None = None) -> StoredTensor:
        """A required part, of one of these safetensors types."""
        tensor = self.stored.get(f"{self.prefix}{part}")
        if tensor is None:
            raise BuildError(
                f"{self.folder}: the weights lack {self.prefix + part!r}, a part of a quantized matrix; fetch the "
                "checkpoint again"
            )
        if tensor.dtype not in types or (rank is not None and len(tensor.shape) != rank) or 0 in tensor.shape:
            raise BuildError(
                f"{self.folder}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}; expected "
                f"{' or '.join(types)}{f' with {rank} dimensions' if rank is not None else ''}"
            )
        self.used.add(tensor.name)
        return tensor

    def require_shape(self, holds: bool, tensor: StoredTensor, expected: object) -> None:
        if not holds:
            raise BuildError(
                f"{self.folder}: tensor {tensor.name!r} has shape {list(tensor.shape)}; expected {expected}, as the "
                "other parts of its matrix have"
            )

    def optional(self, part: str, shape: tuple[int, ...], *types: str) -> StoredTensor | None:
        if not self.has(part):
            return None
        tensor = self.take(part, *types)
        self.require_shape(tensor.shape == shape, tensor, list(shape))
        return tensor

    def matrix(
        self, shape: tuple[int, ...], kind: Kind, read: Callable[[], _Read], *, transposed: bool = True
    ) -> QuantizedTensor:
        """The matrix of numbers, scales and zero points.

        Args:
            shape: the matrix's shape in the model.
            kind: the smallest type that holds its numbers.
            read: reads the parts; see :data:`_Read`.
            transposed: whether the model holds the matrix as ``[...,N,K]``.
        """

        def read_matrix() -> torch.Tensor:
            blocks, groups = read()
            if groups is not None:
                zero = None if blocks.zero is None else blocks.zero[groups]
                blocks = Blocks(blocks.integers, blocks.scale[groups], zero)
            restored = blocks.restored(-2)
            return torch.from_numpy(np.ascontiguousarray(restored.swapaxes(-1, -2) if transposed else restored))

        def read_scales() -> Scales | None:
            blocks, groups = read()
            rows, count = blocks.integers.shape[-2], blocks.scale.shape[-2]
            if groups is not None and (rows % count or (groups != np.arange(rows) // (rows // count)).any()):
                return None
            zero = blocks.zero if blocks.zero is not None and blocks.zero.any() else None
            return Scales(kind, rows // count, Factors(blocks.scale), zero)

        return QuantizedTensor(self.name, shape, "F32", read_matrix, scales=read_scales)


_Read = tuple[Blocks, npt.NDArray[np.int64] | None]
"""Numbers ``[...,K,N]`` with scales and zero points ``[...,G,N]``, and each row's group if they are not contiguous."""


def _awq(parts: _Parts) -> QuantizedTensor:
    """AWQ's GEMM layout: words of eight interleaved columns (AutoAWQ)."""
    words, zeros = parts.take("qweight", "I32", rank=2), parts.take("qzeros", "I32", rank=2)
    scales = parts.take("scales", *_SCALES, rank=2)
    (rows, wide), groups = words.shape, scales.shape[0]
    columns = 8 * wide
    parts.require_shape(
        scales.shape[1] == columns and rows % groups == 0, scales, f"[groups of {rows} rows, {columns}]"
    )
    parts.require_shape(zeros.shape == (groups, wide), zeros, [groups, wide])
    order = np.argsort(_AWQ_COLUMNS)

    def signed(tensor: StoredTensor) -> npt.NDArray[np.int8]:
        words_of_eight = _unpack(tensor, 4, 1).reshape(tensor.shape[0], wide, 8)
        return words_of_eight[:, :, order].reshape(tensor.shape[0], columns)

    return parts.matrix(
        (columns, rows), "int4", lambda: (Blocks(signed(words), _finite(parts, scales), signed(zeros)), None)
    )


def _gptq(parts: _Parts, config: _Config) -> QuantizedTensor:
    """GPTQ: words of neighbouring rows; zero points minus one in the first version of the format (AutoGPTQ)."""
    words, zeros = parts.take("qweight", "I32", rank=2), parts.take("qzeros", "I32", rank=2)
    scales = parts.take("scales", *_SCALES, rank=2)
    # The zero points' shape tells which of the bits a matrix has.
    bits = min(config.all_bits, key=lambda bits: abs(zeros.shape[1] * 32 - words.shape[1] * bits))
    per_word = 32 // bits
    rows, columns, groups = per_word * words.shape[0], words.shape[1], scales.shape[0]
    index = parts.optional("g_idx", (rows,), *_INDICES)
    fits = groups <= rows if index is not None else rows % groups == 0
    parts.require_shape(scales.shape[1] == columns and fits, scales, f"[groups of {rows} rows, {columns}]")
    parts.require_shape(zeros.shape == (groups, -(-columns // per_word)), zeros, [groups, -(-columns // per_word)])
    stored_offset, half = int(config.checkpoint_format != "gptq_v2"), 1 << (bits - 1)

    def read() -> _Read:
        signed = _unpack(zeros, bits, 1)[:, :columns]
        # A symmetric matrix has zero points of half the range, so it tells the version itself; some files do not.
        offset = 0 if config.sym and not signed.any() else stored_offset
        unsigned = signed.astype(np.int16) + half + offset
        zero = ((unsigned & (2 * half - 1)) - half).astype(np.int8)
        return Blocks(_unpack(words, bits, 0), _finite(parts, scales), zero), _groups(parts, index, groups)

    return parts.matrix((columns, rows), "int8" if bits == 8 else "int4", read)


def _packed(parts: _Parts) -> QuantizedTensor:
    """compressed-tensors' ``pack-quantized``: words of neighbouring inputs, offset by half their range."""
    words, shape = parts.take("weight_packed", "I32", rank=2), parts.take("weight_shape", *_INDICES, rank=1)
    scales = parts.take("weight_scale", *_SCALES, rank=2)
    parts.require_shape(shape.shape == (2,), shape, [2])
    columns, rows = map(int, shape.read().tolist())
    bits = next((bits for bits in (4, 8) if words.shape == (columns, -(-rows * bits // 32))), None)
    if bits is None:
        raise BuildError(
            f"{parts.folder}: tensor {shape.name!r} says {[columns, rows]}, and {words.name!r} has shape "
            f"{list(words.shape)}; expected one row for each output, of 4 or 8 bits for each input"
        )
    groups, high = scales.shape[1], -(-columns * bits // 32)
    zeros = parts.optional("weight_zero_point", (high, groups), "I32")
    index = parts.optional("weight_g_idx", (rows,), *_INDICES)
    fits = groups <= rows if index is not None else rows % groups == 0
    parts.require_shape(scales.shape[0] == columns and fits, scales, f"[{columns}, groups of {rows} inputs]")

    def read() -> _Read:
        zero = None if zeros is None else _unpack(zeros, bits, 0)[:columns].T
        numbers = _unpack(words, bits, 1)[:, :rows].T
        return Blocks(numbers, _finite(parts, scales).T, zero), _groups(parts, index, groups)

    return parts.matrix((columns, rows), "int4" if bits == 4 else "int8", read)


def _scaled(parts: _Parts, blocks: set[tuple[int, int]]) -> QuantizedTensor:
    """8-bit numbers with a scale for the matrix, each output, each group of inputs, or each block."""
    weight = parts.take("weight", "F8_E4M3", "I8", rank=2)
    scales = parts.take("weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale", *_SCALES)
    columns, rows = weight.shape
    tall, wide = (*scales.shape, 1, 1)[:2]
    parts.require_shape(len(scales.shape) <= 2 and tall <= columns and wide <= rows, scales, "one or two dimensions")
    # The last block may be smaller, so the shapes alone do not determine the block size.
    declared = [(min(high, columns), min(long, rows)) for high, long in sorted(blocks)]
    one_scale, grouped = (tall, wide) == (1, 1), tall == columns and rows % wide == 0
    even = [(columns // tall, rows // wide)] if one_scale or grouped else []
    fitting = [size for size in (*declared, *even) if (tall, wide) == (-(-columns // size[0]), -(-rows // size[1]))]
    parts.require_shape(bool(fitting), scales, f"one a block of {declared or 'equal groups of inputs'}")
    high, long = fitting[0]
    zeros = parts.optional("weight_zero_point", scales.shape, "I8")
    kind: Kind = "fp8" if weight.dtype == "F8_E4M3" else "int8"

    def by_column(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.repeat(array.reshape(tall, wide), high, axis=0)[:columns].T

    def read() -> _Read:
        numbers = weight.finite(parts.folder).numpy() if kind == "fp8" else weight.read().numpy()
        zero = None if zeros is None else by_column(zeros.read().numpy())
        groups = np.arange(rows) // long if rows % long else None
        return Blocks(numbers.T, by_column(_finite(parts, scales)), zero), groups

    return parts.matrix((columns, rows), kind, read)


def _mxfp4(parts: _Parts) -> QuantizedTensor:
    """gpt-oss's MXFP4 experts: 32 inputs share a power of two (OCP Microscaling Formats, version 1.0)."""
    blocks, scales = parts.take("blocks", "U8", rank=4), parts.take("scales", "U8", rank=3)
    experts, columns, groups, block_bytes = blocks.shape
    parts.require_shape(block_bytes == 16, blocks, "blocks of 16 bytes")
    parts.require_shape(scales.shape == (experts, columns, groups), scales, [experts, columns, groups])

    def read() -> _Read:
        packed, exponents = blocks.read().numpy(), scales.read().numpy()
        if exponents.max() == 0xFF:
            raise BuildError(f"{parts.folder}: tensor {scales.name!r} holds 255, which is not a number in E8M0")
        four = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(experts, columns, groups * 32)
        doubled = np.array([*_DOUBLED_E2M1, *(-value for value in _DOUBLED_E2M1)], np.int8)[four]
        scale = np.exp2(exponents.astype(np.float32) - np.float32(128))  # halved, as the numbers are doubled
        return Blocks(doubled.swapaxes(1, 2), scale.swapaxes(1, 2)), None

    return parts.matrix((experts, groups * 32, columns), "int8", read, transposed=False)


def _finite(parts: _Parts, scales: StoredTensor) -> npt.NDArray[np.float32]:
    return scales.finite(parts.folder).numpy()


def _groups(parts: _Parts, index: StoredTensor | None, groups: int) -> npt.NDArray[np.int64] | None:
    if index is None:
        return None
    order = index.read().numpy().astype(np.int64)
    if order.min() < 0 or order.max() >= groups:
        wrong = int(order.min() if order.min() < 0 else order.max())
        raise BuildError(f"{parts.folder}: tensor {index.name!r} holds {wrong}; expected 0 to {groups - 1}")
    return order


def _unpack(words: StoredTensor, bits: int, axis: int) -> npt.NDArray[np.int8]:
    """Unpacks the integers of words ``[R,C]`` along ``axis``, lowest bits first, minus half their range."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    stored = np.expand_dims(words.read().numpy().view(np.uint32), axis + 1)
    parts = (stored >> np.expand_dims(shifts, 1 - axis)) & np.uint32((1 << bits) - 1)
    shape = list(words.shape)
    shape[axis] *= len(shifts)
    return (parts.astype(np.int16) - (1 << (bits - 1))).astype(np.int8).reshape(shape)
