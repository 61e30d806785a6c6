"""Train the demonstration pair: a 6M-parameter target and a draft an eighth of its size, distilled from it.

    python scripts/train_demo_models.py --compile        # what made examples/models; 80 minutes on two CPU cores
    python scripts/train_demo_models.py --smoke --out /tmp/smoke

The stages follow each other: tokenizer, target, text sampled from the target, draft, acceptance, export. Each leaves
its result in the `--work` folder, and a second run with the same options goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_corpus import (
    CARD,
    cut_prompts,
    encode_stream,
    export,
    random_windows,
    read_corpus,
    train_tokenizer,
    write_jsonl,
)
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 128, 96  # of the acceptance measurement
CORPUS_STEPS = 64  # of the draft, before four of five steps take text sampled from the target
SAMPLED_SHAPE = (96, 160)  # tokens of prompt and of continuation in the draft's training texts


def build_model(hidden: int, heads: int, kv_heads: int, ffn: int, layers: int) -> LlamaForCausalLM:
    """Return a freshly initialised Llama with tied embeddings and heads of 64 channels."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=64,
            max_position_embeddings=MAX_POSITIONS,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def build_target() -> LlamaForCausalLM:
    """About 6.0M parameters."""
    return build_model(hidden=256, heads=4, kv_heads=2, ffn=672, layers=7)


def build_draft() -> LlamaForCausalLM:
    """About 0.75M parameters, half of them in the embedding."""
    return build_model(hidden=96, heads=2, kv_heads=1, ffn=288, layers=3)


# ---------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Schedule:
    """Warm-up, a constant middle and a linear decay to zero over the last `decay` of the steps.

    The constant middle makes the first steps of a long and of a short run the same (Hägele et al., arXiv 2405.18392).
    """

    steps: int
    warmup: int
    decay: float

    def __call__(self, step: int) -> float:
        """Return the factor on the learning rate at `step`, counted from 0."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / max(1.0, self.decay * self.steps))


def make_optimizers(model: LlamaForCausalLM, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the tied embedding and the norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed_tokens" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    name: str,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    schedule: Schedule,
    loss_at: Callable[[int], Tensor],
    evaluate: Callable[[], str],
    work: Path,
    log: Callable[[str], None],
) -> float:
    """Train until `schedule.steps`, with a checkpoint at each evaluation; return the seconds spent in all runs.

    `loss_at(step)` must depend on nothing but the model and the step, which makes a resumed run equal to a whole one.
    """
    checkpoint = work / f"{name}.pt"
    step, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        step, seconds = state["step"], state["seconds"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        log(f"{name}: resumed at step {step}")
    base_rates = [[group.setdefault("base_lr", group["lr"]) for group in o.param_groups] for o in optimizers]
    every = max(10, min(50, schedule.steps // 10))
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    ) as progress:
        task = progress.add_task(name, total=schedule.steps, completed=step)
        running = 0.0
        began = time.monotonic()
        model.train()
        while step < schedule.steps:
            for optimizer, rates in zip(optimizers, base_rates, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * schedule(step)
            loss = loss_at(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            running = loss.item() if step == 1 or not running else 0.95 * running + 0.05 * loss.item()
            progress.update(task, completed=step, description=f"{name} loss {running:.3f}")
            if step % every == 0 or step == schedule.steps:
                spent = seconds + time.monotonic() - began
                log(f"{name}: step {step} loss {running:.4f} {evaluate()} after {spent:.0f} s")
                state = {
                    "step": step,
                    "seconds": spent,
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                }
                partial = checkpoint.with_suffix(".tmp")
                torch.save(state, partial)
                partial.replace(checkpoint)
                seconds, began = spent, time.monotonic()
    return seconds


def next_token_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token over windows `[batch, length + 1]`, in bfloat16 where that is safe."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Mean cross-entropy in nats a token over held-out windows `[count, length + 1]`."""
    model.eval()
    losses = [next_token_loss(model, part).item() * len(part) for part in windows.split(8)]
    model.train()
    return sum(losses) / len(windows)


# -------------------------------------------------------------------------------------------------- distillation


def divergence(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Mean divergence of the next-token distributions, from logits `[positions, vocabulary]` of either model.

    The four kinds are those of DistillSpec (Zhou et al., arXiv 2310.08461, section 3): with the teacher's p and the
    student's q, forward_kl is KL(p||q), reverse_kl is KL(q||p), jsd is the mean of the two divergences from
    (p + q) / 2, and tvd is half the sum of |p - q|, which is the chance that speculative sampling rejects a token.
    """
    log_q, log_p = F.log_softmax(student.float(), dim=-1), F.log_softmax(teacher.float(), dim=-1)
    if kind == "forward_kl":
        return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    if kind == "reverse_kl":
        return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
        sides = [F.kl_div(log_m, side, log_target=True, reduction="batchmean") for side in (log_p, log_q)]
        return 0.5 * (sides[0] + sides[1])
    if kind == "tvd":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1).mean()
    raise ValueError(f"unknown divergence {kind!r}")


@torch.no_grad()
def inherit_embedding(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Start the draft's tied embedding `[vocabulary, hidden]` as the target's in its leading singular directions.

    Of all embeddings of that width it keeps the target's dot products between tokens best (Eckart and Young, 1936).
    """
    left, scale, _ = torch.linalg.svd(target.get_input_embeddings().weight.float(), full_matrices=False)
    width = draft.config.hidden_size
    draft.get_input_embeddings().weight.copy_(left[:, :width] * scale[:width])


def distillation_loss(draft: LlamaForCausalLM, teacher: LlamaForCausalLM, ids: Tensor, keep: int, kind: str) -> Tensor:
    """Divergence over the last `keep` predicted positions of the sequences `ids` `[batch, length + 1]`."""
    with torch.no_grad():
        wanted = teacher(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=keep).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = draft(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=keep).logits
    return divergence(logits.flatten(0, 1), wanted.flatten(0, 1), kind)


@torch.no_grad()
def continue_text(
    model: LlamaForCausalLM, prompts: Tensor, new_tokens: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Continue `prompts` `[batch, length]`, each at its own temperature `[batch]`: `[batch, length + new_tokens]`.

    A token is the argmax of logits + temperature * Gumbel noise, which draws from softmax(logits / temperature), and
    is greedy at temperature 0. The text goes on after an end-of-text token, as it does in the training stream.
    """
    ids, inputs, cache = prompts, prompts, None
    for _ in range(new_tokens):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[:, -1].float()
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        inputs = (logits + temperatures[:, None] * noise).argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, inputs], dim=1)
    return ids


def sample_training_text(
    teacher: LlamaForCausalLM, stream: Tensor, count: int, shape: tuple[int, int], seed: int, work: Path
) -> Tensor:
    """Let the teacher continue `count` windows of the corpus: `[count, sum(shape)]`.

    `shape` is the length of the prompts and of the continuations. Half of the rows are greedy; the others have
    temperatures between 0.5 and 1. Rows are made in batches of 256 and kept in `work`.
    """
    batches = []
    with Progress(TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        for start in progress.track(range(0, count, 256)):
            path = work / f"sampled-{start}.pt"
            if not path.exists():
                generator = torch.Generator().manual_seed(seed * 1_000_003 + 500_000 + start)
                rows = min(256, count - start)
                temperatures = 0.5 + 0.5 * torch.rand(rows, generator=generator)
                temperatures[::2] = 0.0
                prompts = random_windows(stream, rows, shape[0], generator)
                torch.save(continue_text(teacher, prompts, shape[1], temperatures, generator), path)
            batches.append(torch.load(path, weights_only=True))
    return torch.cat(batches)


# ---------------------------------------------------------------------------------------------------- acceptance


@torch.no_grad()
def accepted_positions(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, trajectories: Tensor, prompt: int, temperature: float, seed: int
) -> Tensor:
    """Say for each token after `prompt` of the target's own `trajectories` whether it is a draft token: `[n, new]`.

    Speculative sampling (Leviathan et al., arXiv 2211.17192) emits a token x by acceptance with probability
    min(p(x), q(x)) and emits it at all with p(x). Given the target's trajectory, x was thus accepted with probability
    min(1, q(x) / p(x)). In greedy decoding it was accepted if it is the draft's argmax.
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
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens.shape[:2], generator=generator) < ratio[..., 0]


def acceptance_length(accepted: Tensor, draft_tokens: int) -> float:
    """Mean tokens per step, the target's own token included, in blocks of `draft_tokens` over `accepted` `[n, new]`.

    A block that the end of the row would cut short is not counted.
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


def acceptance_table(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Tensor, new: int, seed: int) -> str:
    """Return a Markdown table of the acceptance length on `prompts` `[n, length]` for one to six draft tokens."""
    lines = ["| draft tokens a step | 1 | 2 | 3 | 4 | 5 | 6 |", "|---|---|---|---|---|---|---|"]
    for name, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7)):
        generator = torch.Generator().manual_seed(seed)
        text = continue_text(target, prompts, new, torch.full((len(prompts),), temperature), generator)
        accepted = accepted_positions(target, draft, text, prompts.shape[1], temperature, seed)
        lines.append(f"| {name} | " + " | ".join(f"{acceptance_length(accepted, k):.2f}" for k in range(1, 7)) + " |")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- stages


def parse_arguments() -> argparse.Namespace:
    """Return the options, those of `--smoke` filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-steps", type=int, default=1800, help="of 4096 tokens (default: %(default)s)")
    parser.add_argument("--draft-steps", type=int, default=4500, help="(default: %(default)s)")
    parser.add_argument(
        "--sampled", type=int, default=6144, help="texts sampled from the target (default: %(default)s)"
    )
    parser.add_argument("--divergence", choices=["forward_kl", "reverse_kl", "jsd", "tvd"], default="forward_kl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("examples"), help="gets models/ and prompts/")
    parser.add_argument("--work", type=Path, help="checkpoints to go on from (default: a temporary folder by options)")
    parser.add_argument("--compile", action="store_true", help="with torch.compile: 1.4x faster, needs a C++ compiler")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, for tests; the models are useless")
    args = parser.parse_args()
    if args.smoke:
        args.target_steps, args.draft_steps, args.sampled = 6, 6, 16
    if args.work is None and args.smoke:
        args.work = Path(tempfile.mkdtemp(prefix="demo-train-"))
    elif args.work is None:
        key = f"{args.target_steps}-{args.draft_steps}-{args.sampled}-{args.divergence}-{args.seed}"
        args.work = Path(tempfile.gettempdir()) / f"demo-train-{key}"
    return args


def main() -> None:
    """Run all the stages."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    log_path = args.work / "progress.log"

    def log(line: str) -> None:
        print(line, flush=True)
        with log_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    files = read_corpus()
    training = [file for file in files if not file.held_out][:: 16 if args.smoke else 1]
    held_out = [file for file in files if file.held_out]
    tokenizer = train_tokenizer(training, VOCAB_SIZE, MAX_POSITIONS)
    stream = encode_stream(tokenizer, training, args.seed)
    held_out_stream = encode_stream(tokenizer, held_out, args.seed)
    all_windows = held_out_stream[: held_out_stream.numel() // 513 * 513].view(-1, 513)[: 4 if args.smoke else None]
    few_windows = all_windows[:32]
    log(f"corpus: {len(training)} files, {stream.numel()} tokens; held out {len(held_out)}, {held_out_stream.numel()}")
    rows = cut_prompts(tokenizer, held_out, PROMPTS, PROMPT_TOKENS, args.seed)
    prompts = torch.tensor(tokenizer([row["text"] for row in rows])["input_ids"])

    def generator_at(step: int) -> torch.Generator:
        return torch.Generator().manual_seed(args.seed * 1_000_003 + step)

    torch.manual_seed(args.seed)
    target, draft = build_target(), build_draft()

    compiled: Callable = partial(torch.compile, dynamic=False) if args.compile else lambda function: function
    fast_next_token_loss, fast_distillation_loss = compiled(next_token_loss), compiled(distillation_loss)

    def target_loss(step: int) -> Tensor:
        return fast_next_token_loss(target, random_windows(stream, 8, 513, generator_at(step)))

    target_seconds = train(
        "target",
        target,
        make_optimizers(target, matrix_lr=4e-3, other_lr=4e-3),
        Schedule(args.target_steps, warmup=50, decay=0.35),
        target_loss,
        lambda: f"held-out {held_out_loss(target, few_windows):.4f}",
        args.work,
        log,
    )
    target.eval()
    inherit_embedding(draft, target)
    teacher = copy.deepcopy(target).to(torch.bfloat16)
    sampled = sample_training_text(teacher, stream, args.sampled, SAMPLED_SHAPE, args.seed, args.work)
    greedy = continue_text(target, prompts, NEW_TOKENS, torch.zeros(len(prompts)), generator_at(0))

    def draft_loss(step: int) -> Tensor:
        generator = generator_at(700_000 + step)
        if step < CORPUS_STEPS or step % 5 == 0:
            return fast_distillation_loss(
                draft, teacher, random_windows(stream, 4, 513, generator), 512, args.divergence
            )
        chosen = torch.randint(len(sampled), (16,), generator=generator)
        return fast_distillation_loss(draft, teacher, sampled[chosen], SAMPLED_SHAPE[1], args.divergence)

    def draft_score() -> str:
        draft.eval()
        accepted = accepted_positions(target, draft, greedy, PROMPT_TOKENS, 0.0, args.seed)
        draft.train()
        return f"acceptance length at 3 draft tokens {acceptance_length(accepted, 3):.3f}"

    draft_seconds = train(
        "draft",
        draft,
        make_optimizers(draft, matrix_lr=6e-3, other_lr=6e-3),
        Schedule(args.draft_steps, warmup=50, decay=0.5),
        draft_loss,
        draft_score,
        args.work,
        log,
    )
    draft.eval()
    table = acceptance_table(target, draft, prompts, NEW_TOKENS, args.seed)
    log(table)

    command = (
        f"python scripts/train_demo_models.py --target-steps {args.target_steps} --draft-steps {args.draft_steps} "
        f"--sampled {args.sampled} --divergence {args.divergence} --seed {args.seed} --threads {args.threads}"
        f"{' --compile' if args.compile else ''}"
    )
    summaries = {
        "target": "A small language model of Python source text: the target of a pair for speculative decoding.",
        "draft": f"The draft model of `demo-target`, distilled from it with the divergence `{args.divergence}`.",
    }
    trainings = {
        "target": f"{args.target_steps} steps of 8 x 512 tokens, Muon and AdamW, {target_seconds / 60:.0f} minutes",
        "draft": f"{args.draft_steps} steps, all but the first {CORPUS_STEPS} mostly on {args.sampled} texts sampled "
        f"from the target, Muon and AdamW, {draft_seconds / 60:.0f} minutes",
    }
    for name, model in (("target", target), ("draft", draft)):
        text = continue_text(model, prompts[:1], NEW_TOKENS, torch.zeros(1), generator_at(0))[0]
        card = CARD.format(
            name=f"demo-{name}",
            summary=summaries[name],
            layers=model.config.num_hidden_layers,
            hidden=model.config.hidden_size,
            parameters=model.num_parameters(),
            vocabulary=len(tokenizer),
            python=platform.python_version(),
            files=len(training),
            tokens=stream.numel(),
            held_out=len(held_out),
            loss=held_out_loss(model, all_windows),
            training=f"{trainings[name]} on {args.threads} CPU cores in bfloat16 autocast",
            seed=args.seed,
            command=command,
            prompts=len(prompts),
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=NEW_TOKENS,
            table=table,
            sample_file=rows[0]["file"],
            sample=rows[0]["text"] + "<<<" + tokenizer.decode(text[PROMPT_TOKENS:]),
        )
        export(model, tokenizer, args.out / "models" / f"demo-{name}", card)
    write_jsonl(rows, args.out / "prompts" / "held_out.jsonl")


if __name__ == "__main__":
    main()
