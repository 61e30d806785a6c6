"""Train the models in ``examples/models`` on the sources of Python's standard library.

    python scripts/train_demo_models.py                      # all of them, in order: hours on two cores
    python scripts/train_demo_models.py demo-eagle3          # a single model, whose target must exist
    python scripts/train_demo_models.py --smoke --examples DIR    # a quick check; the models are useless

The target first learns the sources alone, then together with the Medusa heads' loss, so that its hidden state suits the
heads. The other models are trained like by ``specexport train``, on texts that their target writes. An interrupted run
resumes from the ``--work`` folder.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import demo_corpus as corpus
import torch
import torch.nn.functional as F

from specexport.graphs.layers import hidden_and_logits
from specexport.methods.draft_model.train import new_llama
from specexport.methods.medusa.train import head_losses, new_heads
from specexport.tables import Table
from specexport.training.data import Windows, read_windows
from specexport.training.distill import inherit_embedding
from specexport.training.loop import Loss, Schedule, optimizers, train
from specexport.training.predictions import weighted_loss
from specexport.training.run import Place, load_model, save_model

VOCAB_SIZE, MAX_POSITIONS = 4096, 1024
TARGET_STEPS, JOINT_STEPS = 1800, 1000
"""Steps of 8 windows of 512 tokens: of the target alone, and together with the heads."""
HEADS_WEIGHT, HEADS_DECAY = 0.3, 0.8
LAYERS = 2
"""Number of residual blocks per head."""
_HEADS: dict[str, Any] = {"layers": LAYERS, "tie_lm_head": True, "steps": 1000, "self_distill": 6144}
_STATES: dict[str, Any] = {"states": (2, 4, 7), "optimizer": "muon", "seq_len": 192, "prompt_len": 48}


class Recipe(NamedTuple):
    """A training of ``specexport train``.

    Attributes:
        method: folder of the method in ``methods``.
    """

    method: str
    target: str
    options: dict[str, Any]


RECIPES = {
    "demo-draft": Recipe("draft_model", "demo-target", {"optimizer": "muon", "lr": 6e-3, "steps": 2000, "texts": 6144}),
    "demo-medusa": Recipe("medusa", "demo-target", _HEADS),
    "demo-draft-medusa": Recipe("medusa", "demo-draft", _HEADS | {"lr": 3e-3}),
    "demo-eagle3": Recipe(
        "eagle3",
        "demo-target",
        _STATES | {"steps": 1300, "self_distill": 4608, "intermediate_size": 1024, "tie_lm_head": True, "ttt_steps": 4},
    ),
    "demo-dflash": Recipe(
        "dflash",
        "demo-target",
        _STATES
        | {"steps": 1400, "self_distill": 4096, "intermediate_size": 512, "layers": 2, "draft_block": 8, "anchors": 24},
    ),
}
NAMES = ("demo-target", *RECIPES)


class Demo:
    """The options, the corpus and the folders."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seed, self.smoke, self.examples = args.seed, args.smoke, args.examples
        self.models = args.examples / "models"
        folder = f"demo-models-{args.seed}{'-smoke' if args.smoke else ''}"
        self.work = args.work or Path(tempfile.gettempdir()) / folder
        self.work.mkdir(parents=True, exist_ok=True)
        files = corpus.read_corpus()[:: 16 if args.smoke else 1]
        self.learnt = [file for file in files if not file.held_out]
        self.held_out = [file for file in files if file.held_out]
        self.data = [self._written(files) for files in (self.learnt, self.held_out)]

    def _written(self, files: list[corpus.SourceFile]) -> Path:
        """Writes sources in the format of ``specexport train``; returns the file."""
        path: Path = self.work / f"{'held-out' if files[0].held_out else 'learnt'}.jsonl"
        path.write_text("".join(json.dumps({"text": file.text}) + "\n" for file in files), encoding="utf-8")
        return path

    def train_target(self) -> str:
        """Trains and writes the target, about 6.0M parameters, with the held-out prompts; returns its results."""
        torch.manual_seed(self.seed)
        tokenizer = corpus.train_tokenizer(self.learnt, VOCAB_SIZE, MAX_POSITIONS)
        learnt, held_out = (read_windows([path], tokenizer, seq_len=513, seed=self.seed) for path in self.data)
        model: Any = new_llama(VOCAB_SIZE, 256, heads=4, kv_heads=2, ffn=672, layers=7, positions=MAX_POSITIONS, end=0)
        heads = new_heads(4, LAYERS, model, tied=True)
        alone, joint = (2, 2) if self.smoke else (TARGET_STEPS, JOINT_STEPS)

        def loss_of(windows: Windows, number: int, *, with_heads: bool) -> Loss:
            batch = windows.rows(windows.order(number, 8, self.seed))
            rows = batch.learnt_from(1)
            with torch.autocast("cpu", torch.bfloat16):
                hidden, logits = hidden_and_logits(model, batch.ids, rows)
                loss = F.cross_entropy(logits.float(), batch.ids.roll(-1, dims=1)[rows])
                if not with_heads:
                    return loss, {}
                of_heads, figures = weighted_loss(head_losses(heads, hidden, batch, model.lm_head), HEADS_DECAY)
            return loss + HEADS_WEIGHT * of_heads, figures

        @torch.no_grad()
        def evaluate() -> str:
            losses = [loss_of(held_out, at, with_heads=False)[0].item() for at in range(-(-len(held_out) // 8))]
            return f"held-out {sum(losses) / len(losses):.4f}"

        parameters = dict(model.named_parameters()) | dict(heads.named_parameters(prefix="heads"))
        outer = (model.get_input_embeddings(), model.get_output_embeddings())
        trained = train(
            "target",
            parameters,
            optimizers("muon", parameters.values(), outer, 4e-3),
            Schedule(alone + joint, warmup=50, decay=0.35),
            lambda number: loss_of(learnt, number, with_heads=number >= alone),
            checkpoint=self.work / "target.pt",
            log=partial(print, flush=True),
            evaluate=evaluate,
        )
        corpus.export(model.eval(), tokenizer, self.models / "demo-target")
        prompts = corpus.cut_prompts(tokenizer, self.held_out, 64, 128, self.seed)
        path = self.examples / "prompts" / "held_out.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
        return f"{evaluate()} nats a token, after {trained.seconds / 60:.0f} minutes"

    def train(self, name: str) -> str:
        """Trains a draft or heads; returns the training's report."""
        method, target, changed = RECIPES[name]
        training = import_module(f"specexport.methods.{method}").TRAINING
        run = getattr(import_module(f"specexport.methods.{method}.train"), f"train_{training.command}")
        options = {
            "target": str(self.models / target),
            "data": self.data[:1],
            "held_out": str(self.data[1]),
            "output": self.models / name,
            "overwrite": True,
            "work": self.work / name,
            "seq_len": 256,
            "prompt_len": 96,
            "batch_size": 16,
            "warmup": 0.03,
            "seed": self.seed,
        } | changed
        if method == "draft_model":
            options["draft"] = str(self.initial_draft(self.models / target))
        if self.smoke:
            options |= {"steps": 2} | {key: 16 for key in ("texts", "self_distill") if key in options}
        record = run(training.options(**options), partial(print, flush=True))
        return "\n\n".join(
            part.render(None, False) if isinstance(part, Table) else str(part) for part in training.report(record)
        )

    def initial_draft(self, target: Path) -> Path:
        """A new draft of about 0.75M parameters, half of them in the embedding, which is derived from the target's."""
        folder = self.work / "initial-draft"
        torch.manual_seed(self.seed)
        base = load_model(str(target), Place(torch.device("cpu"), bf16=False), frozen=False)
        draft = new_llama(VOCAB_SIZE, 96, heads=2, kv_heads=1, ffn=288, layers=3, positions=MAX_POSITIONS, end=0)
        inherit_embedding(draft, base.model)
        save_model(folder, draft, base.tokenizer)
        return folder


def main() -> None:
    """Trains the chosen models and writes them with their cards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"model to train: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--examples", type=Path, default=Path("examples"), help="folder with models/ and prompts/")
    parser.add_argument("--work", type=Path, help="folder to resume from (default: a temporary folder)")
    parser.add_argument("--smoke", action="store_true", help="a quick check; the models are useless")
    args = parser.parse_args()
    if unknown := set(args.names) - {*NAMES}:
        parser.error(f"{min(unknown)!r} is none of {', '.join(NAMES)}")
    torch.set_num_threads(args.threads)
    demo = Demo(args)
    for name in args.names or NAMES:
        report = demo.train_target() if name == "demo-target" else demo.train(name)
        command = f"python scripts/train_demo_models.py {name} --seed {args.seed} --threads {args.threads}"
        card = corpus.card("demo", name=name, python=platform.python_version(), command=command, report=report)
        (demo.models / name / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
