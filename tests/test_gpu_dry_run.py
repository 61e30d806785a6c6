"""Bundles of every kind on the real onnxruntime-gpu over null CUDA libraries: what is launched, captured and taken.

``make gpu-dry-run`` runs this alone. Kernels do nothing, so no number means anything; what is called does. After a
change of what is launched, ``SPECEXPORT_DRY_RUN=record`` writes what is found into ``gpu_dry_run_budget.json``;
``SPECEXPORT_DRY_RUN=full`` runs every combination instead of those that ``tests.null_cuda.bundles`` chooses.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock

from specexport.contract.methods import known, method_type
from tests.null_cuda import bundles, log
from tests.null_cuda.install import UnavailableError, environment

pytestmark = pytest.mark.exporter

BUDGET = Path(__file__).with_name("gpu_dry_run_budget.json")
RECORD = os.environ.get("SPECEXPORT_DRY_RUN") == "record"
ACCEPT_LAUNCHES = {"greedy": 60, "sampled": 200}
"""Most launches of a step's acceptance, whatever is recorded."""
COUNTED = (*log.ROLES, "graphs", "waits")
_SHOWN = 3
_SECONDS = 240


@pytest.fixture(scope="module")
def null_gpu() -> dict[str, str]:
    """The variables of a process with the real onnxruntime-gpu and no GPU."""
    try:
        return environment()
    except UnavailableError as error:
        pytest.skip(str(error))


def test_every_method_is_there():
    ours = {name for name in known() if method_type(name).__module__.startswith("specexport.methods.")}
    built = {method["method"] for kind in bundles.KINDS for method in bundles.methods(kind, Path("checkpoints"))}
    assert ours <= built
    assert {name.split("-")[0] for name, _ in bundles.CHOSEN} == set(bundles.KINDS)


@pytest.mark.parametrize(("name", "slots"), bundles.cells())
def test_dry_run(name, slots, dry_run_bundle, null_gpu, tmp_path):
    """Loads, prefills, and steps every method greedily and sampled, on the thread that loaded it and on others; times
    steps as on load.
    """
    calls, text = tmp_path / "calls.log", tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.null_cuda.dry_run", str(dry_run_bundle(name)), str(slots), str(text)]
    environment = {**null_gpu, "NULL_CUDA_LOG": str(calls)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(text.read_text(encoding="utf-8"))
    (report,) = log.reports(log.read(calls))
    calls.unlink()  # megabytes
    used = counted(report)
    cell = f"{name} x{slots}"
    if RECORD:
        record(cell, used)
    problems = [*document["problems"], *wrong(report), *over_budget(cell, used)]
    expected = "graph per engine" if name.startswith("split") else "graph per step"
    if used and document["execution"] not in (expected, "host"):
        problems.append(f"steps run as {document['execution']!r} instead of {expected!r}")
    assert not problems, "\n".join(problems)


def counted(report: log.Report) -> dict[str, list[int]]:
    """The most of a step of each way to ask for one, in the order of ``COUNTED``."""
    used: dict[str, list[int]] = {}
    for step in report.steps:
        now = [*(step.launches[role] for role in log.ROLES), step.graphs, len(step.waits)]
        used[step.way] = [max(pair) for pair in zip(now, used.get(step.way, now), strict=True)]
    return used


def wrong(report: log.Report) -> list[str]:
    """What no backend may do, whatever it runs."""
    problems = []
    for text, count in Counter(f"{call}: {call.illegal}" for call in report.illegal).most_common(_SHOWN):
        problems.append(f"illegal, {count} times: {text}")
    if len(report.threads) > 1:
        problems.append(f"onnxruntime was called on {len(report.threads)} threads instead of one")
    if twice := report.captured_twice:
        problems.append(f"{len(twice)} captures were made again: {'; '.join(twice[:_SHOWN])}")
    taken = Counter((step.way, str(call)) for step in report.steps for call in step.memory)
    for (way, call), count in taken.most_common(_SHOWN):
        problems.append(f"{way}: {count} times a step took memory or gave it back: {call}")
    return problems


def over_budget(cell: str, used: dict[str, list[int]]) -> list[str]:
    """Where more was launched than is recorded, or more than acceptance may ever launch."""
    recorded = json.loads(BUDGET.read_text(encoding="utf-8")).get(cell, {}) if BUDGET.exists() else {}
    problems = []
    if used and not recorded and not RECORD:
        problems.append("no budget is recorded; run with SPECEXPORT_DRY_RUN=record")
    for way, counts in used.items():
        accept, most = counts[COUNTED.index("accept")], ACCEPT_LAUNCHES[way.split()[-1]]
        if accept > most:
            problems.append(f"{way}: acceptance is {accept} launches; expected at most {most}")
        more = [
            f"{count} {kind} (budget {allowed})"
            for kind, count, allowed in zip(COUNTED, counts, recorded.get(way, counts), strict=True)
            if count > allowed
        ]
        if more:
            problems.append(f"{way}: {', '.join(more)}")
    return problems


def record(cell: str, used: dict[str, list[int]]) -> None:
    """Writes a cell's budget; workers take turns."""
    with FileLock(BUDGET.with_suffix(".lock")):
        recorded = json.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}
        recorded[cell] = used
        lines = [
            f'  "{cell}": {{\n'
            + ",\n".join(f'    "{way}": {json.dumps(counts)}' for way, counts in sorted(recorded[cell].items()))
            + "\n  }"
            for cell in sorted(recorded)
        ]
        BUDGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
