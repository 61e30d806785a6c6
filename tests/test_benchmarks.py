"""``python -m benchmarks``: each runs with what it needs alone, as after ``make demo``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("cuda", "openai", "hypothesis", "pytest")
"""Packages that ``make demo`` does not install."""
NEEDS = {"gpu-host": "cuda", "serve": "openai"}
"""By benchmark: the first of them without which it cannot run."""
DEMO = f"""
import contextlib, io, json, sys
sys.modules |= dict.fromkeys({OTHERS})  # as if they were not there
from benchmarks.__main__ import main
ends = {{}}
for name in sys.argv[1:]:
    sys.argv = ["benchmarks", name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main()
        except SystemExit as stopped:
            ends[name] = [stopped.code, said.getvalue()]
print(json.dumps(ends))
"""


def test_help_imports_no_benchmark() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "importtime", "-m", "benchmarks", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
    assert "numpy" not in done.stderr
    assert (wrong := run("nothing")).returncode == 2
    assert "invalid choice: 'nothing'" in wrong.stderr


@pytest.mark.exporter
def test_a_benchmark_needs_nothing_of_the_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEMO, *COMMANDS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    ends = json.loads(done.stdout)
    assert list(ends) == list(COMMANDS)
    for name, (code, text) in ends.items():
        if name in NEEDS:
            assert code.startswith("benchmarks: error: ") and NEEDS[name] in code, code
            assert code.endswith("pip install -e '.[dev]'")
        else:
            assert code == 0, (name, code)
            assert text.startswith(f"usage: python -m benchmarks {name}")
