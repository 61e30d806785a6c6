"""The kernels' tests, in C++: compiled here, and run with and without the compiler's sanitizers."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_BUILD = runpy.run_path(str(ROOT / "kernels" / "build.py"))
_SANITIZED = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


def _run(folder: Path, rounds: int, suffixes: list[str], *flags: str) -> str:
    """Compiles the tests with some of the kernels, runs that many rounds, and returns what is printed."""
    program, room = folder / "kernels_test", ROOT / "kernels"
    sources = [room / "packing.cc", room / "kernels.cc", *sorted((room / "tests").glob("*.cc"))]
    sources += [source for suffix in suffixes for source in sorted(room.glob(f"kernels_{suffix}.cc"))]
    try:
        _BUILD["build"](program, ROOT / "build" / "kernels", flags, sources, shared=False)
    except _BUILD["CompilerError"] as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise
    done = subprocess.run([str(program), str(rounds)], env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_instruction_set_keeps_the_contract(tmp_path: Path) -> None:
    assert "portable: 60 rounds" in _run(tmp_path, 60, ["*"])


def test_addresses_and_arithmetic_are_defined(tmp_path: Path) -> None:
    assert "rounds" in _run(tmp_path, 6, ["avx2", "neon", "portable"], "-fsanitize=address,undefined", *_SANITIZED)


def test_teams_are_free_of_races(tmp_path: Path) -> None:
    assert "portable: 4 rounds" in _run(tmp_path, 4, ["portable"], "-fsanitize=thread", *_SANITIZED)
