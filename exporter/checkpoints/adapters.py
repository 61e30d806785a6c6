"""Merges peft adapters into their model's weights, tensor by tensor as these are read.

peft itself merges them, in a model on the meta device that has only the adapter's weights.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.documents import ADAPTER
from specexport.exporter.checkpoints.quiet import failing_as, quiet
from specexport.exporter.checkpoints.stored import StoredTensor

_HINT = "merge it into the model with peft (merge_and_unload), save that with save_pretrained, and build from it"
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that do not change the model's own weights."""
_MERGEABLE = ("LORA", "IA3", "LOHA", "LOKR", "OFT", "VERA")
"""Supported values of ``peft_type``: they only change the model's own matrices."""
_ADAPTER_NAME = "default"


def merge_adapter(folder: Path, make: Callable[[Path], Any], tensors: Iterator[StoredTensor]) -> Iterator[StoredTensor]:
    """The tensors of a checkpoint; those that the adapter in ``folder`` changes are merged, in fp32.

    ``make`` creates a folder's model on torch's meta device.
    """
    state = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(folder.glob("adapter_*")))
    model, changes = _changes(folder, state, make)
    pending = dict(changes)
    for tensor in tensors:
        names = (tensor.name, f"{model}.{tensor.name}", tensor.name.removeprefix(f"{model}."))
        name = next((name for name in names if name in pending), None)
        yield tensor if name is None else replace(tensor, dtype="F32", read=partial(pending.pop(name), tensor))
    if pending:
        raise BuildError(f"{_adapter_file(folder)}: changes {min(pending)!r}, which the model's files lack; {_HINT}")


@functools.lru_cache(maxsize=2)
def _changes(
    folder: Path, _state: Any, make: Callable[[Path], Any]
) -> tuple[str, Mapping[str, Callable[[StoredTensor], torch.Tensor]]]:
    """The prefix of the model's tensor names, and functions that merge tensors, by the name of the tensor."""
    path = _adapter_file(folder)
    try:
        from peft import PeftConfig, PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper
    except ImportError as error:
        raise BuildError(
            f"{path}: merging an adapter needs peft; install it with: pip install 'specexport[export]'"
        ) from error
    model = make(folder)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    table_modules = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [name for name, module in model.named_modules() if module in table_modules]
    _drop_weights(model, {id(module.weight) for module in table_modules})
    with failing_as(lambda error: f"{path}: peft cannot put it on its model: {error}; {_HINT}"), quiet():
        _require_mergeable(path, PeftConfig.from_pretrained(folder))
        adapted = PeftModel.from_pretrained(model, folder, adapter_name=_ADAPTER_NAME, torch_device="cpu")
    changes: dict[str, Callable[[StoredTensor], torch.Tensor]] = {}
    lock = threading.Lock()
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[_ADAPTER_NAME].state_dict()
            changes |= {f"{name}.{part}": partial(_replacement, tensor.float()) for part, tensor in saved.items()}
        elif isinstance(module, BaseTunerLayer) and not isinstance(module.get_base_layer(), BaseTunerLayer):
            changes[f"{name.removesuffix('.token_adapter')}.weight"] = partial(_merge, path, name, module, lock)
        elif name in tables and bool(module.weight.any()):
            changes[f"{name}.weight"] = partial(_replacement, module.weight.data)
    if tied and (changed := [name for name in tables if f"{name}.weight" in changes]):
        raise BuildError(
            f"{path}: changes {changed[0]!r}, which the model uses as its embedding and as its head; {_HINT}, with "
            "tie_word_embeddings false"
        )
    if not changes:
        raise BuildError(f"{path}: changes no weights of its model; {_HINT}")
    return model.base_model_prefix, changes


def _adapter_file(folder: Path) -> Path:
    """The path of the adapter's file for error messages, with links resolved."""
    path = folder / ADAPTER
    return path.readlink() if path.is_symlink() and path.readlink().is_absolute() else path


def _require_mergeable(path: Path, config: Any) -> None:
    """Refuses adapters that do more than change the model's matrices, or that depend on its original weights."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind not in _MERGEABLE:
        raise BuildError(f"{path}: peft_type is {kind!r}; expected one of {', '.join(_MERGEABLE)}")
    init = getattr(config, "init_lora_weights", True)
    reasons = {
        f"init_lora_weights is {init!r}, which changes the model's own weights too": init not in _PLAIN_INITS,
        f"bias is {getattr(config, 'bias', 'none')!r}": getattr(config, "bias", "none") != "none",
        "lora_bias is true": getattr(config, "lora_bias", False),
        "layer_replication gives the model other layers": getattr(config, "layer_replication", None),
        "target_parameters changes tensors of experts": getattr(config, "target_parameters", None),
    }
    if getattr(config, "alora_invocation_tokens", None):
        raise BuildError(
            f"{path}: alora_invocation_tokens switch it on within a text; expected an adapter of whole texts"
        )
    for reason, holds in reasons.items():
        if holds:
            raise BuildError(f"{path}: {reason}; {_HINT}")


def _drop_weights(model: torch.nn.Module, tables: set[int]) -> None:
    """Replaces a model's parameters with tensors that take no memory, except tables that an adapter may contain."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shape = parameter.shape
                empty = torch.zeros(shape) if id(parameter) in tables else torch.zeros(()).expand(shape)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)


def _replacement(tensor: torch.Tensor, _original: StoredTensor) -> torch.Tensor:
    return tensor


def _merge(path: Path, name: str, layer: Any, lock: threading.Lock, tensor: StoredTensor) -> torch.Tensor:
    base = layer.get_base_layer()
    with lock:
        # An adapter of an embedding table contains the table that it was trained on.
        start = base.weight if base.weight.is_contiguous() and bool(base.weight.any()) else tensor.read()
        empty, base.weight = base.weight, torch.nn.Parameter(start.detach().to(torch.float32, copy=True), False)
        try:
            with failing_as(lambda error: f"{path}: cannot be merged into {name!r}: {error or type(error).__name__}"):
                layer.merge(safe_merge=True)
            return base.weight.data
        finally:
            base.weight = empty
            layer.merged_adapters.clear()
