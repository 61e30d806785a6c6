"""``specexport tune lookahead``: W, N and G for this device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from specexport.commands.build import Bars, build_progress
from specexport.commands.measuring import (
    add_measuring_arguments,
    decoded_with,
    open_to_tune,
    read_prompts,
    step_room,
    usual_rows,
)
from specexport.contract.errors import RequestError
from specexport.contract.methods import Lookahead
from specexport.contract.tree import MAX_NODES
from specexport.runtime import Engine

if TYPE_CHECKING:
    from specexport.tuning.lookahead import LookaheadSizes, Measured

_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport tune lookahead``."""
    add_measuring_arguments(parser)
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport tune lookahead``."""
    from specexport.tuning import lookahead as search
    from specexport.tuning import tree as tune

    bundle = open_to_tune(arguments)
    manifest = bundle.manifest
    method = manifest.method(search.NAME)
    if not isinstance(method, Lookahead):
        raise RequestError(f"{arguments.bundle}: built without lookahead decoding; build it with --lookahead first")
    room = step_room(manifest)
    most, seeding = min(arguments.max_nodes, room, MAX_NODES), method.prompt_seeding
    observed = [one for ngram in search.NGRAMS if (one := search.widest(ngram, most, room, seeding)) is not None]
    if not observed:
        raise RequestError(f"{arguments.bundle}: its cache has no room for a step of 2 tokens behind the context")
    now = [method] if max(method.widths()) <= room else []
    widest = max(width for one in (*observed, *now) for width in one.widths())
    params, rows = decoded_with(arguments), usual_rows(arguments, manifest)
    with build_progress(Console(stderr=True)) as progress:
        bars = Bars(progress)
        costs = tune.step_costs(bundle, rows, most, arguments.threads, bars)
        wide = search.any_widths(bundle, widest)
        with Engine.load(wide, threads=arguments.threads, backend="onnxruntime", cost_curve=False) as engine:
            prompts = read_prompts(engine, arguments.data, arguments.prompts, arguments.prompt_tokens)
            ranked = [
                search.candidates(one, *search.observe(engine, one, prompts, params, bars), costs) for one in observed
            ]
            best = [found[0].method for found in ranked]
            tried = [*best, *(one for one in now if _sizes(one) not in map(_sizes, best))]
            measured = dict(zip(map(_sizes, tried), search.measure(engine, tried, prompts, params, bars), strict=True))
    found = sorted((one for some in ranked for one in some), key=lambda one: -one.speed_up)
    chosen = max(tried, key=lambda one: measured[_sizes(one)].speed_up)
    if arguments.json:
        print(json.dumps(_as_dict(found, measured, chosen, costs), indent=2))
    else:
        Console().print(_table(found, measured, chosen, method))
    if arguments.dry_run:
        if not arguments.json:
            print(f"to build with these sizes: --lookahead {_text(chosen)}")
        return 0
    from specexport.exporter.retree import set_lookahead

    set_lookahead(arguments.bundle, chosen)
    if not arguments.json:
        warning = "" if measured[_sizes(chosen)].speed_up > 1 else "; plain decoding is faster on this device"
        print(f"{arguments.bundle}: lookahead decoding has W,N,G = {_text(chosen)} now{warning}")
    return 0


_Sizes = tuple[int, int, int]


def _sizes(method: Lookahead) -> _Sizes:
    return method.window, method.ngram, method.guesses


def _text(method: Lookahead) -> str:
    return ",".join(map(str, _sizes(method)))


def _as_dict(
    found: Sequence[LookaheadSizes], measured: dict[_Sizes, Measured], chosen: Lookahead, costs: Sequence[float]
) -> dict[str, object]:
    return {
        "method": "lookahead",
        "step_ms": [round(cost * 1e3, 4) for cost in costs],
        "expected": [
            {
                "lookahead": _sizes(one.method),
                "nodes": max(one.method.widths()),
                "tokens_per_step": one.tokens,
                "step_ms": one.seconds * 1e3,
                "speed_up": one.speed_up,
            }
            for one in found
        ],
        "measured": [
            {"lookahead": sizes, "tokens_per_step": one.tokens, "speed_up": one.speed_up}
            for sizes, one in measured.items()
        ],
        "chosen": _sizes(chosen),
    }


def _table(
    found: Sequence[LookaheadSizes], measured: dict[_Sizes, Measured], chosen: Lookahead, now: Lookahead
) -> Table:
    table = Table(title="lookahead: the best sizes, and those that were run", title_justify="left", show_edge=False)
    for column in ("W,N,G", "nodes", "tokens a step", "step ms", "against plain", "run: tokens", "run: against plain"):
        table.add_column(column, justify="right")
    expected = {_sizes(one.method): one for one in found}
    shown = dict.fromkeys((*list(expected)[:_SHOWN], *measured))
    for sizes in shown:
        one, ran = expected.get(sizes), measured.get(sizes)
        method = Lookahead.of(*sizes, now.prompt_seeding)
        table.add_row(
            _text(method) + (" (now)" if sizes == _sizes(now) else ""),
            str(max(method.widths())),
            *((f"{one.tokens:.2f}", f"{one.seconds * 1e3:.2f}", f"{one.speed_up:.2f}x") if one else ("", "", "")),
            *((f"{ran.tokens:.2f}", f"{ran.speed_up:.2f}x") if ran else ("", "")),
            style="bold" if sizes == _sizes(chosen) else None,
        )
    return table
