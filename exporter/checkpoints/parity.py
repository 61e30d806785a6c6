"""Checks, before tracing, that a model computes the same through our lowering as in plain transformers.

Some families do not follow transformers' interfaces, and would be exported incorrectly. So every build runs a prefill,
a chain step and a branching tree both ways, and refuses a family by name if the results differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specexport.contract import signature, tensors
from specexport.contract.errors import BuildError
from specexport.contract.model import LoweredAs, with_rows
from specexport.contract.tree import TokenTree
from specexport.exporter.checkpoints.checkpoint import Checkpoint, plain_transformers
from specexport.exporter.checkpoints.quiet import quiet
from specexport.exporter.checkpoints.stored import read_weights
from specexport.graphs.rotary import fused_rotary
from specexport.graphs.step import StepModule
from specexport.runtime.states import KeptStates

TOLERANCE = 1e-3
"""Maximum difference of a logit, relative to the largest logit; rounding in deep models stays below a tenth of it."""

_PROMPT, _CHAIN, _ROWS = 9, 2, 32
_TREE = TokenTree((-1, 0, 0, 1, 1, 2))
_POISON = 1e3
"""Value of embeddings that the mask hides; reading them would show in the logits."""


def require_parity(checkpoint: Checkpoint, lowering: LoweredAs = "native", *, embeds: bool = False) -> None:
    """Compares the step module with the eager model over prefill, a chain step and every path of a tree.

    With ``embeds``, every other token is replaced by the model's own embedding of it.
    """
    model, vocab = checkpoint.model, min(checkpoint.vocab_size, checkpoint.input_vocab)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, vocab, (1, count), generator=generator) for count in (_PROMPT, _CHAIN, len(_TREE))]
    try:
        with torch.no_grad(), quiet(), read_weights(model):
            with fused_rotary(model) if lowering == "native" else contextlib.nullcontext():
                ours = _lowered_logits(checkpoint, lowering, embeds, parts)
            with plain_transformers(model):
                theirs = _eager_logits(model, parts, _compared_tree(checkpoint))
    except BuildError as error:
        raise BuildError(f"{checkpoint.source}: model family '{checkpoint.family}': {error}") from error
    except Exception as error:  # model code raises exceptions of any kind
        raise BuildError(
            f"{checkpoint.source}: model family '{checkpoint.family}' is not supported: comparing it with plain "
            f"transformers failed ({type(error).__name__}: {error})"
        ) from error
    scale = max(1.0, float(theirs.abs().max()))
    # With another shape, the logits bypass the head's forward, where the requested rows are selected.
    worst = float((ours - theirs).abs().max()) / scale if ours.shape == theirs.shape else float("inf")
    if not worst <= TOLERANCE:
        refused, through = "is not supported", "specexport's attention"
        if embeds:
            refused = "does not read its own embeddings as it reads tokens, so build it without --inputs-embeds"
            through = "embeddings"
        raise BuildError(
            f"{checkpoint.source}: model family '{checkpoint.family}' {refused}: through {through} its logits are "
            f"{worst:.2g} (relative) away from transformers' own, more than {TOLERANCE:g}"
        )


def _lowered_logits(
    checkpoint: Checkpoint, lowering: LoweredAs, embeds: bool, parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Logits of the prompt's last token, the chain and the tree, ``[1 + 2 + nodes, V]``; ``parts`` are their tokens."""
    layers = with_rows(list(checkpoint.states.values()), len(_TREE))
    states = dict(zip(checkpoint.states, layers, strict=True))
    step = StepModule(checkpoint.model, lowering=lowering, states=states)
    kept, slot = KeptStates(layers, 1), range(1)
    past = [torch.zeros(1, c.heads, _ROWS, size) for c in checkpoint.cache for size in (c.key_size, c.value_size)]
    done, logits = 0, []
    shapes = (TokenTree.chain(_PROMPT), TokenTree.chain(_CHAIN), _compared_tree(checkpoint))
    for tokens, shape, first_row in zip(parts, shapes, (_PROMPT - 1, 0, 0), strict=True):
        ids, *embeds_inputs = _half_embedded(checkpoint.model, tokens) if embeds else (tokens,)
        count = tokens.shape[1]
        known_tokens = count if done == 0 else 1  # the tokens after these count as draft tokens
        cells = kept.cells(slot, [done], count)
        state_inputs = {tensors.KNOWN_TOKENS: np.array([known_tokens]), **cells} if cells else {}
        state_inputs |= {name: kept.arrays[name].copy() for name in signature.states(layers)}
        out = step(
            ids,
            torch.from_numpy(shape.depths)[None] + done,
            torch.from_numpy(shape.mask)[None],
            torch.tensor([done]),
            torch.arange(first_row, count)[None],
            [*past, *(torch.from_numpy(array) for array in state_inputs.values())],
            *embeds_inputs,
        )
        logits.append(out[0][0])
        rows = out[1 : 1 + len(past)]
        past = list(rows) if lowering == "native" else _with_rows(past, rows, done)
        blocks, new_parts = kept.outputs(1, count)
        for name, new in zip(signature.new_states(layers), out[1 + len(past) :], strict=True):
            new_parts[name][:] = new.numpy()
        kept.advance(slot, [done], [known_tokens])
        kept.commit(0, done, range(count), blocks, 0)
        done += tokens.shape[1]
    return torch.cat(logits)


def _half_embedded(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, embeddings equal to every other token's, and a mask of the positions that read them."""
    mask = (torch.arange(tokens.shape[1]) % 2 == 0)[None]
    embeds = torch.where(mask[:, :, None], model.get_input_embeddings()(tokens), torch.tensor(_POISON))
    return torch.where(mask, 0, tokens), embeds, mask


def _with_rows(past: list[torch.Tensor], rows: Sequence[torch.Tensor], done: int) -> list[torch.Tensor]:
    """The caches with new rows after the ``done`` existing ones."""
    return [
        torch.cat([cache[:, :, :done], new, cache[:, :, done + new.shape[2] :]], 2)
        for cache, new in zip(past, rows, strict=True)
    ]


def _compared_tree(checkpoint: Checkpoint) -> TokenTree:
    """The tree to compare; a chain for models with layers without attention, which support no trees."""
    return TokenTree.chain(len(_TREE)) if checkpoint.states else _TREE


def _eager_logits(model: torch.nn.Module, parts: Sequence[torch.Tensor], shape: TokenTree) -> torch.Tensor:
    """The same logits, from one run over a batch with a text for each path from the tree's root to a leaf."""
    *start_parts, tree = parts
    start, paths = torch.cat(start_parts, dim=1), shape.leaf_paths
    # Padding after a leaf is not compared.
    padded_paths = [[*path, *[0] * (shape.depth + 1 - len(path))] for path in paths]
    texts = torch.cat([start.expand(len(paths), -1), tree[0][torch.tensor(padded_paths)]], dim=1)
    logits = model(texts, use_cache=False).logits[:, _PROMPT - 1 :]
    place = {node: (text, 1 + _CHAIN + at) for text, path in enumerate(paths) for at, node in enumerate(path)}
    return torch.cat([logits[0, : 1 + _CHAIN], *(logits[place[node]][None] for node in range(len(shape)))]).float()
