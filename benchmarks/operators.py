"""The cost of a step of T tokens by operator.

The target's step graph runs at every T in turns, with 100 tokens in the cache. onnxruntime's profiler times the
operators; as it slows runs down, c(T) is measured without it.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime

from benchmarks import common
from benchmarks.pair import bundle, inflated_pair
from specexport.contract import tensors
from specexport.contract.model import Model
from specexport.runtime.backend import Graph
from specexport.runtime.backends.opening import open_graph
from specexport.runtime.buffers import buffers
from specexport.runtime.bundle import Bundle
from specexport.tables import show

PAST, CHOICES = 100, (4, 1, 2, 3, 6, 8)
PRODUCTS = ("MatMulNBits", "MatMul", "Gemm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks operators``."""
    common.add_common_arguments(parser)
    parser.add_argument("--precisions", default="fp32,int8,int4")
    parser.add_argument("--tokens", default="1,2,3,5,9", help="T, the first to compare the others with")
    parser.add_argument("--rounds", type=int, default=60)


def main(args: argparse.Namespace) -> int:
    """Prints a table a precision."""
    target, draft = inflated_pair(args.models, args.work)
    widths, results = tuple(map(int, args.tokens.split(","))), {}
    for precision in args.precisions.split(","):
        opened = Bundle.open(bundle(target, draft, args.work, precision, CHOICES, 512, 32), check_hashes=False)
        results[precision] = _measured(opened, widths, args.rounds, args.threads)
        names = [f"T = {T}" for T in widths]
        table = common.new_table(
            f"{precision}, µs", ["operator"], [*names, *(f"{T} / {widths[0]}" for T in widths[1:])]
        )
        rows = {"the step": results[precision]["step"], **results[precision]["operators"]}
        products = [rows[name] for name in PRODUCTS if name in rows]
        rows["all but products"] = [
            sum(of_one[at] for of_one in results[precision]["operators"].values())
            - sum(times[at] for times in products)
            for at in range(len(widths))
        ]
        for name, taken in rows.items():
            if max(taken) > 0.005 * max(rows["the step"]):
                ratios = [f"{times / taken[0]:.2f}" for times in taken[1:]]
                table.add_row(name, *(f"{times:.0f}" for times in taken), *ratios)
        show(table)
    common.write_report(args.json, {"machine": common.machine(args.threads), "tokens": widths, "found": results})
    return 0


def _measured(opened: Bundle, widths: tuple[int, ...], rounds: int, threads: int) -> dict[str, Any]:
    """Microseconds of a step and of its operators, slowest first, at each width."""
    model = opened.manifest.target
    graph = _open(opened, model, threads)
    step = [1e6 * statistics.median(times) for times in runs(graph, widths, rounds)]
    with tempfile.TemporaryDirectory() as folder:
        real = onnxruntime.InferenceSession

        def profiled(path: str, options: Any, **named: Any) -> Any:
            options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "profile")
            return real(path, options, **named)

        with patch.object(onnxruntime, "InferenceSession", profiled):
            graph = _open(opened, model, threads)
        runs(graph, widths, rounds)
        events = json.loads(Path(graph._session.end_profiling()).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    starts = sorted(event["ts"] for event in events if event["name"] == "model_run")
    taken: dict[str, list[list[float]]] = defaultdict(lambda: [[0.0] * (len(starts) // len(widths)) for _ in widths])
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            run = bisect.bisect_right(starts, event["ts"]) - 1
            taken[event["args"]["op_name"]][run % len(widths)][run // len(widths)] += event["dur"]
    medians = {name: [statistics.median(runs[1:]) for runs in of_widths] for name, of_widths in taken.items()}
    return {"step": step, "operators": dict(sorted(medians.items(), key=lambda item: -item[1][0]))}


def _open(opened: Bundle, model: Model, threads: int) -> Graph:
    graph = open_graph(opened, model, 1, buffers(opened.manifest.target_signature), threads)
    graph.reserve(PAST + 64)
    return graph


def runs(graph: Graph, widths: tuple[int, ...], rounds: int) -> list[list[float]]:
    """Seconds of every run except the first, for each width, in turns."""
    times: list[list[float]] = [[] for _ in widths]
    for turn in range(rounds + 1):
        for T, of_width in zip(widths, times, strict=True):
            inputs = graph.inputs(T, T)
            inputs[tensors.PAST_LENGTH][:] = PAST
            inputs[tensors.POSITION_IDS][:] = PAST + np.arange(T)
            inputs[tensors.TREE_MASK][:] = np.tri(T, dtype=np.bool_)
            start = time.perf_counter()
            graph.run(T, T)
            if turn:
                of_width.append(time.perf_counter() - start)
    return times
