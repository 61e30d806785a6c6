"""The host's part of a step on a device, in microseconds: the real onnxruntime-gpu over null CUDA libraries.

The device takes no time, so only Python, NumPy and call overhead are measured. All steps are alike, as nothing is ever
accepted. ``--profile`` first shows the functions with the longest times; it slows steps down.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import pstats
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import machine, new_table, write_report
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backends.cuda.device_program import DeviceProgram
from specexport.runtime.request import complete
from specexport.runtime.speculative import PLAIN
from specexport.tables import Table, show
from tests.null_cuda.bindings import NullRuntime, install, speculate_always
from tests.null_cuda.install import ONNXRUNTIME, environment

MAX_SEQ_LEN, K, BATCHES = 1024, 4, (1, 4)
PROMPT_TOKENS = 64
WARM_UP = 32
"""Number of warm-up steps."""
_GIVING = ("cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaGraphLaunch")
PROFILED = 25
"""Number of functions shown by ``--profile``."""
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=5, ignore_eos=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks gpu-host``."""
    parser.add_argument("--bundle", type=Path, help="built for onnxruntime-cuda; the demo pair's unless given")
    parser.add_argument("--models", type=Path, default=Path("examples/models"), help="holds the demo pair")
    parser.add_argument("--work", type=Path, default=Path(".cache/bench"), help="keeps its bundle")
    parser.add_argument("--steps", type=int, default=400, help="of each way")
    parser.add_argument("--profile", action="store_true", help="show which functions the time goes to")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")


def main(args: argparse.Namespace) -> int:
    """Measures in a process with the null GPU's environment, and prints the table."""
    command = [sys.executable, "-m", "benchmarks.gpu_host", str(args.bundle or _demo_bundle(args)), str(args.steps)]
    done = subprocess.run(
        [*command, *(["--profile"] if args.profile else [])],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *profiles, last = done.stdout.splitlines()
    rows = [Row(**row) for row in json.loads(last)]
    print("\n".join(profiles))
    show(_table(rows))
    write_report(
        args.json, {"machine": machine(1) | {"onnxruntime": ONNXRUNTIME}, "rows": [asdict(row) for row in rows]}
    )
    return 0


def _demo_bundle(args: argparse.Namespace) -> Path:
    # Building needs torch, the measuring process does not.
    from benchmarks.pair import built
    from specexport.exporter.options import CompileOptions

    draft = {"method": "draft_model", "model": str(args.models / "demo-draft"), "num_speculative_tokens": [K]}
    return built(
        args.work / f"gpu-host.k{K}.x{max(BATCHES)}",
        args.models / "demo-target",
        methods=(draft,),
        precision="fp32",
        draft_precision="fp32",
        max_seq_len=MAX_SEQ_LEN,
        max_batch_size=max(BATCHES),
        backend="onnxruntime-cuda",
        engines=CompileOptions("onnxruntime-cuda"),
    )


@dataclass(frozen=True)
class Row:
    """Microseconds of ``DeviceProgram.step``: quartiles of the whole, medians of its parts.

    Attributes:
        way: plain or a method.
        sampling: greedy or sampled.
        batch: requests in the step.
        steps: number of measured steps.
        whole: first quartile, median, third quartile.
        before: until the first call that submits work: planning, and writing the inputs.
        device: from there until the device has finished.
        after: reading the results.
    """

    way: str
    sampling: str
    batch: int
    steps: int
    whole: tuple[float, float, float]
    before: float
    device: float
    after: float


class TimedRuntime(NullRuntime):
    """Records when a step first submitted work, and when it last waited for the device."""

    given: float | None = None
    waited = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.profiles: dict[int, cProfile.Profile] | None = None

    def call(self, name: str, types: tuple[Any, ...], *arguments: Any) -> Any:
        if self.given is None and name in _GIVING:
            self.given = time.perf_counter()
            self.profile()
        status = super().call(name, types, *arguments)
        if name == "cudaStreamSynchronize":
            self.waited = time.perf_counter()
        return status

    def profile(self) -> None:
        """Starts profiling this thread, if requested: the stepping thread, and the launching one."""
        if self.profiles is None or threading.get_ident() in self.profiles:
            return
        profile = self.profiles[threading.get_ident()] = cProfile.Profile()
        with contextlib.suppress(ValueError):  # from Python 3.12, the first profiler sees all threads
            profile.enable()


def measure(
    runtime: TimedRuntime, engine: Engine, method: Any, params: SamplingParams, steps: int
) -> list[list[float]]:
    """Seconds of each step of all slots: the whole, before submitting work, until the device finished, and after.

    With a method, only the steps that drafted.
    """
    taken: list[list[float]] = []
    step = DeviceProgram.step

    def timed(program: DeviceProgram, views: Any) -> Any:
        runtime.given = None
        runtime.profile()
        start = time.perf_counter()
        done = step(program, views)
        end = time.perf_counter()
        submitted = start if runtime.given is None else runtime.given
        drafts = any(outcome.drafted for outcome in done.outcomes)
        if len(views) == engine.slots and drafts == (method is not PLAIN):
            taken.append([end - start, submitted - start, runtime.waited - submitted, end - runtime.waited])
        return done

    DeviceProgram.step = timed  # type: ignore[method-assign]
    try:
        prompts = [[7 + slot, *range(20, 19 + PROMPT_TOKENS)] for slot in range(engine.slots)]
        streams = [engine.stream(prompt, params.replace(max_tokens=steps), method) for prompt in prompts]
        for stream in streams:
            stream.start()
        for stream in streams:
            complete(stream)
    finally:
        DeviceProgram.step = step  # type: ignore[method-assign]
    return taken[WARM_UP:]


def _job(folder: str, steps: int, profile: bool) -> list[Row]:
    runtime = install(TimedRuntime())
    speculate_always()
    rows = []
    for batch in BATCHES:
        with Engine.load(folder, backend="onnxruntime-cuda", max_batch_size=batch, calibrate=False) as engine:
            for way in ("plain", next(iter(engine.methods))):
                for sampling, params in SAMPLINGS.items():
                    runtime.profiles = {} if profile else None
                    taken = measure(runtime, engine, PLAIN if way == "plain" else way, params, steps)
                    columns = [[1e6 * seconds for seconds in column] for column in zip(*taken, strict=True)]
                    whole = statistics.quantiles(columns[0], n=4)
                    medians = [statistics.median(column) for column in columns[1:]]
                    rows.append(Row(way, sampling, batch, len(taken), (whole[0], whole[1], whole[2]), *medians))
                    for seconds in (runtime.profiles or {}).values():
                        print(f"{way}, {sampling}, batch {batch}:\n{_slowest(seconds)}")
    return rows


def _slowest(profile: cProfile.Profile) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(PROFILED)
    return text.getvalue()


def _table(rows: Sequence[Row]) -> Table:
    table = new_table(
        "host microseconds a step over null CUDA",
        ("step", "sampling"),
        ("batch", "steps", "quartiles", "median", "plan, write", "launch, wait", "read"),
    )
    for row in rows:
        low, median, high = row.whole
        parts = (f"{part:.0f}" for part in (median, row.before, row.device, row.after))
        table.add_row(row.way, row.sampling, str(row.batch), str(row.steps), f"{low:.0f} to {high:.0f}", *parts)
    return table


if __name__ == "__main__":
    folder, steps, *flags = sys.argv[1:]
    found = _job(folder, int(steps), "--profile" in flags)
    print(json.dumps([asdict(row) for row in found]))
