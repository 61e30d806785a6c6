"""Compile a bundle's graphs into TensorRT engines, on the device that will run them or for it."""

from __future__ import annotations

import argparse
import json
import types
from pathlib import Path

import msgspec
from rich.console import Console

from specexport.commands.build import Bars, build_progress
from specexport.commands.engines import add_engine_arguments, engine_options, render
from specexport.contract.engines import ENGINE_RUNTIMES
from specexport.contract.errors import BuildError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport compile``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument(
        "--backend", choices=ENGINE_RUNTIMES, required=True, help="the library that compiles and runs them"
    )
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def compiler() -> types.ModuleType:
    """The compiler of bundles, or an error that names the extra it needs.

    Raises:
        BuildError: the ``[compile]`` extra is not installed.
    """
    try:
        from specexport.exporter.engines import bundle
    except ImportError as error:
        raise BuildError(
            f"compiling needs the [compile] extra ({error}); install it with: pip install 'specexport[compile]'"
        ) from error
    return bundle


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport compile``."""
    module = compiler()
    with build_progress(Console(stderr=True)) as progress:
        report = module.compile_bundle(arguments.bundle, engine_options(arguments), Bars(progress))
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        Console().print(render(report))
    return 0
