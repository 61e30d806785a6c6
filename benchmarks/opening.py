"""The time from starting Python to a text's first token, and the memory of a process that decodes.

Each opening is a process of its own. The first one packs the weights, the others map what it packed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.pair import bundle, inflated_pair
from specexport.tables import show

CHOICES = tuple(range(1, 9))
PARTS = ("import", "load", "first_token")
_PROCESS = """
import json, sys, time
started = time.perf_counter()
from specexport.runtime import Engine, SamplingParams
imported = time.perf_counter()
engine = Engine.load(sys.argv[1], threads=int(sys.argv[2]))
loaded = time.perf_counter()
stream = engine.stream(sys.argv[3], SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
next(stream)
seconds = (imported - started, loaded - imported, time.perf_counter() - loaded)
for _ in stream:
    pass
resident = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))
drafts = [(p.graph, p.method.draft) for p in engine.proposers.values() if p.method.draft is not None]
models = [(engine._target, engine.manifest.target), *drafts]
caches = sum(engine.slots * graph.cache_rows * model.cache_row_bytes for graph, model in models)
print(json.dumps({"seconds": seconds, "resident": resident, "caches": caches}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks opening``."""
    common.add_common_arguments(parser)
    parser.add_argument("--precisions", default="fp32,int8,int4")
    parser.add_argument("--repeats", type=int, default=7, help="openings that are timed")


def main(args: argparse.Namespace) -> int:
    """Prints a line for each precision."""
    target, draft = inflated_pair(args.models, args.work)
    results = {}
    for precision in args.precisions.split(","):
        folder = bundle(target, draft, args.work, precision, CHOICES, 512, 32)
        results[precision] = _measure(folder, common.read_texts(args.prompts)[0][:60], args)
    table = common.new_table("seconds", ["weights"], ["first opening", *PARTS, "in all", "memory / weights and caches"])
    for precision, row in results.items():
        seconds = [f"{sum(row['first']):.2f}", *(f"{row[part]:.2f}" for part in PARTS), f"{row['seconds']:.2f}"]
        table.add_row(precision, *seconds, f"{row['resident'] / (row['weights'] + row['caches']):.2f}")
    show(table)
    common.write_report(args.json, {"machine": common.machine(args.threads), "results": results})
    return 0


def _measure(folder: Path, prompt: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.work) as cache:
        environment = {**os.environ, "SPECEXPORT_CACHE": cache}
        command = [sys.executable, "-c", _PROCESS, str(folder), str(args.threads), prompt]

        def opened() -> dict[str, Any]:
            printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            return dict(json.loads(printed))

        first = opened()
        runs = [opened() for _ in range(args.repeats)]
    return {
        "first": first["seconds"],
        **{part: statistics.median(run["seconds"][i] for run in runs) for i, part in enumerate(PARTS)},
        "seconds": statistics.median(sum(run["seconds"]) for run in runs),
        "resident": statistics.median(run["resident"] for run in runs),
        "caches": runs[0]["caches"],
        "weights": sum(path.stat().st_size for path in folder.rglob("weights*.bin")),
    }
