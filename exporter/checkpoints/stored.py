"""Tensors of checkpoints, which may be quantized, and loaded models whose large matrices stay in the files.

Such a matrix is read when it is needed, and then released. In the meantime the model holds a stand-in of the same
shape, which takes no memory and consists of NaN, so that accidental use shows in the results.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.documents import CONFIG, SINGLE
from specexport.exporter.checkpoints.quiet import failing_as, first_line

Kind = Literal["int4", "int8", "fp8"]
"""Types of quantized matrices."""
LARGE = 1 << 18
"""Minimum number of elements of a tensor that stays in its file."""
_MIN_SIDE = 16
"""Minimum number of rows, and of columns, of such a tensor."""
_STORED, _FORM = "stored_tensor", "stored_form"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        dtype: safetensors' name of its type.
        form: identifies how it is stored; matrices of different forms cannot be joined without rounding again.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]
    form: str = ""

    @property
    def floating(self) -> bool:
        return "F" in self.dtype

    def finite(self, path: Path) -> torch.Tensor:
        """Reads the tensor in fp32."""
        tensor = self.read().to(torch.float32)
        if not bool(tensor.isfinite().all()):
            raise BuildError(f"{path}: tensor {self.name!r} holds numbers that are not finite; train it again")
        return tensor


ArrayChange = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def transposed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array whose last two axes are exchanged."""
    return np.ascontiguousarray(array.swapaxes(-1, -2))


@dataclass(frozen=True)
class Factors:
    """Numbers ``[...,G,N]``, stored as products of small integers and shared factors.

    Attributes:
        coarse: fp16 or fp32 ``[...,S,N]``, each shared by ``G/S`` neighbours.
        fine: int8 ``[...,G,N]``; None if all are 1.
    """

    coarse: npt.NDArray[np.floating[Any]]
    fine: npt.NDArray[np.int8] | None = None

    def values(self) -> npt.NDArray[np.float32]:
        """The products, exact in fp32."""
        values = self.coarse.astype(np.float32)
        if self.fine is not None:
            values = np.repeat(values, self.fine.shape[-2] // values.shape[-2], axis=-2) * self.fine
        return values

    def each(self, change: ArrayChange) -> Factors:
        """Both arrays, changed."""
        return Factors(change(self.coarse), None if self.fine is None else change(self.fine))


@dataclass(frozen=True)
class Scales:
    """The quantization of a matrix ``[...,K,N]`` of a graph: ``scale * (integer - zero) + offset``.

    Attributes:
        kind: the smallest type that holds its integers, signed unless there are offsets; fp8 is float8_e4m3fn.
        group: number of neighbouring rows that share scales; K for one scale per column.
        scale: ``[...,K/group,N]``.
        zero: int8 like ``scale``; None if all are 0.
        offset: like ``scale``; None if all are 0.
    """

    kind: Kind
    group: int
    scale: Factors
    zero: npt.NDArray[np.int8] | None = None
    offset: Factors | None = None

    @property
    def plain(self) -> bool:
        """Whether there are no zero points, offsets or second level of scales, so that every backend reads them."""
        return self.zero is None and self.offset is None and self.scale.fine is None

    def values(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int8] | None, npt.NDArray[np.float32] | None]:
        """Scales, zero points and offsets, computed from their factors."""
        return self.scale.values(), self.zero, None if self.offset is None else self.offset.values()

    def each(self, change: ArrayChange) -> Scales:
        """All arrays, changed; such as those of one matrix of a stack, or of the transposed matrix."""
        zero = None if self.zero is None else change(self.zero)
        offset = None if self.offset is None else self.offset.each(change)
        return replace(self, scale=self.scale.each(change), zero=zero, offset=offset)


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks that share a scale: ``scale * (integers - zero)``, or ``scale * integers``.

    Attributes:
        integers: int8, shaped like the matrix, -8..7 for int4; for fp8, numbers of that type.
        scale: float32, shaped like the matrix with its axis divided by the block.
        zero: int8 like ``scale``, or None.
    """

    integers: npt.NDArray[Any]
    scale: npt.NDArray[np.float32]
    zero: npt.NDArray[np.int8] | None = None

    def restored(self, axis: int) -> npt.NDArray[np.float32]:
        block = self.integers.shape[axis] // self.scale.shape[axis]
        numbers = self.integers.astype(np.float32)
        if self.zero is not None:
            numbers -= np.repeat(self.zero, block, axis=axis)
        numbers *= np.repeat(self.scale, block, axis=axis)
        return numbers


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor(StoredTensor):
    """A quantized matrix, with its name and shape in the model.

    Attributes:
        scales: reads its scales; returns None if rows that share a scale are not neighbours.
        kind: the smallest type that holds its integers, as far as known without reading it.
    """

    scales: Callable[[], Scales | None]
    kind: Kind = "int8"


def stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, from its header."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            headers = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise BuildError(f"{path}: not a safetensors file: {error}") from error
    return [StoredTensor(name, *described, partial(_read, path, name)) for name, described in headers.items()]


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def head_tensors(folder: Path) -> list[StoredTensor]:
    """The tensors of heads or of a draft: from a folder's safetensors, or else from ``pytorch_model.bin``."""
    if files := sorted(folder.glob("*.safetensors")):
        return [tensor for file in files for tensor in stored_tensors(file)]
    return pickled_tensors(folder / "pytorch_model.bin")


def require_tensors(
    path: Path,
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    described: str,
    optional: AbstractSet[str] = frozenset(),
    spelled: Callable[[str], str] = repr,
    integers: AbstractSet[str] = frozenset(),
) -> None:
    """Checks that a checkpoint has weights of these shapes and no others, by the headers of its files.

    Args:
        shapes: the expected shapes, by the same names.
        described: the checkpoint as its configuration describes it, for errors.
        spelled: returns the names of a missing tensor in files, for errors.
        integers: the tensors that are no weights.
    """
    for name, tensor in stored.items():
        if name not in shapes:
            raise BuildError(f"{path}: tensor {tensor.name!r} is not part of {described}")
        if tensor.shape != shapes[name]:
            raise BuildError(
                f"{path}: tensor {tensor.name!r} is {list(tensor.shape)}, expected {list(shapes[name])} in {described}"
            )
        if not tensor.floating and name not in integers:
            raise BuildError(
                f"{path}: tensor {tensor.name!r} holds no floating-point numbers; expected weights, or a "
                "quantization_config in config.json"
            )
    for name in sorted(shapes.keys() - stored.keys() - optional):
        raise BuildError(f"{path}: no tensor {spelled(name)}; expected it in {described}")


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's tensors by name; the meta device is enough."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def save_head_tensors(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], file: str = SINGLE
) -> None:
    """Writes the checkpoint of heads or of a draft: a ``config.json`` and a safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    share_weights(folder)


def share_weights(folder: Path) -> None:
    """Gives a checkpoint's weights the permissions of its ``config.json``; safetensors' are for the owner alone."""
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / CONFIG).stat().st_mode)


def pickled_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a file pickled by torch, memory-mapped so that unused tensors are not read. No code in it runs."""
    with failing_as(
        lambda error: (
            f"{path}: refused: only plain tensors are read from a {path.suffix}, as anything else could run code "
            f"({first_line(error)}). Convert it to safetensors where you trust it: "
            "safetensors.torch.save_file(torch.load(...), 'model.safetensors')"
        )
    ):
        mapped = zipfile.is_zipfile(path)  # files of old versions of torch cannot be mapped
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise BuildError(f"{path}: holds {type(loaded).__name__}; expected a dictionary of tensors by name")
    return [
        StoredTensor(name, tuple(tensor.shape), "F32" if tensor.is_floating_point() else "I64", tensor.detach)
        for name, tensor in loaded.items()
    ]


class StandIns:
    """Creates stand-ins for the tensors of a checkpoint, and marks them in the loaded model.

    Args:
        meta: the model on torch's meta device. Only tensors that it has by name and shape get stand-ins; those that
            transformers composes from several stored ones must be read.
    """

    def __init__(self, meta: Any) -> None:
        parameters = meta.named_parameters(remove_duplicate=False)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self._prefix = f"{meta.base_model_prefix}."
        self._stored: dict[int, StoredTensor] = {}

    def tensor_to_load(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor itself, or a stand-in if it is large."""
        shapes = {self._shapes.get(name) for name in (tensor.name, f"{self._prefix}{tensor.name}")}
        # Narrow matrices belong to convolutions, whose weights the surrounding module reads.
        matrix = len(tensor.shape) > 1 and min(tensor.shape[-2:]) >= _MIN_SIDE
        if not matrix or torch.Size(tensor.shape).numel() < LARGE or not tensor.floating or tensor.shape not in shapes:
            return tensor.read()
        stand_in = torch.full((), torch.nan).expand(tensor.shape)
        self._stored[stand_in.data_ptr()] = tensor
        return stand_in

    def mark(self, model: torch.nn.Module, tensors: Mapping[str, StoredTensor]) -> None:
        """Attaches its stored tensor to each stand-in, and the stored tensor's form to every parameter."""
        for name, parameter in model.named_parameters():
            if not any(parameter.stride()) and parameter.data_ptr() in self._stored:
                attach_stored(parameter, self._stored[parameter.data_ptr()])
            tensor = tensors.get(name) or tensors.get(name.removeprefix(self._prefix))
            if tensor is not None and tensor.form:
                setattr(parameter, _FORM, tensor.form)


def attach_stored(parameter: torch.Tensor, tensor: StoredTensor) -> None:
    """Attaches the stored tensor, and its form, to a stand-in."""
    setattr(parameter, _STORED, tensor)
    if tensor.form:
        setattr(parameter, _FORM, tensor.form)


def stored_tensor(parameter: torch.Tensor) -> StoredTensor | None:
    """The stored tensor of a stand-in; None for an ordinary parameter."""
    return getattr(parameter, _STORED, None)


def read_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's numbers; a stand-in's are read from its file, in their stored type."""
    stored = stored_tensor(parameter)
    return parameter.detach() if stored is None else stored.read()


def form_of(parameter: torch.Tensor) -> str:
    """The form of a parameter's stored tensor (see :class:`StoredTensor`); empty if it does not matter."""
    return str(getattr(parameter, _FORM, ""))


@contextlib.contextmanager
def read_weights(model: torch.nn.Module) -> Iterator[None]:
    """Context in which each module has its weights while it runs, instead of stand-ins."""
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            stand_ins = {
                name: parameter
                for name, parameter in module._parameters.items()
                if parameter is not None and stored_tensor(parameter)
            }
            if stand_ins:
                release = partial(_release_weights, stand_ins)
                hooks.enter_context(module.register_forward_pre_hook(partial(_read_weights, stand_ins)))
                hooks.enter_context(module.register_forward_hook(release, always_call=True))
        yield


def _read_weights(stand_ins: dict[str, Any], module: torch.nn.Module, _args: Any) -> None:
    for name, stand_in in stand_ins.items():
        numbers = getattr(stand_in, _STORED).read().to(stand_in.dtype)
        module._parameters[name] = torch.nn.Parameter(numbers, requires_grad=False)


def _release_weights(stand_ins: dict[str, Any], module: torch.nn.Module, *_: Any) -> None:
    module._parameters.update(stand_ins)
