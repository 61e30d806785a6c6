"""Large matrices of a model that stay in the checkpoint's files: each is read when needed, and then released.

The model holds a stand-in of the same shape instead, which takes no memory and consists of NaN, so that accidental use
shows in the results.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from specexport.exporter.checkpoints.stored import StoredTensor

LARGE = 1 << 18
"""Minimum number of elements of a tensor that stays in its file."""
NARROW = 16
"""Minimum number of rows and columns of such a matrix."""
_STORED, _FORM = "stored_tensor", "stored_form"


class StandIns:
    """Creates stand-ins for the tensors of a checkpoint, and finds them in the loaded model.

    Args:
        outline: the model without weights. Only tensors that it has by name and shape get stand-ins: those that
            transformers composes from several stored ones have to be read.
    """

    def __init__(self, outline: Any) -> None:
        parameters = outline.named_parameters(remove_duplicate=False)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self._prefix = f"{outline.base_model_prefix}."
        self._stored: dict[int, StoredTensor] = {}

    def held(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor to load: a stand-in for a large one."""
        known = {self._shapes.get(name) for name in (tensor.name, f"{self._prefix}{tensor.name}")}
        # Narrow ones belong to convolutions, whose weights are read by the module around them.
        matrix = len(tensor.shape) > 1 and min(tensor.shape[-2:]) >= NARROW
        if not matrix or torch.Size(tensor.shape).numel() < LARGE or not tensor.floating or tensor.shape not in known:
            return tensor.read()
        stand_in = torch.full((), torch.nan).expand(tensor.shape)
        self._stored[stand_in.data_ptr()] = tensor
        return stand_in

    def find(self, model: torch.nn.Module, tensors: Mapping[str, StoredTensor]) -> None:
        """Records on each stand-in its stored tensor, and on other parameters the form of the stored tensor."""
        for name, parameter in model.named_parameters():
            if not any(parameter.stride()) and parameter.data_ptr() in self._stored:
                stand_for(parameter, self._stored[parameter.data_ptr()])
            tensor = tensors.get(name) or tensors.get(name.removeprefix(self._prefix))
            if tensor is not None and tensor.form:
                setattr(parameter, _FORM, tensor.form)


def stand_for(parameter: torch.Tensor, tensor: StoredTensor) -> None:
    """Records the stored tensor of a stand-in."""
    setattr(parameter, _STORED, tensor)


def stored(parameter: torch.Tensor) -> StoredTensor | None:
    """The stored tensor of a stand-in; None for an ordinary parameter."""
    tensor: StoredTensor | None = getattr(parameter, _STORED, None)
    return tensor


def form_of(parameter: torch.Tensor) -> str:
    """The form of a parameter's stored tensor, see :class:`StoredTensor`; empty if it does not matter."""
    return str(getattr(parameter, _FORM, ""))


@contextlib.contextmanager
def read_weights(model: torch.nn.Module) -> Iterator[None]:
    """Context in which running modules have their weights instead of stand-ins."""
    handles = []
    for module in model.modules():
        held = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and stored(parameter)
        }
        if held:
            handles.append(module.register_forward_pre_hook(functools.partial(_read, held)))
            handles.append(module.register_forward_hook(functools.partial(_let_go, held), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _read(held: dict[str, Any], module: torch.nn.Module, _given: Any) -> None:
    for name, stand_in in held.items():
        numbers = getattr(stand_in, _STORED).read().to(stand_in.dtype)
        module._parameters[name] = torch.nn.Parameter(numbers, requires_grad=False)


def _let_go(held: dict[str, Any], module: torch.nn.Module, *_: Any) -> None:
    module._parameters.update(held)
