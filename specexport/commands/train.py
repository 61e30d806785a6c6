"""Train Medusa heads, an MLP speculator, an EAGLE-3 or DFlash draft, or a draft model for a target.

Example:
    specexport train medusa --target Qwen/Qwen3-0.6B --data texts.jsonl -o heads/
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

from specexport.contract.errors import TrainError
from specexport.contract.methods import known, method_type, part
from specexport.flags import add_flags, from_flags
from specexport.tables import show
from specexport.training.options import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what ``specexport train`` can train, each with its flags."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name in known():
        if (options := part(method_type(name), "train_options")) is None or not hasattr(options, "TRAINING"):
            continue
        training: Training = options.TRAINING
        word = training.command
        example = (
            f"Example:\n    specexport train {word} --target Qwen/Qwen3-0.6B --data texts.jsonl -o {word}/"
            f"{training.example}"
        )
        command = kinds.add_parser(word, help=training.summary, description=training.summary, epilog=example)
        command.set_defaults(training=training, method=name)
        add_flags(command, training.options)
        command.add_argument("--json", action="store_true", help="print the record of the training as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport train``."""
    if sys.version_info < (3, 11):
        raise TrainError(
            f"training needs Python 3.11 or newer; this is {sys.version_info.major}.{sys.version_info.minor}"
        )
    training: Training = arguments.training
    try:
        module = part(method_type(arguments.method), "train")
    except ImportError as error:
        raise TrainError(
            f"training needs the [train] extra ({error}); install it with: pip install 'specexport[train]'"
        ) from error
    log = partial(print, file=sys.stderr)
    train = getattr(module, f"train_{training.command.replace('-', '_')}")
    record = train(from_flags(training.options, arguments), log)
    if arguments.json:
        print(json.dumps(record))
    else:
        show(*training.report(record))
    return 0
