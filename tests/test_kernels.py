"""Which kernels compute on the CPU: found, said in one line, turned off, done without; and their own tests."""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest

from specexport.runtime.backends.onnxruntime import kernels
from specexport.runtime.backends.onnxruntime.kernels import PackedWeights

ALONE = "onnxruntime's alone, where texts may differ at two tokens that are about equally likely: "
MISSING = ALONE + "specexport's are not compiled; install a C++ compiler, then run pip install again"
needs_library = pytest.mark.skipif(not kernels.LIBRARY.is_file(), reason="the kernels are not compiled")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "nothing.so")


def test_missing_or_damaged_kernels_fall_back(monkeypatch, tmp_path, without):
    assert kernels.kernels().described == MISSING
    assert not kernels.add_kernels(onnxruntime.SessionOptions(), 1)
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"nothing")
    monkeypatch.setattr(kernels, "LIBRARY", damaged)
    text = re.escape(f"{ALONE}{damaged} cannot be loaded: {damaged}: file too short; ")
    assert re.fullmatch(text + "run pip install again to compile it", kernels.kernels().described)
    assert kernels.kernels().instruction_set == ""


@needs_library
def test_an_old_onnxruntime_does_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(__version__="1.23.2"))
    text = kernels._register.__wrapped__(kernels.LIBRARY).described  # a process registers the library once
    assert text.endswith("need onnxruntime 1.28, and 1.23.2 is installed; run: pip install -U 'specexport[cpu]'")


@needs_library
def test_commands_say_which_kernels_compute(bundle, cli, monkeypatch):
    folder = str(bundle("llama-near"))
    words = ["run", folder, "--prompt", "one", "-n", "2", "--stats", "--no-calibrate"]
    off = f"{ALONE}SPECEXPORT_KERNELS is 0"
    for switch, text in (("1", r"specexport's for [a-z0-9-]+"), ("0", off)):
        monkeypatch.setenv("SPECEXPORT_KERNELS", switch)
        assert re.search(rf"^kernels here +{text}$", cli("inspect", folder).out, re.MULTILINE)
        assert re.search(rf"^kernels     {text}$", cli(*words).err, re.MULTILINE)
    monkeypatch.setenv("SPECEXPORT_KERNELS", "no")
    assert "SPECEXPORT_KERNELS is 'no'; expected 0" in cli(*words, status=1).err


def test_the_server_says_at_its_start_which_kernels_compute(bundle):
    words = [sys.executable, "-m", "specexport", "serve", str(bundle("llama-near")), "--port", "0", "--no-calibrate"]
    environment = {**os.environ, "SPECEXPORT_KERNELS": "0"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "running on" in line:
                process.terminate()
        assert process.wait(30) == 0
    assert sum(line.endswith(f"Kernels: {ALONE}SPECEXPORT_KERNELS is 0\n") for line in lines) == 1


def test_packed_weights_are_looked_for_kept_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path))
    assert PackedWeights.of("files", keep=False) is None
    packed = PackedWeights.of("files", keep=True)
    assert packed is not None
    assert packed != PackedWeights.of("other files", keep=True)
    packed.folder.mkdir()
    mine, others, recent = (packed.folder / name for name in (f"{packed.key}.bin", "old.bin", "recent.bin"))
    for file, days in ((mine, 40), (others, 40), (recent, 20)):
        file.touch()
        os.utime(file, times=(0, time.time() - days * 24 * 3600))
    assert PackedWeights.of("files", keep=False) == packed  # which is used now
    assert PackedWeights.of("files", keep=True) == packed
    assert sorted(packed.folder.iterdir()) == sorted((mine, recent))


# --- the kernels' own tests, in C++ -----------------------------------------------------------------------------------


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


def test_every_instruction_set_keeps_the_contract(tmp_path):
    assert "portable: 60 rounds" in _run(tmp_path, 60, ["kernels_*"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_instructions_that_few_processors_have_are_emulated(tmp_path):
    # As many kernels as there are for x86-64, on every processor with AVX2. Compiling them for speed takes a minute.
    patterns = ["kernels_avx2", "kernels_portable", "tests/emulated/*"]
    printed = _run(tmp_path, 30, patterns, "-DSPECEXPORT_EMULATED", "-Wno-psabi", "-O1")
    if "avx2" not in printed:
        pytest.skip("this processor has no AVX2, which the emulation is compiled for")
    assert all(f"{name}: 30 rounds" in printed for name in ("avx512-amx", "avx512-vnni", "avx-vnni"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_instructions_that_a_compiler_does_not_know_are_left_out(tmp_path, monkeypatch, capfd):
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


def test_addresses_and_arithmetic_are_defined(tmp_path):
    assert "rounds" in _run(
        tmp_path, 6, ["kernels_avx2", "kernels_neon", "kernels_portable"], "-fsanitize=address,undefined", *_SANITIZED
    )


def test_teams_are_free_of_races(tmp_path):
    assert "portable: 4 rounds" in _run(tmp_path, 4, ["kernels_portable"], "-fsanitize=thread", *_SANITIZED)
