"""The commands of the command line, and flags that several of them share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from specexport.commands import report
from specexport.commands.flags import UsageError, add_flags, flag_values, from_flags, group_of
from specexport.contract.errors import RequestError
from specexport.contract.manifest import GenerationDefaults
from specexport.contract.methods import known, method_type, read_methods
from specexport.contract.options import Options, dashed, option, options
from specexport.contract.reading import is_bundle
from specexport.exporter.options import BuildSettings
from specexport.options import EngineOptions
from specexport.runtime import SamplingParams
from specexport.runtime.speculative import Speculative
from specexport.tables import Styled, Table, show

SAMPLING = (
    *("max_tokens", "min_tokens", "stop", "stop_token_ids", "json_schema", "grammar", "skip_special_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
)
"""Sampling parameters that are flags, except the seed."""
BUILD_GROUP = "the build: if a model is built on first use"
BUILD = [name for name in options(BuildSettings) if name not in options(SamplingParams)]
_OPENING = [name for name in options(EngineOptions) if name not in options(BuildSettings) and name != "model"]


def read_text(path: Path, expected: str) -> str:
    """The text of a file that a flag names, without a byte-order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: {getattr(error, 'strerror', None) or error}; expected {expected}") from error


class Command(NamedTuple):
    """A command.

    Attributes:
        flags: the options that become flags, or a function that declares the flags.
        main: runs the command with these options, or else with the namespace; returns the exit status. None if
            ``flags`` declares sub-commands.
        help: a description, a blank line and examples; by default the docstring of ``main``, or else of ``flags``.
    """

    name: str
    flags: type[Options] | Callable[[argparse.ArgumentParser], None]
    main: Callable[[Any], int] | None = None
    help: str = ""

    def add_to(self, commands: argparse._SubParsersAction[Any], declare: bool = True) -> None:
        """Adds the command's parser to ``commands``, with its flags if ``declare``."""
        first, _, examples = (self.help or getdoc(self.main or self.flags) or "").partition("\n\n")
        summary = " ".join(first.replace("``", "").split())
        parser = commands.add_parser(self.name, help=summary, description=summary, epilog=examples)
        flags, main = self.flags, self.main
        parser.set_defaults(main=main)
        if not declare:
            return
        if isinstance(flags, type):
            assert main is not None
            add_flags(parser, flags)
            parser.set_defaults(main=lambda arguments: main(from_flags(flags, arguments)))
        else:
            flags(parser)


class BundleOptions(Options, frozen=True, kw_only=True):
    """Options of commands for a bundle.

    Attributes:
        bundle: a folder written by specexport build.
        json: print the result as JSON.
    """

    bundle: Annotated[Path, option("BUNDLE", positional=True)]
    json: bool = False

    def show(self, result: Any, *parts: Table | Styled | str) -> None:
        """Prints a result: as JSON, or else in parts."""
        if self.json:
            print(json.dumps(msgspec.to_builtins(result), indent=2))
        else:
            show(*parts)


class MeasuringOptions(BundleOptions, frozen=True, kw_only=True):
    """Options of commands that measure a bundle.

    Attributes:
        plot: also write a page with tables and charts that opens offline (default: none).
        threads: CPU threads, at most one per core (default: one per core).
    """

    plot: Annotated[Path | None, option("FILE.html")] = None
    threads: Annotated[int | None, option("N", group="the engine", ge=1)] = None

    def check(self) -> None:
        """Refuses a page that cannot be written before anything is measured."""
        report.check_path("--plot", self.plot)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declares the argument for a bundle or a model, and the flags for opening and building it, but ``--seed``."""
    source = options(EngineOptions)["model"]
    parser.add_argument("model", metavar=source.about["metavar"], help=source.help)
    add_flags(parser, EngineOptions, [name for name in _OPENING if name != "seed"])
    add_flags(parser, EngineOptions, BUILD, group=BUILD_GROUP)


def engine_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``Frontend.open``: the flags of :func:`add_engine` that are set."""
    return flag_values(EngineOptions, arguments, ("model", *_OPENING, *BUILD))


def add_sampling(parser: argparse.ArgumentParser, *, length: str, seed: str) -> None:
    """Declares the flags of sampling.

    Args:
        length: the maximum length of outputs in words, if neither the command line nor the model sets it.
        seed: help text of ``--seed``.
    """
    max_tokens = f"maximum number of tokens to generate (default: the model's own, else {length})"
    defaults = dict.fromkeys(GenerationDefaults.__struct_fields__, "the model's own")
    add_flags(parser, SamplingParams, SAMPLING, unset=defaults, max_tokens=max_tokens)
    add_flags(parser, SamplingParams, ("seed",), seed=seed)


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Declares the flags for the speculation of a request."""
    group_of(parser, "speculation").add_argument(
        "--no-speculation", action="store_true", help="decode plainly, for comparison"
    )
    add_flags(parser, Speculative, ("method", "num_speculative_tokens"))


def speculation(arguments: argparse.Namespace, **extra: Any) -> dict[str, Any]:
    """Keys of :class:`~specexport.runtime.speculative.Speculative`: :func:`add_speculation`'s flags, and ``extra``."""
    keys = flag_values(Speculative, arguments, ("method", "num_speculative_tokens", "hypothesis_entropy"))
    if "method" in keys:
        _require_method(arguments, keys["method"])
    keys |= {name: value for name, value in extra.items() if value is not None}
    if not arguments.no_speculation:
        return keys
    if keys:
        raise UsageError(f"{dashed(next(iter(keys)))} was given with --no-speculation; give one of them")
    return {"num_speculative_tokens": 0}


def _require_method(arguments: argparse.Namespace, method: str) -> None:
    """Refuses a method that a model would be built without, before it is built."""
    config = flag_values(EngineOptions, arguments, ("speculative_config",)).get("speculative_config", ())
    name, _, _ = method.partition(":")
    if name not in known():
        return
    if is_bundle(arguments.model):
        if name != method:
            raise RequestError(
                f"--method is {method!r}; expected a name alone, as options are set by --speculative-config {method}",
                param="method",
            )
        return
    if name == method and (not method_type(name).needs_graph or name in {built.name for built in read_methods(config)}):
        return
    example = method if name != method else f"{method}:…"
    raise RequestError(
        f"method is {method!r}, but {arguments.model} would be built without it; name a look-up, or a method to "
        f"build with: --speculative-config {example} --method {name}",
        param="method",
    )
