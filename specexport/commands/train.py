"""Train Medusa heads, an MLP speculator, an EAGLE-3 or DFlash draft, or a draft model for a target.

Example:
    specexport train medusa --target Qwen/Qwen3-0.6B --data texts.jsonl -o heads/
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from specexport.contract.errors import TrainError
from specexport.tables import Table, show
from specexport.training.options import (
    DFlashOptions,
    DraftOptions,
    Eagle3Options,
    MedusaOptions,
    RunOptions,
    SpeculatorOptions,
    add_flags,
    from_flags,
)

Report = Iterator[Table | str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what ``specexport train`` can train, each with its flags."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in _KINDS.items():
        example = (
            f"Example:\n    specexport train {name} --target Qwen/Qwen3-0.6B --data texts.jsonl -o {name}/{kind.more}"
        )
        command = kinds.add_parser(name, help=kind.summary, description=kind.summary, epilog=example)
        add_flags(command, kind.options)
        command.add_argument("--json", action="store_true", help="print the record of the training as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport train``."""
    if sys.version_info < (3, 11):
        raise TrainError(
            f"training needs Python 3.11 or newer; this is {sys.version_info.major}.{sys.version_info.minor}"
        )
    kind = _KINDS[arguments.kind]
    name = arguments.kind.replace("-", "_")
    try:
        module = importlib.import_module(f"specexport.training.{name}")
    except ImportError as error:
        raise TrainError(
            f"training needs the [train] extra ({error}); install it with: pip install 'specexport[train]'"
        ) from error
    log = partial(print, file=sys.stderr)
    record = getattr(module, f"train_{name}")(from_flags(kind.options, arguments), log)
    if arguments.json:
        print(json.dumps(record))
    else:
        show(*kind.report(record))
    return 0


def _shares(what: str, accuracy: list[list[float]]) -> Table:
    """How often the token is among the first candidates."""
    ranks = (1, 2, 3, 5, 10)
    table = Table("", (what, *(f"top-{rank}" for rank in ranks)))
    for number, row in enumerate(accuracy):
        table.add_row(str(number), *(f"{sum(row[:rank]):.3f}" for rank in ranks))
    return table


def _report_medusa(record: dict[str, Any]) -> Report:
    heads = record["head_accuracy"]
    yield f"{record['options']['output']}: {len(heads)} heads; share of held-out tokens they predict"
    yield _shares("head", heads)
    if "lm_loss" in record:
        before, after = record["lm_loss_before"], record["lm_loss"]
        yield f"held-out loss of the model {before:.4f} before, {after:.4f} now, in nats a token"


def _report_chain(key: str, record: dict[str, Any]) -> Report:
    accuracy, length = record[key], record["acceptance_length"]
    output = record["options"]["output"]
    yield f"{output}: {len(accuracy)} drafted tokens; share of held-out tokens they predict"
    yield _shares("token", accuracy)
    yield f"a chain of {len(accuracy)} would commit {length:.2f} tokens a step of these texts"


def _report_draft(record: dict[str, Any]) -> Report:
    options, acceptance = record["options"], record["acceptance"]
    table = Table("", ("draft tokens a step", *map(str, range(1, 7))))
    for name in acceptance["after"]:
        for when in ("before", "after"):
            table.add_row(f"{name}, {when}", *(f"{length:.2f}" for length in acceptance[when][name]))
    yield f"{options['output']}: a draft of {options['target']}; acceptance length over held-out prompts"
    yield table


@dataclass(frozen=True)
class _Kind:
    summary: str
    options: type[RunOptions]
    report: Callable[[dict[str, Any]], Report]
    more: str = ""


_KINDS = {
    "medusa": _Kind("Train Medusa heads for a target, alone or together with it.", MedusaOptions, _report_medusa),
    "mlp-speculator": _Kind(
        "Train an MLP speculator for a target.", SpeculatorOptions, partial(_report_chain, "stage_accuracy")
    ),
    "eagle3": _Kind("Train an EAGLE-3 draft for a target.", Eagle3Options, partial(_report_chain, "accuracy")),
    "dflash": _Kind("Train a DFlash draft for a target.", DFlashOptions, partial(_report_chain, "accuracy")),
    "draft": _Kind("Distil a target into a draft model.", DraftOptions, _report_draft, " --layers 4 --hidden 512"),
}
