"""Distillation (DistillSpec, Zhou et al., arXiv 2310.08461): divergences, sampled texts, acceptance lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from specexport.contract.errors import TrainError
from specexport.training.data import seeded
from specexport.training.loop import load_tensors, progress_bar, save_tensors


def divergence(student: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """Mean divergence of next-token distributions, given the logits ``[positions,V]`` of both models.

    The kinds are DistillSpec's (arXiv 2310.08461, section 3): with the teacher's p and the student's q, forward_kl is
    KL(p||q), reverse_kl is KL(q||p), jsd is the mean divergence of p and q from (p + q) / 2, and tvd is half the sum of
    |p - q|, the probability that speculative sampling rejects a token.
    """

    def kl(log_x: torch.Tensor, log_y: torch.Tensor) -> torch.Tensor:
        """KL(x||y)."""
        return F.kl_div(log_y, log_x, log_target=True, reduction="batchmean")

    log_q, log_p = F.log_softmax(student.float(), dim=-1), F.log_softmax(teacher.float(), dim=-1)
    if kind == "forward_kl":
        return kl(log_p, log_q)
    if kind == "reverse_kl":
        return kl(log_q, log_p)
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
        return 0.5 * (kl(log_p, log_m) + kl(log_q, log_m))
    if kind == "tvd":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1).mean()
    raise ValueError(f"unknown divergence {kind!r}")


def distillation_loss(
    draft: Any,
    teacher: Any,
    ids: torch.Tensor,
    keep: int,
    kind: str,
    *,
    learnt: torch.Tensor,
    bf16: bool,
) -> torch.Tensor:
    """Divergence over the last ``keep`` predicted positions of texts ``ids``, int64 ``[B,L+1]``.

    Only positions where ``learnt``, bool ``[B,keep]``, is true count. The teacher gets no gradients.
    """
    with torch.no_grad():
        teacher_logits = teacher(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=keep).logits
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        logits = draft(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=keep).logits
    if logits.shape[-1] != teacher_logits.shape[-1]:
        # Models with the same tokenizer may pad their vocabularies differently; the smaller one has all tokens.
        common = min(logits.shape[-1], teacher_logits.shape[-1])
        logits, teacher_logits = logits[..., :common], teacher_logits[..., :common]
    return divergence(logits[learnt], teacher_logits[learnt], kind)


@torch.no_grad()
def inherit_embedding(draft: Any, target: Any) -> None:
    """Initializes the draft's embedding, ``[V,H]``, with the leading singular directions of the target's.

    No embedding of its width preserves the dot products of the target's tokens better (Eckart and Young, 1936).
    """
    left, scale, _ = torch.linalg.svd(target.get_input_embeddings().weight.float(), full_matrices=False)
    width = draft.config.hidden_size
    draft.get_input_embeddings().weight.copy_(left[:, :width] * scale[:width])


@torch.no_grad()
def continue_text(
    model: Any, prompts: torch.Tensor, new_tokens: int, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Continues prompts, int64 ``[B,P]``, at temperatures ``[B]``; returns int64 ``[B,P+new_tokens]``.

    Each token is the argmax of logits + temperature * Gumbel noise, which samples from softmax(logits / temperature)
    and is greedy at temperature 0. Texts continue after an end-of-text token, as in packed training text.
    """
    ids, inputs, cache = prompts, prompts, None
    for _ in range(new_tokens):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[:, -1].float()
        noise = -torch.empty_like(logits, device=generator.device).exponential_(generator=generator).log()
        inputs = (logits + temperatures[:, None] * noise.to(logits.device)).argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, inputs], dim=1)
    return ids


def mixed_temperatures(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Temperatures of training texts, ``[rows]``: 0 for every other text, between 0.5 and 1 for the rest."""
    temperatures = 0.5 + 0.5 * torch.rand(rows, generator=generator)
    temperatures[::2] = 0.0
    return temperatures


def sample_texts(
    model: Any,
    cut: Callable[[int, torch.Generator], torch.Tensor],
    count: int,
    new_tokens: int,
    *,
    seed: int,
    work: Path,
    rows: int = 256,
) -> torch.Tensor:
    """Continues ``count`` prompts with a model; returns int64 ``[count,P+new_tokens]``.

    ``cut(n, generator)`` returns n prompts, int64 ``[n,P]``. Finished batches are stored in the folder ``work``, from
    which an interrupted run resumes.
    """
    device = next(model.parameters()).device
    batches = []
    work.mkdir(parents=True, exist_ok=True)
    with progress_bar("sampling", count) as bar:
        for start in range(0, count, rows):
            path = work / f"sampled-{start}.pt"
            if not path.exists():
                generator = seeded(seed, 500_000 + start)
                batch = min(rows, count - start)
                temperatures = mixed_temperatures(batch, generator).to(device)
                prompts = cut(batch, generator).to(device)
                save_tensors(path, {"ids": continue_text(model, prompts, new_tokens, temperatures, generator).cpu()})
            ids = load_tensors(path).get("ids")
            if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.ndim != 2:
                raise TrainError(f"{path}: holds no tokens [texts,length]; delete it to sample again")
            batches.append(ids)
            bar.update(len(batches[-1]))
    return torch.cat(batches)


@torch.no_grad()
def accepted_positions(
    target: Any, draft: Any, trajectories: torch.Tensor, prompt: int, temperature: float, seed: int
) -> torch.Tensor:
    """Mask of the tokens in the target's trajectories that were accepted draft tokens, bool ``[N,new]``.

    Trajectories are int64 ``[N,prompt+new]``; temperature 0 is greedy.

    Speculative sampling (Leviathan et al., arXiv 2211.17192) emits a token x with probability p(x), and as an accepted
    draft token with probability min(p(x), q(x)). An emitted x was thus accepted with probability min(1, q(x) / p(x)).
    Greedy decoding accepts the draft's argmax.
    """
    new = trajectories.shape[1] - prompt
    tokens = trajectories[:, prompt:, None]
    p, q = (
        m(input_ids=trajectories[:, :-1], use_cache=False, logits_to_keep=new).logits.float() for m in (target, draft)
    )
    if temperature == 0.0:
        return q.argmax(dim=-1) == tokens[..., 0]
    ratio = (
        (q / temperature).log_softmax(-1).gather(-1, tokens) - (p / temperature).log_softmax(-1).gather(-1, tokens)
    ).exp()
    draws = torch.rand(tokens.shape[:2], generator=torch.Generator().manual_seed(seed))
    return draws.to(ratio.device) < ratio[..., 0]


def acceptance_length(accepted: torch.Tensor, draft_tokens: int) -> float:
    """Mean number of tokens per step with ``draft_tokens`` draft tokens, the target's own token included.

    ``accepted`` is the mask of :func:`accepted_positions`. Steps cut short by the end of a row do not count.
    """
    tokens = steps = 0
    for row in accepted.tolist():
        position = 0
        while position + draft_tokens < len(row):
            block = [*row[position : position + draft_tokens], False]
            emitted = block.index(False) + 1
            position += emitted
            tokens += emitted
            steps += 1
    return tokens / steps
