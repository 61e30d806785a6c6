"""Compile a bundle's graphs into TensorRT engines, for this device or another."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
from rich.console import Console

from specexport.building import needs_extra, progress_bars
from specexport.commands.engines import add_engine_arguments, engine_options, render
from specexport.contract.engines import ENGINE_RUNTIMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport compile``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder made by specexport build")
    parser.add_argument(
        "--backend", choices=ENGINE_RUNTIMES, required=True, help="the library that compiles the engines and runs them"
    )
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport compile``."""
    with needs_extra("compiling", "compile"):
        from specexport.exporter.engines.bundle import compile_bundle
    with progress_bars() as progress:
        report = compile_bundle(arguments.bundle, engine_options(arguments), progress)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        Console().print(render(report))
    return 0
