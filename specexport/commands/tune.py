"""Measure a bundle on this device and set what suits it: ``tune tree`` chooses the token tree, ``tune batch`` how much
a batch speculates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from specexport.building import progress_bars
from specexport.commands import tune_batch
from specexport.commands.draw import terminal_tree
from specexport.commands.measuring import (
    add_measuring_arguments,
    decoded_with,
    open_to_tune,
    read_prompts,
    step_room,
    usual_rows,
)
from specexport.contract.errors import RequestError
from specexport.contract.methods import RankedMethod
from specexport.runtime import Engine

if TYPE_CHECKING:
    from specexport.tuning.tree import TreeCandidate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what ``specexport tune`` can tune."""
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    tree = what.add_parser(
        "tree",
        help="the token tree of a method",
        description="Decode text with a method, see which of its candidates come true, time steps of every width, and "
        "make the tree that commits most tokens a second the method's default.",
    )
    tree.add_argument("--method", metavar="NAME", help="which of the bundle's (default: its first)")
    add_measuring_arguments(tree)
    tree.set_defaults(main=main)
    batch = what.add_parser(
        "batch",
        help="how much requests speculate that run together",
        description="Time steps of every width and proposals at every batch size, and keep the figures in the bundle. "
        "Engines on this device with as many threads then speculate as much as pays: less as the batch fills, and not "
        "at all where it does not.",
    )
    tune_batch.add_arguments(batch)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport tune tree``."""
    from specexport.tuning import tree as tune

    bundle = open_to_tune(arguments)
    manifest = bundle.manifest
    if not manifest.methods:
        raise RequestError(f"{arguments.bundle}: built without a way to speculate; there is no tree to tune")
    method = manifest.methods[0] if arguments.method is None else manifest.method(arguments.method)
    if method is None:
        there = ", ".join(one.name for one in manifest.methods)
        raise RequestError(f"--method is {arguments.method!r}; the bundle has {there}", param="method")
    name = method.name
    if not isinstance(method, RankedMethod) or not method.branching:
        raise RequestError(
            f"--method is {name!r}, whose steps follow from its options; there is no tree to tune. To verify others, "
            "build with other options",
            param="method",
        )
    if manifest.program or manifest.engines:
        raise RequestError(
            f"{arguments.bundle}: is built for {manifest.backend}; its step program and engines are made for them, "
            "so that none can be exchanged. Tune a bundle built for onnxruntime and build this one with the tree found"
        )
    with progress_bars() as bars:
        with Engine.load(
            arguments.bundle, threads=arguments.threads, check_hashes=False, cost_curve=False, backend="onnxruntime"
        ) as engine:
            prompts = read_prompts(engine, arguments.data, arguments.prompts, arguments.prompt_tokens)
            observed = tune.observe(engine, name, prompts, decoded_with(arguments), bars)
        most = min(arguments.max_nodes, step_room(manifest))
        costs = tune.step_costs(bundle, usual_rows(arguments, manifest), most, arguments.threads, bars)
    found = tune.candidates(method, observed, costs)
    if not found:
        raise RequestError("no candidate ever came true on this text, so that no tree helps; nothing was changed")
    best = found[0]
    if arguments.json:
        print(json.dumps(_as_dict(name, found, costs), indent=2))
    else:
        console = Console()
        console.print(_table(name, found, costs))
        console.print(terminal_tree(best.tree))
    if arguments.dry_run:
        return 0
    from specexport.exporter.retree import set_default_tree

    set_default_tree(arguments.bundle, name, best.tree)
    if not arguments.json:
        warning = "" if best.speed_up > 1 else "; plain decoding is faster on this device"
        Console().print(f"{arguments.bundle}: {name} verifies {len(best.tree)} nodes a step by default now{warning}")
    return 0


def _as_dict(name: str, found: list[TreeCandidate], costs: Sequence[float]) -> dict[str, object]:
    return {
        "method": name,
        "step_ms": [round(cost * 1e3, 4) for cost in costs],
        "trees": [
            {
                "choices": one.tree.choices,
                "tokens_per_step": one.tokens,
                "step_ms": one.seconds * 1e3,
                "tokens_per_second": one.tokens_per_second,
                "speed_up": one.speed_up,
            }
            for one in found
        ],
    }


def _table(name: str, found: list[TreeCandidate], costs: Sequence[float]) -> Table:
    table = Table(title=f"{name}: the best tree of each size", title_justify="left", show_edge=False)
    for column in ("nodes", "depth", "tokens a step", "c(T) ms", "step ms", "tokens/s", "against plain"):
        table.add_column(column, justify="right")
    for one in sorted(found, key=lambda one: len(one.tree)):
        table.add_row(
            str(len(one.tree)),
            str(one.tree.depth),
            f"{one.tokens:.2f}",
            f"{costs[len(one.tree) - 1] * 1e3:.2f}",
            f"{one.seconds * 1e3:.2f}",
            f"{one.tokens_per_second:.1f}",
            f"{one.speed_up:.2f}x",
            style="bold" if one is found[0] else None,
        )
    return table
