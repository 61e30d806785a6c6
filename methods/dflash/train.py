"""``specexport train dflash``: layers that draft a block in one pass, from the target's states (arXiv 2602.06036)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config

from specexport.graphs.attention import lowering
from specexport.methods.dflash import DFlashTraining
from specexport.methods.dflash.export import DFlashOutline, read_dflash, save_dflash
from specexport.methods.dflash.graph import BlockLowering, BlockSettings, DFlashDraft
from specexport.methods.hidden_states.train import checked_states, frozen, layer_sizes, run_target, train_and_write
from specexport.training.data import Windows, seeded
from specexport.training.loop import Log
from specexport.training.options import within
from specexport.training.predictions import Losses, summed_loss
from specexport.training.run import TrainingModel, load_target, open_run

_AT_ONCE = 32
"""Number of a window's blocks that run together."""


def train_dflash(options: DFlashTraining, log: Log) -> dict[str, Any]:
    """Trains a draft and writes it in z-lab's layout, without the embedding and head, which are the target's.

    The record has ``accuracy``, for each drafted position the share of tokens that were the draft's candidate of each
    rank, and a chain's ``acceptance_length``.
    """
    target = load_target(options)
    default = DFlashOutline.default_states(options.layers, target.layers)
    states = checked_states(options.states, default, target.layers)
    within("states", min(states), 1, target.layers, "the target's layers")
    if options.mask_token_id is not None:  # before hours of sampling
        within("mask_token_id", options.mask_token_id, 0, len(target.tables()[1]) - 1, "the target's last token")
    with open_run("train dflash", options, target, log) as run:
        within("draft_block", options.draft_block, 2, run.window - 1, "one less than --seq-len")
        run.prepare(options.self_distill)
        draft = new_draft(options, target, states)

        def losses(batch: Windows, number: int | None) -> Losses:
            anchors = None if number is None else random_anchors(batch, options.anchors, options.seed, number)
            return draft_losses(draft, target.model, states, batch, anchors)

        train_and_write(
            run,
            draft,
            (),
            losses,
            options.draft_block - 1,
            lambda folder: save_dflash(folder, draft.cpu().half(), states, target.layers),
            read_dflash,
        )
    return run.record


def new_draft(options: DFlashTraining, target: TrainingModel, states: tuple[int, ...]) -> DFlashDraft:
    """A new draft with the attention heads of a target, initialized from torch's global generator.

    Its embedding and head are the target's and are not trained.
    """
    table, head = target.tables()
    vocab, hidden = head.shape
    mask = options.mask_token_id
    if mask is None:  # texts never continue after it
        spare = (target.tokenizer.mask_token_id, target.tokenizer.pad_token_id, *target.ends, vocab - 1)
        mask = next(token for token in spare if token is not None)
    config = Qwen3Config(**layer_sizes(target, options.intermediate_size), num_hidden_layers=options.layers)
    settings = BlockSettings(block_size=options.draft_block, mask_token=mask, causal=(False,) * options.layers)
    draft = DFlashDraft(config, settings, len(states) * hidden, vocab).to(head.device)
    draft.embed_tokens.weight, draft.lm_head.weight = frozen(table), frozen(head)
    return draft


def random_anchors(batch: Windows, count: int, seed: int, number: int) -> torch.Tensor:
    """Draws anchors, the last context tokens of a window's blocks, int64 ``[B,A]``, seeded by the batch's number."""
    learnt = batch.learnt_from(2).cpu()  # the tokens after the root
    drawn = torch.rand(learnt.shape, generator=seeded(seed, number)) + learnt
    return drawn.topk(min(count, learnt.shape[1])).indices.sort().values.to(batch.ids.device)


def draft_losses(
    draft: DFlashDraft, model: Any, states: tuple[int, ...], batch: Windows, anchors: torch.Tensor | None = None
) -> Losses:
    """For each position i of a block, the cross-entropy with the target's distribution i + 2 tokens after its anchor.

    Anchors ``[B,A]`` end the blocks' contexts; by default every token is one. As the draft does not see the tokens in
    between, it learns that distribution marginalized over them.
    """
    if anchors is None:
        anchors = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
    target_states, logits, at = run_target(model, states, batch)
    context = draft.context(target_states)
    blocks = [_blocks(draft, context, batch.ids, part) for part in torch.split(anchors, _AT_ONCE, 1)]
    output = torch.cat(blocks, 1)
    for ahead in range(output.shape[2]):
        learnt = batch.learnt_from(2 + ahead).gather(1, anchors)
        targets = at.roll(-1 - ahead, dims=1).gather(1, anchors)[learnt]
        labels = batch.ids.roll(-2 - ahead, dims=1).gather(1, anchors)[learnt]

        def soft_targets(rows: torch.Tensor, targets: torch.Tensor = targets) -> torch.Tensor:
            return logits[targets[rows]].float().softmax(-1)

        yield summed_loss(draft.logits, output[:, :, ahead][learnt], labels, draft.lm_head.out_features, soft_targets)


def _blocks(draft: DFlashDraft, context: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """The outputs of the blocks' drafted positions, ``[B,A,R-1,H]``, for the context ``[B,L,H]`` and anchors ``[B,A]``.

    All blocks of a window run together; each row sees its own block and the context up to its anchor.
    """
    (batch, length), count, rows = ids.shape, anchors.shape[1], draft.settings.block_size
    roots = ids.gather(1, (anchors + 1).clamp(max=length - 1))
    block = draft.block(roots.flatten(), rows).view(batch, count * rows)
    place = torch.arange(count * rows, device=ids.device)
    before = torch.arange(length, device=ids.device)
    last = anchors.repeat_interleave(rows, 1)
    block_positions = last + 1 + place % rows
    positions = torch.cat([before.expand_as(ids), block_positions], 1)
    same_block = (place // rows)[:, None] == place // rows
    seen = torch.cat([before <= last[:, :, None], same_block.expand(batch, -1, -1)], -1)
    later = torch.cat([torch.zeros_like(before), place])[None, :] > place[:, None]
    empty = context.new_zeros(batch, draft.config.num_key_value_heads, 0, draft.config.head_dim)
    past, no_past = [(empty, empty)] * len(draft.layers), torch.zeros(batch, dtype=torch.int64, device=ids.device)
    with lowering(BlockLowering(draft.settings.causal, past, no_past, seen, later, positions)):
        output = draft(block, context, block_positions, positions)
    return output.view(batch, count, rows, -1)[:, :, 1:]
