"""Reads the tensors of a GGUF file on demand, with transformers' names and shapes.

A block of a GGUF type is ``scale * integer + offset``, as in ggml. Its scale and offset are fp16 numbers, or small
integers times the fp16 number of a super-block of 256.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.gguf.header import Header, TensorPlace
from specexport.exporter.checkpoints.stored import Factors, Kind, QuantizedTensor, Scales, StoredTensor, transposed

_Bytes = npt.NDArray[np.uint8]
_FLOATS = {GGMLQuantizationType.F32: "F32", GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that llama.cpp computes from the configuration; not needed here."""


@dataclass(frozen=True)
class BlockType:
    """A type whose integers and scales a bundle stores unchanged.

    Attributes:
        kind: our smallest type that holds its integers.
        group: number of neighbours in a row that share a scale.
        scales: the representation of scales and offsets.
        parts: extracts the scales, and the offsets if any, from blocks ``[N,blocks,bytes]``.
    """

    kind: Kind
    group: int
    scales: Literal["half", "half, offset", "two levels", "two levels, offset"]
    parts: Callable[[_Bytes], _Parts]

    @property
    def form(self) -> str:
        """Identifies the representation of matrices."""
        return f"{self.kind}, {self.group}, {self.scales}"


_Parts = tuple[Factors, Factors | None]


def _half(blocks: _Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _flat(fine: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Concatenates the integers of all super-blocks in a row, as int8."""
    return fine.reshape(len(fine), -1).astype(np.int8)


def _scale(blocks: _Bytes) -> _Parts:
    """Blocks that begin with an fp16 scale."""
    return Factors(_half(blocks, 0)), None


def _scale_and_offset(blocks: _Bytes) -> _Parts:
    """Blocks that begin with an fp16 scale and an fp16 offset."""
    return Factors(_half(blocks, 0)), Factors(_half(blocks, 2))


def _six_bits(blocks: _Bytes) -> _Parts:
    """Q4_K, Q5_K: twelve bytes hold eight scales and eight minima, to be subtracted, of six bits each."""
    packed = blocks[..., 4:16]
    first, second, low_bits = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (low_bits & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (low_bits >> 4) | (second >> 6 << 4)], axis=-1)
    return Factors(_half(blocks, 0), _flat(scales)), Factors(-_half(blocks, 2), _flat(minima))


def _q2_k(blocks: _Bytes) -> _Parts:
    packed = blocks[..., :16]
    return Factors(_half(blocks, 80), _flat(packed & 15)), Factors(-_half(blocks, 82), _flat(packed >> 4))


def _q3_k(blocks: _Bytes) -> _Parts:
    packed = blocks[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high = np.concatenate([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return Factors(_half(blocks, 108), _flat((low | high << 4).astype(np.int16) - 32)), None


def _q6_k(blocks: _Bytes) -> _Parts:
    return Factors(_half(blocks, 208), _flat(blocks[..., 192:208].view(np.int8))), None


def _iq4_xs(blocks: _Bytes) -> _Parts:
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*high.shape)
    return Factors(_half(blocks, 0), _flat((low | high << 4).astype(np.int16) - 32)), None


_Type = GGMLQuantizationType
KEPT: dict[GGMLQuantizationType, BlockType] = {
    _Type.Q4_0: BlockType("int4", 32, "half", _scale),
    _Type.Q4_1: BlockType("int4", 32, "half, offset", _scale_and_offset),
    _Type.Q5_0: BlockType("int8", 32, "half", _scale),
    _Type.Q5_1: BlockType("int8", 32, "half, offset", _scale_and_offset),
    _Type.Q8_0: BlockType("int8", 32, "half", _scale),
    _Type.Q2_K: BlockType("int4", 16, "two levels, offset", _q2_k),
    _Type.Q3_K: BlockType("int4", 16, "two levels", _q3_k),
    _Type.Q4_K: BlockType("int4", 32, "two levels, offset", _six_bits),
    _Type.Q5_K: BlockType("int8", 32, "two levels, offset", _six_bits),
    _Type.Q6_K: BlockType("int8", 16, "two levels", _q6_k),
    _Type.IQ4_NL: BlockType("int8", 32, "half", _scale),  # its sixteen values are integers from -127 to 113
    _Type.IQ4_XS: BlockType("int8", 32, "two levels", _iq4_xs),
}
"""The types whose integers and scales are stored unchanged."""


def scales_of(data: _Bytes, kind: GGMLQuantizationType) -> Scales:
    """The scales and offsets of a matrix of a type in :data:`KEPT`, from its rows ``[N,bytes]``."""
    block = KEPT[kind]
    scale, offset = block.parts(data.reshape(len(data), -1, GGML_QUANT_SIZES[kind][1]))
    return Scales(block.kind, block.group, scale, None, offset).each(transposed)


def format_of(header: Header) -> str:
    """The format's name, with a file's types by their share of its bytes: ``GGUF (Q4_K, Q6_K)``."""
    sizes: dict[str, int] = {}
    for place in header.tensors.values():
        if len(place.shape) > 1:
            sizes[place.kind.name] = sizes.get(place.kind.name, 0) + place.data.nbytes
    return f"GGUF ({', '.join(sorted(sizes, key=lambda name: -sizes[name]))})"


def tensors_of(header: Header, meta: Any) -> Iterator[StoredTensor]:
    """The tensors of a model; ``meta`` is transformers' model on the meta device."""
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=meta.config.to_dict())
    try:
        # transformers requests gguf's map for each module: 16 ms each time with 62 layers.
        with mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):
            names: Mapping[str, str] = get_gguf_hf_weights_map(meta, processor)
    except NotImplementedError as error:
        raise BuildError(f"{header.path}: general.architecture: {str(error).partition('.')[0]}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in meta.state_dict().items()}
    sources: dict[str, list[TensorPlace]] = {}
    for place in header.tensors.values():
        if names.get(place.name) in shapes:
            sources.setdefault(names[place.name], []).append(place)
        elif place.name not in _IGNORED:
            raise BuildError(
                f"{header.path}: tensor {place.name!r} is not part of transformers' {meta.config.model_type}; "
                "expected only the tensors of a language model of that family"
            )
    for name, places in sources.items():
        shape = shapes[name]
        if sum(math.prod(place.shape) for place in places) != math.prod(shape):
            listed = ", ".join(f"{place.name!r} {list(place.shape)}" for place in places)
            raise BuildError(
                f"{header.path}: tensor {listed} does not fit {list(shape)}, which the metadata asks for; fetch the "
                "file again"
            )
        read = functools.partial(_read, header, processor, names, name, places, shape)
        order = _order(processor, places[0]) if len(places) == 1 and len(shape) == 2 else None
        kind = places[0].kind
        if kind in _FLOATS:
            yield StoredTensor(name, shape, _FLOATS[kind], read, _FLOATS[kind])
        elif kind in KEPT and order is not None and shape == places[0].shape:
            scales = functools.partial(_scales, places[0], order)
            yield QuantizedTensor(name, shape, "F32", read, KEPT[kind].form, scales=scales, kind=KEPT[kind].kind)
        else:
            yield QuantizedTensor(name, shape, "F32", read, kind.name, scales=lambda: None)


def _order(processor: Any, place: TensorPlace) -> npt.NDArray[np.int64] | None:
    """The file's row for each row of the model's matrix; None if the mapping does more than permute rows."""
    rows = place.shape[0]
    numbers = np.repeat(np.arange(rows, dtype=np.float64)[:, None], 2, axis=1)
    moved = processor.process(weights=numbers, name=place.name, tensor_key_mapping=None, parsed_parameters={}).weights
    if moved.shape != numbers.shape or not np.array_equal(moved[:, 0], moved[:, 1]):
        return None
    order = moved[:, 0].astype(np.int64)
    return order if np.array_equal(np.sort(order), np.arange(rows)) else None


def _read(
    header: Header,
    processor: Any,
    names: Mapping[str, str],
    name: str,
    places: list[TensorPlace],
    shape: tuple[int, ...],
) -> torch.Tensor:
    parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
    for place in places:
        numbers = _numbers(header, place)
        done = processor.process(weights=numbers, name=place.name, tensor_key_mapping=names, parsed_parameters=parsed)
        if done.name is not None:
            parsed["tensors"][name] = torch.from_numpy(np.ascontiguousarray(done.weights, dtype=np.float32))
    tensor = parsed["tensors"].get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        actual = "nothing" if tensor is None else list(tensor.shape)
        raise BuildError(
            f"{header.path}: tensor {places[0].name!r} became {actual}; expected {list(shape)} for {name!r}"
        )
    return tensor


def _numbers(header: Header, place: TensorPlace) -> npt.NDArray[np.float32]:
    try:
        numbers = gguf.dequantize(place.data, place.kind)
    except NotImplementedError as error:
        raise BuildError(
            f"{header.path}: tensor {place.name!r} is {place.kind.name}, which the gguf library cannot restore; "
            "expected another quantization of the model"
        ) from error
    if not np.isfinite(numbers).all():
        raise BuildError(
            f"{header.path}: tensor {place.name!r} holds numbers that are not finite; fetch the file again"
        )
    return np.asarray(numbers, dtype=np.float32).reshape(place.shape)


def _scales(place: TensorPlace, order: npt.NDArray[np.int64]) -> Scales:
    return scales_of(place.data[order], place.kind)
