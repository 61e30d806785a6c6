"""Large matrices of a model that stay in the checkpoint's files: each is read when it is needed, and let go.

In its place the model holds a stand-in of the same shape that takes no memory and is no number (NaN), so that what
reads one unnoticed cannot pass for a result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from specexport.exporter.checkpoints.stored import StoredTensor

LARGE = 1 << 18
"""Numbers of a tensor that stays in its file, at least."""
NARROW = 16
"""And rows and columns of its matrices."""
_STORED, _FORM = "stored_tensor", "stored_form"


class StandIns:
    """Makes stand-ins for what a model has of its checkpoint, and finds them in it once it is loaded.

    Args:
        outline: the model without weights. Only tensors that it has by name and shape get stand-ins: what transformers
            makes of several others has to be read.
    """

    def __init__(self, outline: Any) -> None:
        parameters = outline.named_parameters(remove_duplicate=False)
        self._shapes = {name: tuple(one.shape) for name, one in parameters}
        self._prefix = f"{outline.base_model_prefix}."
        self._stored: dict[int, StoredTensor] = {}

    def held(self, tensor: StoredTensor) -> torch.Tensor:
        """What to load instead of a tensor: a stand-in for a large one."""
        known = {self._shapes.get(name) for name in (tensor.name, f"{self._prefix}{tensor.name}")}
        # What is narrow is a convolution's, whose weights are read by the module around it.
        matrix = len(tensor.shape) > 1 and min(tensor.shape[-2:]) >= NARROW
        if not matrix or torch.Size(tensor.shape).numel() < LARGE or not tensor.floating or tensor.shape not in known:
            return tensor.read()
        stand_in = torch.full((), torch.nan).expand(tensor.shape)
        self._stored[stand_in.data_ptr()] = tensor
        return stand_in

    def find(self, model: torch.nn.Module, tensors: Mapping[str, StoredTensor]) -> None:
        """Notes on each parameter that is a stand-in what it stands for, and on others in what form they are stored."""
        for name, parameter in model.named_parameters():
            if not any(parameter.stride()) and parameter.data_ptr() in self._stored:
                stand_for(parameter, self._stored[parameter.data_ptr()])
            tensor = tensors.get(name) or tensors.get(name.removeprefix(self._prefix))
            if tensor is not None and tensor.form:
                setattr(parameter, _FORM, tensor.form)


def stand_for(parameter: torch.Tensor, tensor: StoredTensor) -> None:
    """Notes on a stand-in what it stands for."""
    setattr(parameter, _STORED, tensor)


def stored(parameter: torch.Tensor) -> StoredTensor | None:
    """What a parameter stands for; None where it holds its numbers."""
    found: StoredTensor | None = getattr(parameter, _STORED, None)
    return found


def form_of(parameter: torch.Tensor) -> str:
    """In what form the checkpoint stores a parameter; empty where that is of no account."""
    return str(getattr(parameter, _FORM, ""))


@contextlib.contextmanager
def read_weights(model: torch.nn.Module) -> Iterator[None]:
    """While active, a module that runs has its own weights instead of stand-ins."""
    handles = []
    for module in model.modules():
        held = {name: one for name, one in module._parameters.items() if one is not None and stored(one)}
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
