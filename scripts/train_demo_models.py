"""Train the demonstration models: a 6M-parameter target, a draft an eighth of its size, and Medusa heads of both.

    python scripts/train_demo_models.py --compile        # writes examples/models
    python scripts/train_demo_models.py --smoke --out /tmp/smoke

The stages are: tokenizer, target, target together with heads, text sampled from it, draft, acceptance, heads alone,
export. Each stores its result in the `--work` folder, and a second run with the same options resumes there. Training
uses `specexport.training`, like `specexport train`.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import demo_corpus as corpus
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from specexport.contract.folders import written_beside
from specexport.methods.draft_model.train import new_llama
from specexport.methods.medusa.export import save_medusa
from specexport.methods.medusa.graph import MedusaHeads
from specexport.methods.medusa.train import head_accuracy, heads_loss, new_heads
from specexport.training.data import sampled_windows, seeded
from specexport.training.distill import (
    acceptance_length,
    accepted_positions,
    continue_text,
    distillation_loss,
    inherit_embedding,
    mixed_temperatures,
    sample_texts,
)
from specexport.training.hidden import hidden_loss
from specexport.training.loop import Loss, Schedule, Trained, adamw, muon_and_adamw, train
from specexport.training.options import Divergence
from specexport.training.run import Place

VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 128, 96  # of the acceptance measurement
CORPUS_STEPS = 64  # of the draft; after them four of five steps take text sampled from the target
SAMPLED_SHAPE = (96, 160)  # tokens of prompt and of continuation in the texts sampled from the target
HEADS = 4
HEADS_WEIGHT, HEADS_DECAY = 0.3, 0.8  # in the loss of the target together with its heads


def build_target() -> LlamaForCausalLM:
    """About 6.0M parameters."""
    return new_llama(VOCAB_SIZE, 256, heads=4, kv_heads=2, ffn=672, layers=7, positions=MAX_POSITIONS, end=0)


def build_draft() -> LlamaForCausalLM:
    """About 0.75M parameters, half of them in the embedding."""
    return new_llama(VOCAB_SIZE, 96, heads=2, kv_heads=1, ffn=288, layers=3, positions=MAX_POSITIONS, end=0)


def next_token_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token over windows `[batch, length + 1]`, in bfloat16 where that is safe."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def joint_loss(model: LlamaForCausalLM, heads: MedusaHeads, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a model with tied heads over windows `[batch, length + 1]`, and that of the next token and each head.

    Every head reads the whole window except its end: unlike in `specexport train`, windows have neither prompts nor
    padding, and so a static shape, which `torch.compile` needs.
    """
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        states = [hidden, *heads.states(hidden)]
        logits = [model.lm_head(state[:, : -ahead or None]) for ahead, state in enumerate(states)]
    losses = [
        F.cross_entropy(part.flatten(0, 1).float(), ids[:, 1 + ahead :].flatten()) for ahead, part in enumerate(logits)
    ]
    weights = torch.tensor([HEADS_WEIGHT * HEADS_DECAY**head for head in range(len(heads))])
    of_heads = torch.stack(losses[1:])
    return losses[0] + (weights * of_heads).sum(), torch.stack(losses).detach()


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Mean cross-entropy in nats a token over held-out windows `[count, length + 1]`."""
    losses = [next_token_loss(model, part).item() * len(part) for part in windows.split(8)]
    return sum(losses) / len(windows)


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
    """Return the options, with those of `--smoke` filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target-steps", type=int, default=1800, help="of 4096 tokens")
    parser.add_argument("--joint-steps", type=int, default=1000, help="of the target together with its heads")
    parser.add_argument("--draft-steps", type=int, default=2000)
    parser.add_argument("--divergence", choices=get_args(Divergence), default="forward_kl")
    parser.add_argument("--sampled", type=int, default=6144, help="texts sampled from the target")
    parser.add_argument("--medusa-layers", type=int, default=2, help="residual blocks a head")
    parser.add_argument("--medusa-steps", type=int, default=1000, help="of 16 texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("examples"), help="gets models/ and prompts/")
    parser.add_argument("--work", type=Path, help="checkpoints to resume from (default: a temporary folder by options)")
    parser.add_argument("--compile", action="store_true", help="with torch.compile: 1.4x faster, needs a C++ compiler")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, for tests; the models are useless")
    args = parser.parse_args()
    if args.smoke:
        args.target_steps, args.joint_steps, args.draft_steps, args.sampled, args.medusa_steps = 6, 6, 6, 16, 6
    if args.work is None and args.smoke:
        args.work = Path(tempfile.mkdtemp(prefix="demo-train-"))
    elif args.work is None:
        pair = f"{args.target_steps}-{args.joint_steps}-{args.draft_steps}-{args.sampled}-{args.divergence}-{args.seed}"
        args.work = Path(tempfile.gettempdir()) / f"demo-train-{pair}"
    return args


class Demo:
    """The corpus, the options and the state shared by the stages."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        files = corpus.read_corpus()
        self.training = [file for file in files if not file.held_out][:: 16 if args.smoke else 1]
        self.held_out = [file for file in files if file.held_out]
        self.models = args.out / "models"
        self.tokenizer = corpus.train_tokenizer(self.training, VOCAB_SIZE, MAX_POSITIONS)
        self.stream = corpus.encode_stream(self.tokenizer, self.training, args.seed)
        held_out_stream = corpus.encode_stream(self.tokenizer, self.held_out, args.seed)
        self.windows = held_out_stream[: held_out_stream.numel() // 513 * 513].view(-1, 513)
        self.windows = self.windows[: 4 if args.smoke else None]
        self.log(
            f"corpus: {len(self.training)} files, {self.stream.numel()} tokens; "
            f"held out {len(self.held_out)}, {held_out_stream.numel()}"
        )
        self.rows = corpus.cut_prompts(self.tokenizer, self.held_out, PROMPTS, PROMPT_TOKENS, args.seed)
        self.prompts = torch.tensor(self.tokenizer([row["text"] for row in self.rows])["input_ids"])
        self.compiled: Callable = partial(torch.compile, dynamic=False) if args.compile else lambda function: function

    def log(self, line: str) -> None:
        """Print and record a line."""
        print(line, flush=True)
        with (self.args.work / "progress.log").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def train(
        self,
        name: str,
        model: LlamaForCausalLM,
        rate: float,
        schedule: Schedule,
        loss_at: Callable[[int], Loss],
        evaluate: Callable[[], str],
        heads: MedusaHeads | None = None,
    ) -> Trained:
        """Train a model, and optionally heads with it, with Muon and AdamW."""
        trained = dict(model.named_parameters())
        trained |= dict(heads.named_parameters(prefix="heads")) if heads is not None else {}
        outer = (model.get_input_embeddings(), model.get_output_embeddings())
        return train(
            name,
            trained,
            muon_and_adamw(trained.values(), outer, rate),
            schedule,
            loss_at,
            checkpoint=self.args.work / f"{name}.pt",
            log=self.log,
            evaluate=evaluate,
        )

    def train_target(self, target: LlamaForCausalLM) -> Trained:
        """Train the target on the corpus."""
        fast_loss = self.compiled(next_token_loss)

        def loss_at(step: int) -> Loss:
            return fast_loss(target, corpus.random_windows(self.stream, 8, 513, seeded(self.args.seed, step))), {}

        schedule = Schedule(self.args.target_steps, warmup=50, decay=0.35)
        return self.train("target", target, 4e-3, schedule, loss_at, partial(self.held_out_line, target))

    def train_together(self, target: LlamaForCausalLM, heads: MedusaHeads) -> Trained:
        """Continue to train the target on the corpus, together with its heads, so that its hidden state suits them."""
        fast_loss = self.compiled(joint_loss)

        def loss_at(step: int) -> Loss:
            windows = corpus.random_windows(self.stream, 8, 513, seeded(self.args.seed, 300_000 + step))
            loss, each = fast_loss(target, heads, windows)
            return loss, {"each": each}

        schedule = Schedule(self.args.joint_steps, warmup=20, decay=0.5)
        return self.train("together", target, 3e-3, schedule, loss_at, partial(self.held_out_line, target), heads)

    def held_out_line(self, target: LlamaForCausalLM) -> str:
        """Measure the target's loss on held-out files."""
        return f"held-out {held_out_loss(target, self.windows[:32]):.4f}"

    def sample(self, teacher: LlamaForCausalLM) -> Tensor:
        """Sample the target's texts for the draft and the heads: `[count, sum(SAMPLED_SHAPE)]`."""
        prompt, new = SAMPLED_SHAPE
        return sample_texts(
            teacher,
            lambda rows, generator: corpus.random_windows(self.stream, rows, prompt, generator),
            self.args.sampled,
            new,
            seed=self.args.seed,
            work=self.args.work,
        )

    def train_draft(
        self, draft: LlamaForCausalLM, target: LlamaForCausalLM, teacher: LlamaForCausalLM, sampled: Tensor
    ) -> Trained:
        """Distil the target into the draft, mostly over the target's own texts."""
        seed, kind = self.args.seed, self.args.divergence
        fast_loss = self.compiled(distillation_loss)
        greedy = continue_text(target, self.prompts, NEW_TOKENS, torch.zeros(len(self.prompts)), seeded(seed, 0))

        def loss_at(step: int) -> Loss:
            generator = seeded(seed, 700_000 + step)
            if step < CORPUS_STEPS or step % 5 == 0:
                windows = corpus.random_windows(self.stream, 4, 513, generator)
                return fast_loss(draft, teacher, windows, 512, kind), {}
            chosen = torch.randint(len(sampled), (16,), generator=generator)
            return fast_loss(draft, teacher, sampled[chosen], SAMPLED_SHAPE[1], kind), {}

        def score() -> str:
            accepted = accepted_positions(target, draft, greedy, PROMPT_TOKENS, 0.0, seed)
            return f"acceptance length at 3 draft tokens {acceptance_length(accepted, 3):.3f}"

        return self.train("draft", draft, 6e-3, Schedule(self.args.draft_steps, warmup=50, decay=0.5), loss_at, score)

    def train_heads(
        self,
        of: str,
        model: LlamaForCausalLM,
        target: LlamaForCausalLM,
        sampled: Tensor,
        heads: MedusaHeads,
        rate: float,
    ) -> None:
        """Train heads of the target or of the draft, either in bfloat16, on the target's texts, and export them."""
        args = self.args
        name = "demo-medusa" if of == "demo-target" else f"{of}-medusa"
        together = f"{args.joint_steps} steps together with the target, then " if of == "demo-target" else ""
        place = Place(torch.device("cpu"), bf16=True)
        ends = (self.tokenizer.eos_token_id,)
        windows, lm_head = sampled_windows(sampled, SAMPLED_SHAPE[0], ends), model.get_output_embeddings()
        trained = train(
            "heads",
            dict(heads.named_parameters()),
            [adamw([(list(heads.parameters()), rate)])],
            Schedule(args.medusa_steps, round(0.03 * args.medusa_steps)),
            hidden_loss(
                model.requires_grad_(False),
                lambda number: windows.rows(windows.order(number, 16, args.seed)),
                lambda hidden, batch: heads_loss(heads, hidden, batch, lm_head, HEADS_DECAY),
                place,
            ),
            checkpoint=args.work / f"{name}-{args.medusa_layers}-{args.medusa_steps}.pt",
            log=self.log,
        )
        generator = seeded(args.seed, 800_000)
        temperatures = mixed_temperatures(len(self.prompts), generator)
        held_out = continue_text(target, self.prompts, NEW_TOKENS, temperatures, generator)
        accuracy = head_accuracy(heads, model, sampled_windows(held_out, PROMPT_TOKENS, ends), place)
        table = corpus.accuracy_table("head", accuracy.ranks, 0)
        self.log(table)
        readme = corpus.card(
            "heads",
            name=name,
            of=of,
            heads=HEADS,
            layers=args.medusa_layers,
            parameters=sum(parameter.numel() for parameter in heads.parameters()),
            python=platform.python_version(),
            sampled=args.sampled,
            training=f"{together}{args.medusa_steps} steps of 16 texts, AdamW, {trained.seconds / 60:.0f} minutes on "
            f"{args.threads} CPU cores in bfloat16",
            seed=args.seed,
            command=self.command(),
            prompts=len(self.prompts),
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=NEW_TOKENS,
            table=table,
        )
        with written_beside(self.models / name) as folder:
            # The compatible files would repeat the model's projection for every head, which takes nine megabytes.
            save_medusa(folder, heads, lm_head.weight, base=of, accuracy=accuracy, compatible=False)
            (folder / "README.md").write_text(readme, encoding="utf-8")

    def command(self) -> str:
        """The command line with all defaults."""
        left_out = ("out", "work", "compile", "smoke")
        flags = [f"--{key.replace('_', '-')} {value}" for key, value in vars(self.args).items() if key not in left_out]
        return " ".join(["python scripts/train_demo_models.py", *flags, *(["--compile"] if self.args.compile else [])])

    def export_pair(
        self,
        target: LlamaForCausalLM,
        draft: LlamaForCausalLM,
        target_seconds: float,
        joint_seconds: float,
        draft_seconds: float,
    ) -> None:
        """Write both models with their cards, and the held-out prompts."""
        args = self.args
        table = acceptance_table(target, draft, self.prompts, NEW_TOKENS, args.seed)
        self.log(table)
        summaries = {
            "target": "A small language model of Python source text: the target of a pair for speculative decoding.",
            "draft": f"The draft model of `demo-target`, distilled from it with the divergence `{args.divergence}`.",
        }
        trainings = {
            "target": f"{args.target_steps} steps of 8 x 512 tokens, {target_seconds / 60:.0f} minutes, and "
            f"{args.joint_steps} more together with the heads of `demo-medusa`, {joint_seconds / 60:.0f} minutes; Muon "
            "and AdamW",
            "draft": f"{args.draft_steps} steps, all but the first {CORPUS_STEPS} mostly on {args.sampled} texts "
            f"sampled from the target, Muon and AdamW, {draft_seconds / 60:.0f} minutes",
        }
        for name, model in (("target", target), ("draft", draft)):
            text = continue_text(model, self.prompts[:1], NEW_TOKENS, torch.zeros(1), seeded(args.seed, 0))[0]
            readme = corpus.card(
                "model",
                name=f"demo-{name}",
                summary=summaries[name],
                layers=model.config.num_hidden_layers,
                hidden=model.config.hidden_size,
                parameters=model.num_parameters(),
                vocabulary=len(self.tokenizer),
                python=platform.python_version(),
                files=len(self.training),
                tokens=self.stream.numel(),
                held_out=len(self.held_out),
                loss=held_out_loss(model, self.windows),
                training=f"{trainings[name]} on {args.threads} CPU cores in bfloat16 autocast",
                seed=args.seed,
                command=self.command(),
                prompts=len(self.prompts),
                prompt_tokens=PROMPT_TOKENS,
                new_tokens=NEW_TOKENS,
                table=table,
                sample_file=self.rows[0]["file"],
                sample=self.rows[0]["text"] + "<<<" + self.tokenizer.decode(text[PROMPT_TOKENS:]),
            )
            corpus.export(model, self.tokenizer, self.models / f"demo-{name}", readme)
        prompts = args.out / "prompts" / "held_out.jsonl"
        prompts.parent.mkdir(parents=True, exist_ok=True)
        prompts.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")


def main() -> None:
    """Run all the stages."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    demo = Demo(args)
    torch.manual_seed(args.seed)
    target, draft = build_target(), build_draft()
    target_seconds = demo.train_target(target).seconds
    heads = new_heads(HEADS, args.medusa_layers, target, tied=True)
    joint_seconds = demo.train_together(target, heads).seconds
    target.eval()
    inherit_embedding(draft, target)
    teacher = copy.deepcopy(target).to(torch.bfloat16)
    sampled = demo.sample(teacher)
    draft_seconds = demo.train_draft(draft, target, teacher, sampled).seconds
    draft.eval()
    demo.export_pair(target, draft, target_seconds, joint_seconds, draft_seconds)
    demo.train_heads("demo-target", teacher, target, sampled, heads, 1e-3)
    learner = copy.deepcopy(draft).to(torch.bfloat16)
    demo.train_heads(
        "demo-draft", learner, target, sampled, new_heads(HEADS, args.medusa_layers, learner, tied=True), 3e-3
    )


if __name__ == "__main__":
    main()
