"""Measure what steps of a bundle cost on this device: ``tune batch``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from specexport.building import progress_bars
from specexport.contract.costs import Cost, CostCurve
from specexport.contract.engines import BACKENDS
from specexport.contract.errors import RequestError
from specexport.runtime.bundle import Bundle
from specexport.runtime.opening import DEFAULT_UTILIZATION, open_backend

if TYPE_CHECKING:
    from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport tune batch``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads it will run with (default: all cores)")
    parser.add_argument("--backend", choices=BACKENDS, help="what will run it (default: what it was built for)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="about how long to measure; three turns at least"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what was measured and change nothing")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport tune batch``."""
    from specexport.tuning.batch import measure, measure_into

    if not arguments.seconds > 0:
        raise RequestError(f"--seconds is {arguments.seconds:g}; expected more than 0")
    with progress_bars() as progress:
        if arguments.dry_run:
            bundle = Bundle.open(arguments.bundle)
            backend = open_backend(bundle, arguments.backend, arguments.threads, DEFAULT_UTILIZATION)
            try:
                curve = measure(bundle, backend, arguments.seconds, progress)
            finally:
                backend.close()
        else:
            curve = measure_into(
                arguments.bundle,
                threads=arguments.threads,
                backend=arguments.backend,
                seconds=arguments.seconds,
                progress=progress,
            )
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(curve), indent=2))
    else:
        Console().print(*tables(curve), sep="\n")
    return 0


def tables(curve: CostCurve) -> list[Table]:
    """A curve at its smallest cache size: steps, then every method that takes time."""
    steps = _table(f"{curve.device}: ms a step of T tokens a slot", "T", curve.steps)
    title = "ms to propose trees of so many nodes"
    return [steps, *(_table(f"{one.method}: {title}", "nodes", one.propose) for one in curve.methods)]


def _table(title: str, axis: str, costs: Sequence[Cost]) -> Table:
    cache = min(cost.cache for cost in costs)
    at = {(cost.batch, cost.tokens): cost.seconds for cost in costs if cost.cache == cache}
    batches, tokens = (sorted({key[place] for key in at}) for place in (0, 1))
    table = Table(title=f"{title}, {cache} cache rows", title_justify="left", show_edge=False)
    table.add_column("slots", justify="right")
    for count in tokens:
        table.add_column(f"{axis} = {count}", justify="right")
    for batch in batches:
        table.add_row(str(batch), *(f"{at[batch, count] * 1e3:.2f}" for count in tokens))
    return table
