"""Train what a target speculates with: Medusa heads, an MLP speculator or a draft model."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specexport.contract.errors import TrainError
from specexport.help import HelpFormatter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what ``specexport train`` can train, each with its flags."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, summary, declare, run in (
        ("medusa", "Train Medusa heads for a target, alone or together with it.", _medusa_arguments, _medusa),
        ("mlp-speculator", "Train an MLP speculator for a target.", _speculator_arguments, _speculator),
        ("draft", "Distil a target into a draft model.", _draft_arguments, _draft),
    ):
        kind = kinds.add_parser(
            name, help=summary, description=summary, allow_abbrev=False, formatter_class=HelpFormatter
        )
        declare(kind)
        kind.set_defaults(run=run)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport train``."""
    code: int = arguments.run(arguments)
    return code


def _medusa_arguments(parser: argparse.ArgumentParser) -> None:
    _data_arguments(parser)
    heads = parser.add_argument_group("heads")
    heads.add_argument(
        "--heads",
        type=int,
        default=4,
        metavar="N",
        help="how many; head i, from 0, predicts the token i + 2 positions on",
    )
    heads.add_argument("--layers", type=int, default=1, metavar="N", help="residual blocks a head")
    heads.add_argument(
        "--tie-lm-head",
        action="store_true",
        help="heads end in the model's own projection, which makes them many times smaller",
    )
    _head_arguments(heads, "head", decay=0.8, texts="instead of")
    stage = parser.add_argument_group("together with the model (--stage 2)")
    stage.add_argument("--stage", type=int, choices=(1, 2), default=1, help="1: heads alone; 2: first alone, then both")
    stage.add_argument("--tune", choices=("lora", "full"), default="lora", help="what of the model is trained")
    stage.add_argument("--lora-rank", type=int, default=16, metavar="R", help="rank of the adapters")
    stage.add_argument(
        "--base-lr", type=float, metavar="RATE", help="the model's (default: lr/4 with LoRA, lr/50 with full tuning)"
    )
    stage.add_argument(
        "--heads-weight", type=float, default=0.2, metavar="λ", help="the loss is the model's plus λ times the heads'"
    )
    stage.add_argument(
        "--heads-first", type=float, default=0.4, metavar="SHARE", help="of the steps, with the heads alone"
    )
    stage.add_argument(
        "--lm-loss",
        choices=("ce", "kl"),
        help="of the model: cross-entropy, or divergence from the model as it was (default: kl with --self-distill)",
    )
    _training_arguments(parser, lr="1e-3")


def _speculator_arguments(parser: argparse.ArgumentParser) -> None:
    _data_arguments(parser)
    stages = parser.add_argument_group("stages")
    stages.add_argument(
        "--n-predict",
        type=int,
        default=3,
        metavar="N",
        help="how many; stage i, from 0, predicts the token i + 2 positions on, and sees those before it",
    )
    stages.add_argument(
        "--inner-dim", type=int, metavar="I", help="width of the states between stages (default: the model's)"
    )
    stages.add_argument(
        "--tie-weights",
        action="store_true",
        help="stages share embedding, head and norm, and all but the first their projection",
    )
    stages.add_argument("--scale-input", action="store_true", help="norm the model's hidden state first")
    _head_arguments(stages, "stage", decay=1.0, texts="after")
    stages.add_argument(
        "--data-first", type=float, default=0.5, metavar="SHARE", help="of the steps, with the data, before the texts"
    )
    _training_arguments(parser, lr="1e-3")


def _head_arguments(group: Any, part: str, *, decay: float, texts: str) -> None:
    """Flags of what reads the model's hidden states; ``texts`` is where its own texts stand to the data."""
    group.add_argument("--decay", type=float, default=decay, metavar="D", help=f"{part} i counts D**i in the loss")
    group.add_argument(
        "--cache-hidden",
        action="store_true",
        help="compute the model's hidden states once and keep them in the work folder; epochs then cost only the "
        f"{part}s",
    )
    group.add_argument(
        "--self-distill",
        type=int,
        default=0,
        metavar="TEXTS",
        help=f"learn so many texts sampled from the model, half of them greedy, {texts} the data, which give prompts",
    )


def _draft_arguments(parser: argparse.ArgumentParser) -> None:
    _data_arguments(parser)
    draft = parser.add_argument_group("draft")
    draft.add_argument("--draft", metavar="DIR_OR_ID", help="model to start from, of the target's tokenizer")
    draft.add_argument("--layers", type=int, metavar="N", help="without --draft: layers of a new Llama")
    draft.add_argument("--hidden", type=int, metavar="H", help="without --draft: its hidden size")
    draft.add_argument(
        "--divergence",
        choices=("forward_kl", "reverse_kl", "jsd", "tvd"),
        default="forward_kl",
        help="between the target's and the draft's distribution of the next token",
    )
    draft.add_argument(
        "--samples",
        choices=("target", "draft", "data"),
        default="target",
        help="what is learnt: texts of the target, texts of the draft as it is then (on-policy), or the data; prompts "
        "are cut from the data",
    )
    draft.add_argument("--texts", type=int, default=1024, metavar="N", help="sampled from the target")
    draft.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="muon serves a draft that starts from nothing"
    )
    _training_arguments(parser, lr="3e-4 with adamw, 4e-3 with muon")


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="Hugging Face folder or hub id")
    parser.add_argument(
        "--data",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="text files; .jsonl or .json with text, conversations (ShareGPT) or messages: of chats only what the "
        "assistant says is learnt",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--json", action="store_true", help="print the record of the training as JSON")
    data = parser.add_argument_group("data")
    data.add_argument("--seq-len", type=int, metavar="N", help="tokens a window (default: 512)")
    data.add_argument(
        "--held-out", default="0.05", metavar="SHARE_OR_FILE", help="what is not trained on, but measured with"
    )
    data.add_argument(
        "--prompt-len", type=int, metavar="N", help="tokens of a prompt to continue (default: a quarter of --seq-len)"
    )
    data.add_argument("--sample-batch", type=int, default=64, metavar="N", help="texts sampled at once")


def _training_arguments(parser: argparse.ArgumentParser, *, lr: str) -> None:
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=float, default=2.0, metavar="N", help="times through the data")
    training.add_argument("--steps", type=int, metavar="N", help="steps, instead of epochs")
    training.add_argument("--batch-size", type=int, default=8, metavar="N", help="windows a batch")
    training.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches a step")
    training.add_argument("--lr", type=float, metavar="RATE", help=f"highest learning rate (default: {lr})")
    training.add_argument(
        "--warmup", type=float, default=0.1, metavar="SHARE", help="of the steps, while the rate rises"
    )
    training.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    training.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="of products; auto is bf16 where it is fast",
    )
    training.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random")
    training.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="folder for checkpoints, from which the same command goes on (default: DIR.work beside the output, "
        "removed in the end)",
    )
    training.add_argument(
        "--save-every", type=int, metavar="N", help="steps from a checkpoint to the next (default: 10 to 50)"
    )


def _module(name: str) -> types.ModuleType:
    """A module of the trainer, or an error that names the extra it needs."""
    if sys.version_info < (3, 11):
        raise TrainError(
            f"training needs Python 3.11 or newer; this is {sys.version_info.major}.{sys.version_info.minor}"
        )
    try:
        import importlib

        return importlib.import_module(f"specexport.training.{name}")
    except ImportError as error:
        raise TrainError(
            f"training needs the [train] extra ({error}); install it with: pip install 'specexport[train]'"
        ) from error


def _options(kind: Any, arguments: argparse.Namespace) -> Any:
    """A dataclass of options from the flags of the same names."""
    return kind(**{name: getattr(arguments, name) for name in kind.__dataclass_fields__})


def _watch() -> Any:
    console = Console(stderr=True)
    return _module("setup").Watch(
        lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True), console
    )


def _medusa(arguments: argparse.Namespace) -> int:
    module = _module("medusa")
    record = module.train_medusa(_options(module.MedusaOptions, arguments), _watch())
    if arguments.json:
        print(json.dumps(record))
        return 0
    console = Console()
    console.print(f"{arguments.output}: {len(record['head_accuracy'])} heads; share of held-out tokens they have right")
    console.print(_shares("head", record["head_accuracy"]))
    if "lm_loss" in record:
        before, after = record["lm_loss_before"], record["lm_loss"]
        console.print(f"held-out loss of the model {before:.4f} before, {after:.4f} now, in nats a token")
    return 0


def _shares(what: str, accuracy: list[list[float]]) -> Table:
    """How often the first so many candidates hold the token."""
    ranks = (1, 2, 3, 5, 10)
    table = Table(what, *(f"top-{rank}" for rank in ranks), box=None, pad_edge=False)
    for number, row in enumerate(accuracy):
        table.add_row(str(number), *(f"{sum(row[:rank]):.3f}" for rank in ranks))
    return table


def _speculator(arguments: argparse.Namespace) -> int:
    module = _module("mlp_speculator")
    record = module.train_mlp_speculator(_options(module.SpeculatorOptions, arguments), _watch())
    if arguments.json:
        print(json.dumps(record))
        return 0
    console = Console()
    stages = record["stage_accuracy"]
    console.print(
        f"{arguments.output}: {len(stages)} stages; share of held-out tokens they have right after right ones"
    )
    console.print(_shares("stage", stages))
    console.print(
        f"a chain of {len(stages)} would commit {record['acceptance_length']:.2f} tokens a step of these texts"
    )
    return 0


def _draft(arguments: argparse.Namespace) -> int:
    module = _module("draft")
    record = module.train_draft(_options(module.DraftOptions, arguments), _watch())
    if arguments.json:
        print(json.dumps(record))
        return 0
    acceptance = record["acceptance"]
    table = Table("draft tokens a step", *map(str, range(1, 7)), box=None, pad_edge=False)
    for name in acceptance["after"]:
        for when in ("before", "after"):
            table.add_row(f"{name}, {when}", *(f"{length:.2f}" for length in acceptance[when][name]))
    console = Console()
    console.print(f"{arguments.output}: a draft of {arguments.target}; acceptance length over held-out prompts")
    console.print(table)
    return 0
