"""The command line: ``specexport build | compile | run | serve | inspect | verify | ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from specexport import __version__
from specexport.commands import (
    bench,
    build,
    compile,
    demo,
    inspect,
    plan,
    run,
    serve,
    suggest,
    train,
    tune,
    verify,
)
from specexport.contract.errors import SpecExportError
from specexport.help import HelpFormatter

_COMMANDS = (build, compile, run, serve, inspect, verify, bench, suggest, plan, train, tune, demo)


def parser() -> argparse.ArgumentParser:
    """The argument parser of all commands."""
    top = argparse.ArgumentParser(
        prog="specexport", description="Speculative decoding, compiled ahead of time.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"specexport {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=summary,
            description=summary,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, 1 for an error that was explained, 2 for wrong usage."""
    arguments = parser().parse_args([_dashed(word) for word in (sys.argv[1:] if argv is None else argv)])
    try:
        code: int = arguments.main(arguments)
    except SpecExportError as error:
        print(f"specexport: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; nothing is left to say.
        sys.stderr.close()
        return 1
    return code


def _dashed(word: str) -> str:
    """``--max_tokens`` means ``--max-tokens``: both spellings are common in the field."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(main())
