"""``specexport train eagle3``: a layer that drafts from states between the target's layers (arXiv 2503.01840)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint as recomputed
from transformers import LlamaConfig

from specexport.contract.errors import TrainError
from specexport.graphs.attention import AttentionCall, Lowering, lowering
from specexport.methods.eagle3 import Eagle3Training
from specexport.methods.eagle3.export import Eagle3Outline, read_eagle3, save_eagle3
from specexport.methods.eagle3.graph import Eagle3Draft
from specexport.methods.hidden_states.train import checked_states, frozen, layer_sizes, run_target, train_and_write
from specexport.training.data import Windows
from specexport.training.loop import Log
from specexport.training.options import within
from specexport.training.predictions import Losses, summed_loss
from specexport.training.run import Run, TrainingModel, load_target, open_run

_MEASURED_WINDOWS = 64
"""Windows over which the sizes of the target's states are measured."""


def train_eagle3(options: Eagle3Training, log: Log) -> dict[str, Any]:
    """Trains a draft and writes it in EAGLE's layout, without the embedding, which is the target's.

    The record has ``accuracy``, for each drafted position after correct draft tokens the share of tokens that were the
    draft's candidate of each rank, and a chain's ``acceptance_length``.
    """
    target = load_target(options)
    initial = None if options.draft is None else initial_draft(options, target)
    default = Eagle3Outline.default_states(1, target.layers)
    states = checked_states(options.states, default, target.layers) if initial is None else initial[1]
    if options.draft_vocab_size is not None:  # before hours of sampling
        within("draft_vocab_size", options.draft_vocab_size, 1, len(target.tables()[1]), "the target's vocabulary")
    with open_run("train eagle3", options, target, log) as run:
        within("ttt_steps", options.ttt_steps, 1, run.window - 2, "two less than --seq-len")
        run.prepare(options.self_distill)
        draft = new_draft(options, target, states, run.windows) if initial is None else initial[0]
        train_over_equal_channels(draft, channel_sizes(run, states), new=initial is None)

        def save(folder: Path) -> None:
            parametrize.remove_parametrizations(draft.fc, "weight")
            save_eagle3(folder, draft.cpu().half(), states, tied=options.tie_lm_head)

        train_and_write(
            run,
            draft,
            (draft.lm_head,),
            lambda batch, _: draft_losses(draft, target.model, states, batch, options.ttt_steps),
            options.ttt_steps,
            save,
            read_eagle3,
            watch=True,
        )
    return run.record


def new_draft(options: Eagle3Training, target: TrainingModel, states: tuple[int, ...], windows: Windows) -> Eagle3Draft:
    """A new draft with the attention heads of a target, initialized from torch's global generator.

    Its embedding is the target's and is not trained. Its head begins as the target's, or stays the target's. A smaller
    vocabulary consists of the tokens to learn that are most frequent in the windows.
    """
    table, head = target.tables()
    vocab, hidden = head.shape
    draft_vocab = options.draft_vocab_size or vocab
    config = LlamaConfig(**layer_sizes(target, options.intermediate_size), num_hidden_layers=1)
    draft = Eagle3Draft(config, hidden, len(states), draft_vocab).to(head.device)
    draft.embed_tokens.weight = frozen(table)
    if draft_vocab < vocab:
        counts = windows.ids[windows.learn].long().bincount(minlength=vocab)
        draft.target_ids = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values.to(head.device)
        head = head[draft.target_ids]
    rows = head.detach() if options.tie_lm_head else head.detach().float().clone()
    draft.lm_head.weight = torch.nn.Parameter(rows, requires_grad=not options.tie_lm_head)
    return draft


def initial_draft(options: Eagle3Training, target: TrainingModel) -> tuple[Eagle3Draft, tuple[int, ...]]:
    """The draft to start from, and the numbers of layers after which it reads the target's states.

    A narrower MLP keeps the units whose three weight rows have the largest product of norms.
    """
    (table, head), outline = target.tables(), read_eagle3(str(options.draft))
    outline.require_fit(hidden=head.shape[1], vocab=head.shape[0], layers=target.layers)
    layer = outline.layer
    unsupported = outline.switches | {name: getattr(layer, name) for name in ("attention_bias", "mlp_bias")}
    unsupported |= {
        f"{layer.num_hidden_layers} layers": layer.num_hidden_layers > 1,
        f"layers of a {layer.model_type}": layer.model_type != "llama",
        "scaled positions": layer.rope_parameters["rope_type"] != "default",
        "partly rotated heads": outline.rotated < layer.head_dim,
        f"states of {layer.hidden_size}": layer.hidden_size != head.shape[1],
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, on in unsupported.items() if on)
        raise TrainError(f"{outline.path}: has {names}; expected one plain llama layer as wide as the target")
    draft = outline.load(target.path, target.layers, target.max_positions).to(head.device).requires_grad_()
    draft.embed_tokens.weight = frozen(table)
    if options.tie_lm_head:
        draft.lm_head.weight = frozen(head if draft.target_ids is None else head[draft.target_ids])
    wide = layer.intermediate_size
    within("intermediate_size", options.intermediate_size or wide, 16, wide, "that of --draft")
    mlp: Any = draft.layers[0].mlp
    parts = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T)
    strength = torch.stack([part.detach().norm(dim=1) for part in parts]).prod(0)
    kept = strength.topk(options.intermediate_size or wide).indices.sort().values
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = torch.nn.Parameter(linear.weight.detach()[kept])
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight.detach()[:, kept])
    draft.config.intermediate_size = len(kept)
    return draft, outline.seen(target.layers)


@torch.no_grad()
def channel_sizes(run: Run[Eagle3Training], states: tuple[int, ...]) -> torch.Tensor:
    """The root mean square of each channel of the target's states at tokens to learn, float32 ``[n*H]``."""
    windows = run.windows.part(torch.arange(len(run.windows)) < _MEASURED_WINDOWS)
    total, count = torch.zeros((), device=run.place.device), 0
    for rows in windows.in_order(run.options.batch_size):
        batch = windows.rows(rows).to(run.place.device)
        with run.place.autocast():
            seen = run_target(run.target.model, states, batch)[0][batch.learn]
        total, count = total + seen.float().square().sum(0), count + len(seen)
    return (total / count).sqrt().clamp(min=1e-6)


def train_over_equal_channels(draft: Eagle3Draft, sizes: torch.Tensor, *, new: bool) -> None:
    """Makes the parameter of ``fc`` the weight over states whose channels were divided by their ``sizes``.

    The states after a target's last layers are many times larger than those after its first, and a few channels are
    larger still: a draft would hardly learn from the rest. ``fc.weight`` remains the weight over the states themselves;
    that of a ``new`` draft is scaled, that of another stays the same.
    """
    if new:
        draft.fc.weight.data /= sizes
    parametrize.register_parametrization(draft.fc, "weight", _OverSizes(sizes))


class _OverSizes(torch.nn.Module):
    sizes: torch.Tensor

    def __init__(self, sizes: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("sizes", sizes)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / self.sizes

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.sizes


def draft_losses(draft: Eagle3Draft, model: Any, states: tuple[int, ...], batch: Windows, steps: int) -> Losses:
    """For each step i of the training-time test, the cross-entropy with the target's distribution i + 2 tokens later.

    It is restricted to the draft's vocabulary, and to positions whose most probable token is in that vocabulary (arXiv
    2503.01840, SpecForge); drafts continue the text's true tokens.

    Row t of step 0 reads the target's states at token t and the next token. Row t of a later step continues the draft
    that began at t: it reads the draft's own state and attends to the rows that it would see when drafting
    (:class:`_TrainingTimeTest`).
    """
    target_states, logits, at = run_target(model, states, batch)
    ids, vocab = draft.target_ids, draft.lm_head.out_features
    target_ids = torch.arange(vocab, device=logits.device) if ids is None else ids
    number = torch.full((logits.shape[1],), -1, device=logits.device).scatter_(
        0, target_ids, torch.arange(vocab).to(target_ids)
    )
    in_vocab = number[logits.argmax(-1)] >= 0
    logits = logits if ids is None else logits[:, ids]
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
    hidden = draft.fuse(target_states)
    attention = _TrainingTimeTest()
    for step in range(steps):
        with lowering(attention):
            hidden, output = draft(batch.ids.roll(-1 - step, dims=1), hidden, positions + step)
        learnt = batch.learnt_from(2 + step)
        targets = at.roll(-1 - step, dims=1)[learnt]
        labels = number[batch.ids.roll(-2 - step, dims=1)[learnt]]

        def soft_targets(rows: torch.Tensor, targets: torch.Tensor = targets) -> torch.Tensor:
            return logits[targets[rows]].float().softmax(-1) * in_vocab[targets[rows], None]

        total, ranks = summed_loss(draft.lm_head, output[learnt], labels.clamp(min=0), vocab, soft_targets)
        yield total, torch.where(labels >= 0, ranks, vocab)


class _TrainingTimeTest(Lowering):
    """Attention in the training-time test: a row for each token, then in each call the rows that continue from them.

    Row t of call s attends to rows 0 to t of the first call, and to row t of each later call up to s.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See :class:`~specexport.graphs.attention.Lowering`; scores are recomputed for the backward pass."""
        step_rows = self._rows[call.layer]
        step_rows.append((call.key, call.value))
        rows = [row for pair in step_rows for row in pair]
        return recomputed(_attend, call.query, call.group, call.scaling, *rows, use_reentrant=False)


def _attend(query: torch.Tensor, group: int, scaling: float, *rows: torch.Tensor) -> torch.Tensor:
    (first, *own_keys), (first_value, *own_values) = rows[::2], rows[1::2]
    batch, heads, tokens, size = first.shape
    query = query.view(batch, heads, group, tokens, size)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ first[:, :, None].transpose(-1, -2)).float().masked_fill(later, -torch.inf)
    drafted_scores = [(query * key[:, :, None]).sum(-1, keepdim=True).float() for key in own_keys]
    weights = (torch.cat([scores, *drafted_scores], -1) * scaling).softmax(-1).to(query.dtype)
    attended = weights[..., :tokens] @ first_value[:, :, None]
    for at, value in enumerate(own_values):
        attended = attended + weights[..., tokens + at, None] * value[:, :, None]
    return attended.flatten(2, 3)
