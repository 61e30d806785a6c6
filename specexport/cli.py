"""The command line: ``specexport build | compile | run | serve | inspect | verify | ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from specexport import __version__
from specexport.commands import bench, build, compile, draw, inspect, plan, run, serve, suggest, train, tune, verify
from specexport.contract.errors import SpecExportError
from specexport.contract.folders import described

_COMMANDS = (build, compile, run, serve, inspect, draw, verify, bench, suggest, plan, train, tune)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a flag's default, but not where there is none or the text says it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = "(default" in (action.help or "")
        nothing = action.default is None or action.default is False or action.default == []
        return action.help if said or nothing else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Shows defaults and takes no abbreviated flags; argparse makes the parsers of sub-commands of the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **options)


def parser() -> argparse.ArgumentParser:
    """The argument parser of all commands."""
    top = _Parser(prog="specexport", description="Speculative decoding, compiled ahead of time.")
    top.add_argument("--version", action="version", version=f"specexport {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for module in _COMMANDS:
        # What a command does is said in the first paragraph of its module.
        summary = " ".join((module.__doc__ or "").partition("\n\n")[0].replace("``", "").split())
        command = commands.add_parser(module.__name__.rpartition(".")[2], help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, 1 for an error that was explained, 2 for wrong usage."""
    arguments = parser().parse_args([_dashed(word) for word in (sys.argv[1:] if argv is None else argv)])
    try:
        code: int = arguments.main(arguments)
        sys.stdout.flush()
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
    except OSError as error:
        print(f"specexport: error: {described(error)}", file=sys.stderr)
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
