"""The original models in plain transformers, for comparison with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specexport.contract.errors import BundleError
from specexport.contract.model import Model
from specexport.exporter.checkpoints.config import load_causal_lm, read_model_config
from specexport.graphs.layers import keep_first_layers

Array = npt.NDArray[Any]


def load_reference(path: Path, described: Model, layers: int | None = None) -> Any:
    """Loads a checkpoint in fp32 with plain transformers.

    Args:
        path: the checkpoint.
        described: the bundle's description, which it must fit.
        layers: number of its first layers to keep; None for all.

    Raises:
        BundleError: it does not fit the description.
    """
    config = read_model_config(path)
    model, *_ = load_causal_lm(path, config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    if layers is not None:
        keep_first_layers(model, layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = int(model.get_output_embeddings().weight.shape[0])
    if (parameters, width) != (described.parameters, described.vocab_size):
        raise BundleError(
            f"{path} is another model: {parameters:,} parameters and {width:,} logits, where the bundle was built from "
            f"{described.parameters:,} and {described.vocab_size:,}; pass the checkpoint the bundle was built from"
        )
    return model


def reference_logits(model: Any, text: Array) -> Array:
    """A model's logits after each token of a text, float32 ``[N,V]``."""
    with torch.no_grad():
        logits: Array = model(torch.from_numpy(text)[None], use_cache=False).logits[0].float().numpy()
    return logits


def reference_states(model: Any, text: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's logits after each token of a text, ``[N,V]``, and the inputs of its head, ``[N,H]``."""
    taken: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _module, args: taken.append(args[0]))
    try:
        logits = torch.from_numpy(reference_logits(model, text))
    finally:
        hook.remove()
    return logits, taken[0][0].float()


def reference_embeds(model: Any, text: Array) -> Array:
    """The embeddings of a text's tokens, float32 ``[N,H]``, as the model accepts them instead of tokens."""
    with torch.no_grad():
        embeds: Array = model.get_input_embeddings()(torch.from_numpy(text)).float().numpy()
    return embeds


def as_read(tokens: list[int], model: Any) -> Array:
    """Tokens as a graph reads them: those beyond the embedding are read as its last token."""
    read: Array = np.minimum(np.array(tokens), model.get_input_embeddings().weight.shape[0] - 1)
    return read
