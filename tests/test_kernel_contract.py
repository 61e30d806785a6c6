"""The kernels' tests, in C++: compiled here, and run with and without the compiler's sanitizers."""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_BUILD = runpy.run_path(str(ROOT / "kernels" / "build.py"))
_SANITIZED = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


def _run(folder: Path, rounds: int, patterns: list[str], *flags: str) -> str:
    """Compiles the tests with some of the kernels, runs that many rounds, and returns what is printed."""
    program, room = folder / "kernels_test", ROOT / "kernels"
    sources = [room / "packing.cc", room / "kernels.cc", *sorted((room / "tests").glob("*.cc"))]
    sources += [source for pattern in patterns for source in sorted(room.glob(f"{pattern}.cc"))]
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
    assert "portable: 60 rounds" in _run(tmp_path, 60, ["kernels_*"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_instructions_that_few_processors_have_are_emulated(tmp_path: Path) -> None:
    # As many kernels as there are for x86-64, on every processor with AVX2. Compiling them for speed takes a minute.
    patterns = ["kernels_avx2", "kernels_portable", "tests/emulated/*"]
    printed = _run(tmp_path, 30, patterns, "-DSPECEXPORT_EMULATED", "-Wno-psabi", "-O1")
    if "avx2" not in printed:
        pytest.skip("this processor has no AVX2, which the emulation is compiled for")
    assert all(f"{name}: 30 rounds" in printed for name in ("avx512-amx", "avx512-vnni", "avx-vnni"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_instructions_that_a_compiler_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, tiles, old = tmp_path / "plain.cc", tmp_path / "kernels_amx.cc", tmp_path / "old"
    plain.write_text("extern const int tiles __attribute__((weak)); int main() { return &tiles ? 1 : 0; }")
    tiles.write_text("extern const int tiles; const int tiles = 1;")
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mamx*) exit 1;; esac\nexec {compiler} "$@"\n')
    old.chmod(0o755)
    for chosen, status in ((compiler, 1), (str(old), 0)):
        monkeypatch.setenv("CXX", chosen)
        _BUILD["build"](tmp_path / "program", tmp_path, (), [plain, tiles], shared=False)
        assert subprocess.run([tmp_path / "program"], check=False).returncode == status
    said = capfd.readouterr().err
    assert f"kernels: {old} does not know -mavx2" in said and said.count("\n") == 1


def test_addresses_and_arithmetic_are_defined(tmp_path: Path) -> None:
    assert "rounds" in _run(
        tmp_path, 6, ["kernels_avx2", "kernels_neon", "kernels_portable"], "-fsanitize=address,undefined", *_SANITIZED
    )


def test_teams_are_free_of_races(tmp_path: Path) -> None:
    assert "portable: 4 rounds" in _run(tmp_path, 4, ["kernels_portable"], "-fsanitize=thread", *_SANITIZED)
