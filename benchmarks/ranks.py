"""The cost of a step with the target split among processes, against one process with as many cores."""

from __future__ import annotations

import argparse
import statistics

from benchmarks import common
from benchmarks.kernels import PAST, runs
from benchmarks.pair import built, inflated_pair
from specexport.runtime.backend import BackendOptions, open_backend
from specexport.runtime.bundle import Bundle
from specexport.tables import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks ranks``."""
    common.add_common_arguments(parser)
    parser.add_argument("--precisions", default="fp32,int8")
    parser.add_argument("--ranks", default="2", help="processes to compare with one")
    parser.add_argument("--tokens", default="1,5")
    parser.add_argument("--rounds", type=int, default=80)


def main(args: argparse.Namespace) -> int:
    """Prints the milliseconds of a step for each number of processes, measured in turns."""
    target, _ = inflated_pair(args.models, args.work)
    widths = tuple(map(int, args.tokens.split(",")))
    counts = (1, *map(int, args.ranks.split(",")))
    table = common.new_table("a step, ms", ["precision", "processes"], [f"T = {T}" for T in widths])
    step_ms = {}
    for precision in args.precisions.split(","):
        backends, graphs = [], []
        for count in counts:
            out = args.work / f"{target.name}.{precision}.ranks{count}"
            folder = built(out, target, precision=precision, tensor_parallel=count, max_seq_len=512, max_batch_size=1)
            opened = Bundle.open(folder, check_hashes=False)
            backends.append(open_backend(opened, BackendOptions(threads=args.threads, keep=True)))
            model, signature = opened.manifest.target, opened.manifest.target_signature
            graphs.append(backends[-1].open(model, 1, signature.buffers))
            graphs[-1].reserve(PAST + 64)
        times: list[list[list[float]]] = [[[] for _ in widths] for _ in counts]
        for _ in range(8):
            for graph, of_graph in zip(graphs, times, strict=True):
                for of_width, more in zip(of_graph, runs(graph, widths, args.rounds // 8), strict=True):
                    of_width += more
        for backend in backends:
            backend.close()
        for count, of_graph in zip(counts, times, strict=True):
            taken = [1e3 * statistics.median(of_width) for of_width in of_graph]
            step_ms[f"{precision}, {count}"] = taken
            table.add_row(precision, str(count), *(f"{ms:.1f}" for ms in taken))
    show(table)
    common.write_report(args.json, {"machine": common.machine(args.threads), "tokens": widths, "found": step_ms})
    return 0
