"""Suggest ways to speculate for a target, and compare bundles of it by measurement."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specexport.building import exporter, progress_bars
from specexport.contract.errors import RequestError
from specexport.runtime import Engine
from specexport.tuning import workloads
from specexport.tuning.bench import compare

_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 3, 128, 64
_UNATTENDED_WIDTH = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport suggest``."""
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="Hugging Face folder or hub id")
    parser.add_argument(
        "--draft", action="append", default=[], metavar="DIR_OR_ID", help="a smaller model to choose from; repeatable"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where the bundle is to run")
    parser.add_argument(
        "--bundle",
        type=Path,
        action="append",
        default=[],
        metavar="BUNDLE",
        help="measure this bundle's methods here and rank them; repeatable",
    )
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE.jsonl", help="what to measure on, as for bench")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport suggest``."""
    if arguments.data is not None and not arguments.bundle:
        raise RequestError("--data was given without --bundle; it is what bundles are measured on")
    exporter()
    from specexport.exporter.suggest import suggest

    advice = suggest(arguments.target, arguments.draft, arguments.device)
    console = Console(width=None if sys.stdout.isatty() else _UNATTENDED_WIDTH)
    table = Table(title=f"{arguments.target}: {advice.parameters:,} parameters, on a {arguments.device}")
    for column in ("method", "settings", "why"):
        table.add_column(column)
    for one in advice.suggestions:
        table.add_row(one.method, one.settings, one.why)
    console.print(table)
    for name, reason in advice.refused.items():
        console.print(f"not {name}: {reason}", soft_wrap=True)
    flags = [flag for one in advice.suggestions for flag in one.flags]
    words = ["specexport", "build", "--target", arguments.target, *flags, "-o", "bundle/"]
    console.print("\n" + shlex.join(words), soft_wrap=True)
    if arguments.bundle:
        console.print(_measured(arguments))
    return 0


def _measured(arguments: argparse.Namespace) -> Table:
    """Every method of every bundle on this machine, the fastest first on each workload."""
    found: list[tuple[str, float, float, str, str]] = []
    with progress_bars() as progress:
        for bundle in arguments.bundle:
            with Engine.load(bundle, threads=arguments.threads, cost_curve=False) as engine:
                if arguments.data is None:
                    tasks = workloads.built_in(engine.encode, _PROMPTS, _PROMPT_TOKENS)
                else:
                    tasks = workloads.read(engine.encode, arguments.data, _PROMPTS, _PROMPT_TOKENS)
                for row in compare(engine, list(engine.methods), tasks, _NEW_TOKENS, progress):
                    for workload, result in row.results.items():
                        speed = result.tokens / result.seconds
                        found.append((workload, speed, result.speed_up, row.method, str(bundle)))
    table = Table(title="measured here, greedy")
    for column in ("workload", "bundle", "method", "tokens/s", "against plain"):
        table.add_column(column)
    for workload, speed, gain, method, bundle in sorted(found, key=lambda row: (row[0], -row[1])):
        table.add_row(workload, bundle, method, f"{speed:.1f}", f"{gain:.2f}x")
    return table
