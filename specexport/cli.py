"""The command line: ``specexport build | compile | run | serve | inspect | verify | ...``."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specexport.building import needs_extra
from specexport.commands import Command, bench, build, chat, draw, inspect, plan, run, serve, tune
from specexport.commands.flags import UsageError
from specexport.contract.errors import SpecExportError
from specexport.contract.folders import describe_error
from specexport.contract.options import dashed
from specexport.contract.values import require_text
from specexport.version import full_version

_EPILOG = """\
Examples:
    specexport build --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --precision int8 -o qwen3/
    specexport run qwen3/ --prompt "A robot may not" --stats
    specexport chat qwen3/
    specexport serve qwen3/
    eval "$(specexport --print-completion bash)"

Environment:
    SPECEXPORT_CACHE    folder of bundles built on first use, measurements of this machine, and the history of chats
                        (default: $XDG_CACHE_HOME/specexport, else ~/.cache/specexport)
    SPECEXPORT_KERNELS  0 runs every graph on onnxruntime's kernels alone (default: 1)
    SPECEXPORT_API_KEY  key that clients of serve must send, unless --api-key is given

Exit status:
    0, 1 for an error with a message, 2 for wrong usage, 130 for Ctrl-C, 143 for SIGTERM; serve ends with 0 for both
"""
_COMMANDS = (
    Command("build", build.build_flags, build.build_command),
    Command("compile", build.compile_flags, build.compile_command),
    Command("run", run.run_flags, run.run_command),
    Command("chat", chat.chat_flags, chat.chat_command),
    Command("serve", serve.serve_flags, serve.serve_command),
    Command("export", serve.ExportOptions, serve.export_command),
    Command("inspect", inspect.InspectOptions, inspect.inspect_command),
    Command("draw", draw.DrawOptions, draw.draw_command),
    Command("verify", inspect.VerifyOptions, inspect.verify_command),
    Command("bench", bench.BenchOptions, bench.bench_command),
    Command("suggest", plan.SuggestOptions, plan.suggest_command),
    Command("plan", plan.PlanOptions, plan.plan_command),
    Command("train", build.train_flags),
    Command("tune", tune.tune_flags),
)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds a flag's default to its help text, unless there is none or the text states it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        documented = "(default" in (action.help or "")
        absent = action.default is None or isinstance(action.default, bool) or action.default == []
        return action.help if documented or absent else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keeps the line breaks of examples."""
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """Shows defaults and takes no abbreviated flags; argparse uses the same class for sub-commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)
        self.set_defaults(parser=self)  # the parser of the innermost command wins

    def error(self, message: str) -> NoReturn:
        """Exits with the message but without the usage, which fills a screen for some commands."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exits once what was printed is written."""
        sys.stdout.flush()
        super().exit(status, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints help; argparse would ignore a full disk."""
        (file or sys.stderr).write(message)


class _Version(argparse.Action):
    """Prints the version; asks git for the commit only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"specexport {full_version()}")
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Prints a completion script for a shell."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, *__: object) -> None:
        with needs_extra("completion", "completion"):
            import shtab
        for action in _actions(parser):
            if action.metavar in ("BUNDLE", "BUNDLE_OR_MODEL"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a parser and its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The argument parser; given the words of a command line, it declares only the flags of their command.

    Declaring the flags of all commands takes long.
    """
    top = _Parser(prog="specexport", description="Speculative decoding, compiled ahead of time.", epilog=_EPILOG)
    top.add_argument("--version", action=_Version, nargs=0, help="print the version, with the commit if it is known")
    top.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "fish", "tcsh"),
        help="print a completion script for a shell; needs the completion extra",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    names = {command.name for command in _COMMANDS}
    chosen = names & set(words[:1]) or (set() if words[:1] in (["-h"], ["--help"], ["--version"]) else names)
    for command in _COMMANDS:
        command.add_to(commands, declare=command.name in chosen)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 1 for an error with a message, 2 for wrong usage."""
    _prepare_streams()
    arguments = argparse.Namespace()
    try:
        words = [_with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
        if not words:
            parser(["--help"]).print_help(sys.stderr)
            return 2
        arguments, unknown = parser(words).parse_known_args(words)
        if unknown:  # parse_args would print the usage of all commands
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        _require_text(arguments)
        code: int = arguments.main(arguments)
        sys.stdout.flush()
    except SpecExportError as error:
        print(f"specexport: error: {_with_flag(error, arguments)}", file=sys.stderr)
        wrong_flag = error.param is not None and getattr(arguments, error.param, None) is not None
        return 2 if wrong_flag or isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output has gone, as with `head`.
        sys.stderr.close()
        return 1
    except OSError as error:
        print(f"specexport: error: {describe_error(error)}", file=sys.stderr)
        return 1
    except UnicodeError as error:  # in the name of a file; errors in contents name the file
        print(f"specexport: error: {ascii(str(error))[1:-1]}; name files in UTF-8", file=sys.stderr)
        return 1
    return code


def _with_flag(error: SpecExportError, arguments: argparse.Namespace) -> str:
    """The error's message, with flags for its parameter at the beginning and for the one in ``was given with``."""
    declared = arguments.parser._option_string_actions if hasattr(arguments, "parser") else ()

    def spelled(match: re.Match[str]) -> str:
        flags = map(dashed, re.findall("[a-z_]+", match[0]))
        return next((flag for flag in flags if flag in declared), match[0])

    begin = rf"^{re.escape(error.param)}\b(?: \([a-z_]+\))?|" if error.param else ""  # perhaps with a second name
    return re.sub(rf"{begin}(?<=was given with )[a-z_]+", spelled, str(error))


def _prepare_streams() -> None:
    """Opens missing standard streams on the null device, and has "?" printed for characters that the encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _require_text(arguments: argparse.Namespace) -> None:
    """Refuses bytes that are not UTF-8, except in paths."""
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not (name == "model" and Path(text).exists()):
                require_text(text, name.replace("_", "-"))


def _with_dashes(word: str) -> str:
    """Replaces underscores in a flag by dashes: both spellings, ``--max_tokens`` and ``--max-tokens``, are common."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(main())
