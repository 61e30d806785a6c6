"""Compare a bundle's methods on this machine: tokens a step, speed-up, memory, and that texts are equal.

Example:
    specexport bench qwen3/ --methods draft_model,ngram --data prompts.jsonl --plot bench.html
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from specexport import report
from specexport.building import progress_bars
from specexport.commands import PlottedCommand, engine_flags
from specexport.commands.draw import about
from specexport.commands.inspect import bytes_text
from specexport.contract.options import option
from specexport.flags import add_flags, from_flags
from specexport.options import EngineOptions
from specexport.runtime import Engine
from specexport.tables import Table, show
from specexport.tuning.bench import DEFAULT, MethodRow, built_in_tasks, compare, read_tasks


class _BenchCommand(PlottedCommand, frozen=True, kw_only=True):
    """Options of ``specexport bench``.

    Attributes:
        methods: methods the bundle was built for and those that need no graph, each with its default tree; 'default' is
            a request that names none, whose steps draft as many tokens as pay.
        data: lines such as {"workload": "chat", "text": "...", "hypothesis": "..."}, the last two optional (default:
            code completion, copying edits and prose, made of Python's own sources and help texts).
        prompts: prompts of each workload.
        prompt_tokens: most tokens of a prompt.
        max_tokens: tokens to generate for each.
    """

    methods: Annotated[str, option("NAME[,NAME...]")] = "all"
    data: Annotated[tuple[Path, ...], option("FILE.jsonl")] = ()
    prompts: Annotated[int, option("N", ge=1)] = 4
    prompt_tokens: Annotated[int, option("N", ge=2)] = 128
    max_tokens: Annotated[int, option("N", short="-n", ge=2)] = 64


_ENGINE = ("calibrate", "threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport bench``."""
    add_flags(parser, _BenchCommand)
    add_flags(parser, EngineOptions, _ENGINE, group="the engine")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport bench``; returns 1 if a method's text differs from plain decoding's."""
    command = from_flags(_BenchCommand, arguments)
    report.check_path("--plot", command.plot)
    with Engine.load(command.bundle, **engine_flags(arguments, _ENGINE)) as engine:
        names = command.methods.split(",")
        if command.methods == "all":
            names = [*([DEFAULT] if engine.costs is not None else []), *engine.methods]
        sizes = (command.prompts, command.prompt_tokens)
        if not command.data:
            tasks = built_in_tasks(engine.encode, *sizes)
        else:
            tasks = read_tasks(engine.encode, command.data, *sizes)
        with progress_bars() as progress:
            rows = compare(engine, names, tasks, command.max_tokens, progress)
        device, manifest = engine.backend.device, engine.manifest
    comparison = table(rows, list(dict.fromkeys(task.workload for task in tasks)))
    if command.json:
        print(json.dumps({"bundle": str(command.bundle), "rows": [_as_dict(row) for row in rows]}, indent=2))
    else:
        show(comparison)
    if command.plot is not None:
        speed = _bars("tokens a second over plain decoding's", rows, "speed_up", ("plain", 1.0))
        charts = (report.Figure("Speed-up", speed), report.Figure("Acceptance length", _bars("tokens a step", rows)))
        parts = (device, comparison, *charts, *about(command.bundle, manifest))
        report.write(command.plot, f"bench: {command.bundle}", parts)
    for row in rows:
        for workload, result in row.results.items():
            if result.contradictory:
                print(
                    f"{row.method}: {workload}: {result.speed_up:.2f}x cannot come of {result.tokens_per_step:.2f} "
                    "tokens a step: another process ran beside plain decoding; measure again on an idle machine",
                    file=sys.stderr,
                )
            if result.differences:
                print(
                    f"{row.method}: {workload}: {len(result.differences)} of {result.requests} texts part from plain "
                    f"decoding's, the first after {min(result.differences)} tokens; 'specexport verify' says whether "
                    "two tokens tied there",
                    file=sys.stderr,
                )
    return 0 if all(row.lossless for row in rows) else 1


def table(rows: list[MethodRow], names: list[str]) -> Table:
    """The rows, with tokens a step and the speed-up over plain decoding for each workload."""
    comparison = Table(
        "greedy, in turns with plain decoding: tokens a step, speed-up",
        ("method", "training", "extra memory", *names, "lossless"),
        "lll" + "r" * len(names) + "l",
    )
    for row in rows:
        cells = [
            f"{result.tokens_per_step:.2f}, {result.speed_up:.2f}x" if (result := row.results.get(name)) else "-"
            for name in names
        ]
        requests = sum(result.requests for result in row.results.values())
        tokens = sum(result.tokens for result in row.results.values())
        differing = sum(len(result.differences) for result in row.results.values())
        lossless = f"yes: {tokens} tokens" if row.lossless else f"{differing} of {requests} part"
        verdict = lossless if requests else "not tried"
        memory = bytes_text(row.memory) if row.memory else "none"
        name = row.method
        if name == DEFAULT:
            name += ": " + ", ".join(f"{name} {steps}" for name, steps in row.chosen.items())
        comparison.add_row(name, row.training or "none", memory, *cells, verdict)
    return comparison


def _bars(
    label: str, rows: list[MethodRow], name: str = "tokens_per_step", level: tuple[str, float] | None = None
) -> str:
    """A bar chart of a figure of every method on every workload."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        for workload, result in row.results.items():
            groups.setdefault(workload, {})[row.method] = getattr(result, name)
    return report.bars(label, groups, level)


def _as_dict(row: MethodRow) -> dict[str, Any]:
    results = {
        name: asdict(result)
        | {
            "tokens_per_step": result.tokens_per_step,
            "speed_up": result.speed_up,
            "contradictory": result.contradictory,
        }
        for name, result in row.results.items()
    }
    about: dict[str, Any] = {"method": row.method, "training": row.training, "extra_memory_bytes": row.memory}
    about |= {"steps_by_method": dict(row.chosen)}
    return about | {"lossless": row.lossless, "workloads": results}
