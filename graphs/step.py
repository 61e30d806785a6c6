"""The step graph: one forward pass of a model over T new tokens and a static cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from specexport.contract import tensors
from specexport.contract.model import LoweredAs, StateLayer
from specexport.graphs.attention import Lowering, NativeLowering, PassThroughCache, TwoPartLowering, lowering
from specexport.graphs.layers import recorded_states
from specexport.graphs.recurrent import StepStates


def pairs(flat: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``[key.0, value.0, key.1, ...]`` as ``[(key.0, value.0), ...]``."""
    return list(zip(flat[0::2], flat[1::2], strict=True))


def flat(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The inverse of :func:`pairs`."""
    return [tensor for layer in layers for tensor in layer]


def run_model(
    model: torch.nn.Module,
    active: Lowering,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logits_rows: torch.Tensor,
    inputs_embeds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a transformers causal LM under a lowering.

    The language-model head reads only the requested rows: one row of a prefill chunk instead of T, which saves most of
    the head's cost with large vocabularies.

    Args:
        model: the model, loaded with ``attn_implementation=ATTENTION_NAME``.
        input_ids: int64 ``[B,T]``.
        logits_rows: tokens whose logits to return, int64 ``[B,R]``.
        inputs_embeds: embeddings to read instead of ``input_ids``, float32 ``[B,T,H]``.

    Returns:
        The logits, float32 ``[B,R,V]``, and the hidden states after the final norm, ``[B,R,H]``.
    """
    head_rows: list[torch.Tensor] = []

    def take(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows = logits_rows[:, :, None].expand(-1, -1, args[0].shape[-1])
        head_rows.append(torch.gather(args[0], 1, rows))
        return (head_rows[0], *args[1:])

    # transformers accepts only one of the two inputs.
    read = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    cache = PassThroughCache(model.config.num_hidden_layers)  # type: ignore[arg-type, union-attr]
    with head.register_forward_pre_hook(take), lowering(active):
        out = model(**read, position_ids=position_ids, past_key_values=cache, use_cache=True)
    return out.logits.float(), head_rows[0]


class Addition(torch.nn.Module, ABC):
    """A method's addition to a step graph: outputs computed from the model's last hidden state.

    Attributes:
        prefix: prefix of the names of its parameters in the graph, as in published checkpoints.
    """

    prefix: str

    @abstractmethod
    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs by name, from the hidden states after the final norm, ``[B,R,H]``, and the logits ``[B,R,V]``."""


class StepModule(torch.nn.Module):
    """The target's graph: prefill, decode and verify are this module at different T (see ``contract.tensors``).

    Args:
        model: the model, loaded with ``attn_implementation=ATTENTION_NAME``.
        outputs: names of the outputs: logits, the last hidden state, states of layers, and outputs of additions.
        input_vocab: number of rows of the model's embedding, if larger token ids may occur; otherwise None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        additions: Iterable[Addition] = (),
        outputs: Iterable[str] = (tensors.LOGITS,),
        lowering: LoweredAs = "native",
        states: Mapping[int, StateLayer] | None = None,
        input_vocab: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.states = states or {}
        self.additions = torch.nn.ModuleDict({addition.prefix: addition for addition in additions})
        self.lowering: LoweredAs = lowering
        self.input_vocab = input_vocab
        self.output_names = list(dict.fromkeys(outputs))
        parts = {name: name.partition(".") for name in self.output_names}
        self.layer_counts = {
            name: int(after) for name, (stem, _, after) in parts.items() if stem == tensors.LAYER_STATES
        }

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        tree_mask: torch.Tensor,
        past_length: torch.Tensor,
        logits_rows: torch.Tensor,
        past: list[torch.Tensor],
        inputs_embeds: torch.Tensor | None = None,
        embeds_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Returns ``output_names``, then the caches (portable: the new rows), then the outputs of ``StepStates``.

        ``past`` holds the caches, then the inputs of :class:`~specexport.graphs.recurrent.StepStates`. Embeddings are
        read where their mask is true.
        """
        states = StepStates(self.states, past, past_length)
        caches = pairs(past[: len(past) - states.input_count])
        active = (
            NativeLowering(caches, tree_mask, position_ids, past_length, states)
            if self.lowering == "native"
            else TwoPartLowering(caches, past_length, tree_mask, position_ids, states=states)
        )
        if self.input_vocab is not None:
            input_ids = input_ids.clamp(max=self.input_vocab - 1)
        if inputs_embeds is not None and embeds_mask is not None:
            token_embeds: torch.Tensor = self.model.get_input_embeddings()(input_ids)  # type: ignore[operator]
            inputs_embeds = torch.where(embeds_mask[:, :, None], inputs_embeds, token_embeds)
        with recorded_states(self.model, self.layer_counts.values()) as recorded:
            read = (input_ids, position_ids, logits_rows, inputs_embeds)
            logits, hidden = run_model(self.model, active, *read)
        results: dict[str, torch.Tensor] = {tensors.LOGITS: logits, tensors.HIDDEN: hidden.float()}
        results |= {name: recorded[count].float() for name, count in self.layer_counts.items()}
        for addition in self.additions.values():
            results |= addition(hidden, logits)
        return (*(results[name] for name in self.output_names), *flat(active.returned), *states.returned)
