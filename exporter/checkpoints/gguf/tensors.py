"""The tensors of a GGUF file with transformers' names and shapes, read on demand."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.gguf.blocks import KEPT, scales_of
from specexport.exporter.checkpoints.gguf.header import Header, TensorPlace
from specexport.exporter.checkpoints.quantized import QuantizedTensor, Scales
from specexport.exporter.checkpoints.stored import StoredTensor

_FLOATS = {GGMLQuantizationType.F32: "F32", GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}
_UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that llama.cpp computes from the configuration and stores; they are not needed."""


def format_of(header: Header) -> str:
    """The format's name with the types of most of a file's bytes: ``GGUF (Q4_K, Q6_K)``."""
    sizes: dict[str, int] = {}
    for place in header.tensors.values():
        if len(place.shape) > 1:
            sizes[place.kind.name] = sizes.get(place.kind.name, 0) + place.data.nbytes
    return f"GGUF ({', '.join(sorted(sizes, key=lambda name: -sizes[name]))})"


def tensors_of(header: Header, outline: Any) -> Iterator[StoredTensor]:
    """The tensors of a model.

    Args:
        header: the file's header.
        outline: transformers' model without weights.

    Raises:
        BuildError: the file has a tensor that the model does not have, or has with another size.
    """
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=outline.config.to_dict())
    try:
        names: Mapping[str, str] = get_gguf_hf_weights_map(outline, processor)
    except NotImplementedError as error:
        raise BuildError(f"{header.path}: general.architecture: {str(error).partition('.')[0]}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in outline.state_dict().items()}
    sources: dict[str, list[TensorPlace]] = {}
    for place in header.tensors.values():
        if names.get(place.name) in shapes:
            sources.setdefault(names[place.name], []).append(place)
        elif place.name not in _UNREAD:
            raise BuildError(
                f"{header.path}: tensor {place.name!r} has no place in transformers' {outline.config.model_type}; "
                "expected the tensors of a language model of that family alone"
            )
    for name, places in sources.items():
        shape = shapes[name]
        if sum(math.prod(place.shape) for place in places) != math.prod(shape):
            listed = ", ".join(f"{place.name!r} {list(place.shape)}" for place in places)
            raise BuildError(
                f"{header.path}: tensor {listed} fits no {list(shape)}, which the metadata asks for; fetch the file "
                "again"
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
            yield QuantizedTensor(name, shape, "F32", read, kind.name, scales=_none)


def _none() -> None:
    return None


def _order(processor: Any, place: TensorPlace) -> npt.NDArray[np.int64] | None:
    """The file's row for each row of the model's matrix; None if the mapping does more than permute rows."""
    rows = place.shape[0]
    numbers = np.repeat(np.arange(rows, dtype=np.float64)[:, None], 2, axis=1)
    moved = processor.process(weights=numbers, name=place.name, tensor_key_mapping=None, parsed_parameters={}).weights
    if moved.shape != numbers.shape or not np.array_equal(moved[:, 0], moved[:, 1]):
        return None
    order: npt.NDArray[np.int64] = moved[:, 0].astype(np.int64)
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
        numbers: npt.NDArray[np.float32] = gguf.dequantize(place.data, place.kind)
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
