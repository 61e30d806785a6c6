"""Multi-token prediction: a decoder layer of the target's kind drafts (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Its input is ``eh_proj [RMSNorm(embedding of the next token); RMSNorm(h)]``, where h is the input of the target's head:
the last state after the last norm. For further tokens, the layer's own output after its last norm replaces h. Embedding
and head are the target's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from specexport.graphs.attention import PassThroughCache
from specexport.methods.hidden_states.graph import OwnStateModule


class MTPDraft(OwnStateModule):
    """The layer and its norms.

    Args:
        model: a transformers decoder whose last layer is one like it, with the target's ``embed_tokens`` and ``norm``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        vocab, H = map(int, model.embed_tokens.weight.shape)
        self.reads = self.hidden = H
        self.embed_tokens = model.embed_tokens
        self.target_norm, self.enorm, self.hnorm, self.norm = (copy.deepcopy(model.norm) for _ in range(4))
        self.fc = torch.nn.Linear(2 * H, H, bias=False)
        self.layers = torch.nn.ModuleList([model.layers[-1]])
        module: Any
        for module in self.layers.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # the index of its cache
        self.lm_head = torch.nn.Linear(H, vocab, bias=False)
        self.rotary_emb = model.rotary_emb
        self.register_buffer("target_ids", None, persistent=False)

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.target_norm(states)
        return fused

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed_tokens(input_ids.clamp(max=self.embed_tokens.num_embeddings - 1))
        state = self.fc(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        rotary = self.rotary_emb(state, position_ids)
        outputs = self.layers[0](
            state,
            position_embeddings=rotary,
            attention_mask=None,
            position_ids=position_ids,
            past_key_values=PassThroughCache(1),
        )
        output = self.norm(outputs[0] if isinstance(outputs, tuple) else outputs)
        return output, output
