"""``python -m benchmarks batch | decode | lookup | methods | peers | turns``, on inflated models."""

from __future__ import annotations

import argparse
import sys

from benchmarks import batch, decode, lookup, methods, peers, turns


def main() -> int:
    """Runs a benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in (
        ("batch", batch),
        ("decode", decode),
        ("lookup", lookup),
        ("methods", methods),
        ("peers", peers),
        ("turns", turns),
    ):
        command = commands.add_parser(
            name,
            description=module.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    arguments = parser.parse_args()
    code: int = arguments.main(arguments)
    return code


sys.exit(main())
