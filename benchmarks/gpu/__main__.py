"""Checks and measures onnxruntime-cuda on a machine with a GPU, in two steps.

    python scripts/gpu_acceptance.py --prepare DIR      where torch is: builds and packs what the checks need
    python scripts/gpu_acceptance.py --bundles DIR      where the GPU is: nothing is built, and no torch is needed

Results are written after every check, and another run on the same kind of GPU, with the same ``--json``, does the
missing checks. A check during which a run was killed counts as failed; ``--only`` repeats it. With ``--rehearse`` the
second step runs without a GPU, over CUDA libraries that do nothing; its numbers mean nothing.

Exits with 0 if nothing failed, with 1 if a check failed, and with 2, without any check, if there is no GPU or
no prepared bundle.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import checks
from benchmarks.gpu.checks import Finding
from benchmarks.gpu.prepared import KINDS, PAIRS, TINY, prepare, unpacked
from specexport.contract.errors import SpecExportError
from specexport.runtime.backends.cuda import ort
from specexport.runtime.backends.cuda.api import Cuda
from specexport.runtime.machine import cpu_name

ROOT = Path(__file__).resolve().parents[2]
NULL = "Null GPU"
PASS, FAIL, NOT_MEASURED = "pass", "fail", "not measured"


@dataclass(frozen=True)
class DeviceCheck:
    """One check.

    Attributes:
        name: for ``--only``, as ``kind:bundle``.
        seconds: estimated upper bound of its run time.
        run: runs the check.
        numbers: whether it depends on kernels that really compute.
        module: a module that it needs besides the runtime; empty for none.
    """

    name: str
    seconds: float
    run: Callable[[], list[Finding]]
    numbers: bool = True
    module: str = ""

    @property
    def bundle(self) -> str:
        """The bundle that it needs."""
        return self.name.partition(":")[2]


def plan(bundles: Path, texts: list[str], models: Path) -> list[DeviceCheck]:
    """All checks, most valuable first."""

    def each(
        kind: Callable[..., list[Finding]], names: Sequence[str], seconds: float, *more: Any, **options: Any
    ) -> Iterator[DeviceCheck]:
        for name in names:
            yield DeviceCheck(
                f"{kind.__name__}:{name}", seconds, functools.partial(kind, bundles / name, *more), **options
            )

    drafted, hybrids = ("draft", "target", "accept"), ("hybrid-fp32-native", "hybrid-fp32-portable")
    return [
        *each(checks.loads, [*TINY, *KINDS, *PAIRS], 40, numbers=False),
        *each(checks.parity, [*TINY, *KINDS], 40, texts),
        *each(checks.capture, ["draft-fp16", "draft-int4", "medusa-fp16", "portable-fp16"], 60, texts),
        *each(checks.tree_commit, [*hybrids, "medusa-fp16", "portable-fp16"], 20, texts),
        *each(checks.together, ["batch-fp32", *hybrids], 40, texts),
        *each(checks.pair, ["1b-fp16", "1b-int4"], 120, texts),
        *each(checks.events, ["draft-fp16", "draft-int8", "draft-int4", "v150k-fp16"], 40, texts, drafted),
        *each(checks.events, ["medusa-fp16"], 40, texts, ("target", "accept")),
        *each(checks.memory, PAIRS, 40, numbers=False),
        *each(checks.transformers, ["draft-fp16", "1b-fp16"], 120, texts, models, module="transformers"),
        *each(checks.sampled, ["draft-fp32", "medusa-fp16"], 60, texts),
        *each(checks.oracle, ["draft-fp32"], 60, texts, models, module="transformers"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares or checks; see the module."""
    args = _parser().parse_args(arguments)
    if args.prepare is not None:
        prepare(args.prepare, args.models, [name for name in args.pack.split(",") if name])
        return 0
    if args.rehearse:
        from tests.null_cuda.bindings import NullRuntime, install, speculate_always
        from tests.null_cuda.install import environment

        if "NULL_CUDA_ZEROS" not in os.environ:
            again = [sys.executable, str(ROOT / "scripts" / "gpu_acceptance.py"), *(arguments or sys.argv[1:])]
            return subprocess.run(again, env=environment(), check=False).returncode
        install(NullRuntime())
        speculate_always()
    try:
        cuda = Cuda.load()
        machine = _machine(cuda)
    except SpecExportError as error:
        print(f"no GPU can be used here, so nothing was checked: {error}")
        return 2
    print(*(f"{name}: {value}" for name, value in machine.items()), sep="\n", flush=True)
    try:
        bundles = unpacked(args.bundles)
    except ValueError as error:
        print(f"nothing was checked: {error}")
        return 2
    texts = [json.loads(line)["text"] for line in args.prompts.read_text(encoding="utf-8").splitlines()][: args.texts]
    results: dict[str, dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else {}
    _run(args, plan(bundles, texts, args.models), machine, results)
    print(table(results))
    return 1 if any(result["status"] == FAIL for result in results.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--prepare", type=Path, metavar="DIR", help="build and pack the bundles into this folder")
    mode.add_argument("--bundles", type=Path, metavar="DIR", help="check with what was prepared there")
    parser.add_argument("--pack", default="", metavar="NAMES", help="bundles to prepare (default: all)")
    parser.add_argument("--rehearse", action="store_true", help="check over CUDA libraries that do nothing")
    parser.add_argument("--only", default="", help="names, or the kinds before their colons, with commas between")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; begins nothing that would not fit")
    parser.add_argument(
        "--json", type=Path, default=Path("gpu-acceptance.json"), help="results, written and gone on with"
    )
    parser.add_argument("--models", type=Path, default=ROOT / "examples" / "models")
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples" / "prompts" / "held_out.jsonl")
    parser.add_argument("--texts", type=int, default=8, help="of the prompts (default: 8)")
    return parser


def _run(
    args: argparse.Namespace, all_checks: list[DeviceCheck], machine: dict[str, str], results: dict[str, Any]
) -> None:
    """Runs the requested checks without results, and writes each result immediately.

    Raises:
        SystemExit: ``--only`` names no check.
    """
    began, wanted = time.monotonic(), [name for name in args.only.split(",") if name]
    known = {name for check in all_checks for name in (check.name, check.name.partition(":")[0])}
    if unknown := sorted(set(wanted) - known):
        raise SystemExit(
            f"--only names {unknown[0]!r}; expected some of {', '.join(check.name for check in all_checks)}"
        )
    for check in all_checks:
        if wanted and not {check.name, check.name.partition(":")[0]} & set(wanted):
            continue
        before = results.get(check.name, {})
        if before.get("status") in (PASS, FAIL) and before["gpu"] == machine["gpu"] and not wanted:
            continue
        left = args.budget - (time.monotonic() - began)
        result: dict[str, Any] = {"date": _now(), **machine, "findings": []}
        # Overwritten when the check ends; remains if the process is killed.
        results[check.name] = {**result, "status": FAIL, "reason": "the run ended in this check"}
        if check.seconds > left:
            result |= {"status": NOT_MEASURED, "reason": f"{left:.0f} s are left and it may take {check.seconds:.0f}"}
        else:
            _write(args.json, results)
            result |= _result(check, args.bundles, machine["gpu"])
        results[check.name] = result
        _write(args.json, results)
        print(f"{check.name}: {result['status']} {result['reason']}".rstrip(), flush=True)


def _result(check: DeviceCheck, bundles: Path, gpu: str) -> dict[str, Any]:
    """The result of a check; its exceptions become its result and do not affect other checks."""
    if not (bundles / "bundles" / check.bundle).exists():
        return {"status": NOT_MEASURED, "reason": f"bundle {check.bundle} was not prepared"}
    if check.module and importlib.util.find_spec(check.module) is None:
        return {"status": NOT_MEASURED, "reason": f"{check.module} is not installed"}
    start = time.monotonic()
    try:
        findings = check.run()
    except Exception as error:
        traceback.print_exc()
        return {"status": FAIL, "reason": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
    result = {"findings": [asdict(finding) for finding in findings], "seconds": round(time.monotonic() - start, 1)}
    if gpu.startswith(NULL) and check.numbers:
        return {**result, "status": NOT_MEASURED, "reason": "ran, but kernels compute nothing here", "findings": []}
    return {**result, "status": FAIL if any(finding.passed is False for finding in findings) else PASS, "reason": ""}


def _machine(cuda: Cuda) -> dict[str, str]:
    onnxruntime = ort.import_onnxruntime()
    driver, runtime = (cuda.call(f"cuda{name}GetVersion") for name in ("Driver", "Runtime"))
    return {
        "gpu": f"{cuda.device}, {cuda.device.total / 2**30:.1f} GiB",
        "cuda": f"driver for {driver // 1000}.{driver % 1000 // 10}, runtime {runtime // 1000}.{runtime % 1000 // 10}",
        "libraries": f"onnxruntime {onnxruntime.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}",
        "cpu": cpu_name(),
    }


def _write(path: Path, results: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a table, with a line per check and per finding."""
    marks = {True: PASS, False: FAIL, None: ""}
    lines = []
    for name, result in results.items():
        lines.append(f"{name:<28} {result['status']:<13} {result['reason']}".rstrip())
        for finding in result["findings"]:
            bar = f" ({finding['expected']})" if finding["expected"] else ""
            lines.append(f"    {finding['name']:<54} {finding['found']}{bar} {marks[finding['passed']]}".rstrip())
    statuses = [result["status"] for result in results.values()]
    lines.append(", ".join(f"{statuses.count(status)} {status}" for status in (PASS, FAIL, NOT_MEASURED)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
