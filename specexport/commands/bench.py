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
from typing import Any

from specexport import report
from specexport.building import progress_bars
from specexport.commands import add_calibrate, add_report, add_threads
from specexport.commands.draw import about
from specexport.commands.inspect import bytes_text
from specexport.contract.errors import RequestError
from specexport.runtime import Engine
from specexport.tables import Table, show
from specexport.tuning import workloads
from specexport.tuning.bench import DEFAULT, MethodRow, compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport bench``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder written by specexport build")
    parser.add_argument(
        "--methods",
        default="all",
        metavar="NAME[,NAME...]",
        help="methods the bundle was built for and those that need no graph, each with its default tree; 'default' is "
        "a request that names none, whose steps draft as many tokens as pay",
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="FILE.jsonl",
        help='lines such as {"workload": "chat", "text": "...", "hypothesis": "..."}, the last two optional (default: '
        "code completion, copying edits and prose, made of Python's own sources and help texts)",
    )
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="prompts of each workload")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="most tokens of a prompt")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N", help="tokens to generate for each")
    add_calibrate(parser)
    add_threads(parser)
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    add_report(parser, "--plot")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport bench``; returns 1 if a method's text differs from plain decoding's."""
    for flag, least in (("prompts", 1), ("prompt_tokens", 2), ("max_tokens", 2), ("threads", 1)):
        value = getattr(arguments, flag)
        if value is not None and value < least:
            raise RequestError(f"--{flag.replace('_', '-')} is {value}; expected {least} or more")
    report.check_path("--plot", arguments.plot)
    with Engine.load(arguments.bundle, threads=arguments.threads, calibrate=arguments.calibrate) as engine:
        names = arguments.methods.split(",")
        if arguments.methods == "all":
            names = [*([DEFAULT] if engine.costs is not None else []), *engine.methods]
        sizes = (arguments.prompts, arguments.prompt_tokens)
        if arguments.data is None:
            tasks = workloads.built_in(engine.encode, *sizes)
        else:
            tasks = workloads.read(engine.encode, arguments.data, *sizes)
        with progress_bars() as progress:
            rows = compare(engine, names, tasks, arguments.max_tokens, progress)
        device, manifest = engine.backend.device, engine.manifest
    comparison = table(rows, list(dict.fromkeys(task.workload for task in tasks)))
    if arguments.json:
        print(json.dumps({"bundle": str(arguments.bundle), "rows": [_as_dict(row) for row in rows]}, indent=2))
    else:
        show(comparison)
    if arguments.plot is not None:
        speed = _bars("tokens a second over plain decoding's", rows, "speed_up", ("plain", 1.0))
        charts = (report.Figure("Speed-up", speed), report.Figure("Acceptance length", _bars("tokens a step", rows)))
        parts = (device, comparison, *charts, *about(arguments.bundle, manifest))
        report.write(arguments.plot, f"bench: {arguments.bundle}", parts)
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
