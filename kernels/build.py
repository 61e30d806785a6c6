"""Compiles the kernels into one library; used by setup.py, and from the command line when changing them.

    python kernels/build.py [--output FILE] [--flags="-g -fsanitize=address"]

The compiler is that of the environment variable CXX, else the first available of c++, g++ and clang++; CXXFLAGS adds
flags. A source's name tells its instruction set: ``kernels_avx2.cc`` is compiled for AVX2, and called on processors
that have it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NAME = "libspecexport.so"
"""Name of the library, which ``runtime/backends/onnxruntime/kernels.py`` loads."""

# Never -ffast-math or contraction: a row's bits must not depend on how a compiler groups the sums of a loop.
_FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -ffp-contract=off -Wall -Wextra"
_X86 = "-mavx2 -mfma -mf16c"
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni"
_ARM = "-march=armv8.2-a+dotprod+fp16"
_BY_SUFFIX: dict[str, tuple[str, str]] = {
    "avx2": ("x86_64", _X86),
    "avxvnni": ("x86_64", f"{_X86} -mavxvnni"),
    "avx512": ("x86_64", f"{_X86} {_AVX512}"),
    "amx": ("x86_64", f"{_X86} {_AVX512} -mamx-tile -mamx-bf16"),
    "neon": ("aarch64", _ARM),
    "i8mm": ("aarch64", f"{_ARM}+i8mm"),
}
"""The processor and the compiler flags of sources by the suffix of their names."""


class CompilerError(Exception):
    """There is no compiler, or it failed; the message has one line."""


def build(
    output: Path, objects: Path, flags: Sequence[str] = (), sources: Sequence[Path] | None = None, shared: bool = True
) -> None:
    """Compiles changed sources, and links the library.

    Args:
        output: the library.
        objects: folder of the object files, kept for the next time.
        flags: additional flags of the compiler and the linker.
        sources: the sources; None for all in ``kernels/``.
        shared: whether to link a library; otherwise a program, as for the tests.

    Raises:
        CompilerError: there is no compiler, or it failed.
    """
    compiler, flags = _compiler(), [*shlex.split(os.environ.get("CXXFLAGS", "")), *flags]
    defined = _run([*compiler, "-dM", "-E", "-x", "c++", os.devnull])
    machine = next((name for name in ("x86_64", "aarch64") if f" __{name}__ " in defined), "")
    tasks: list[tuple[Path, list[str]]] = []
    for source in sources or sorted(HERE.glob("*.cc")):
        target, for_it = _BY_SUFFIX.get(source.stem.rpartition("_")[2], (machine, ""))
        if "ziglang" in compiler:  # zig names Arm's features like LLVM
            for_it = for_it.replace("-march=armv8.2-a", "-mcpu=generic+v8_2a").replace("+fp16", "+fullfp16")
        if target == machine and _knows(compiler, for_it.split()):
            tasks.append((source, [*compiler, *_FLAGS.split(), *for_it.split(), f"-ffile-prefix-map={ROOT}=.", *flags]))
    objects.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda task: _compile(task[0], task[1], objects), tasks))
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.{os.getpid()}")  # processes that have mapped the old library keep it
    strip = [] if "-g" in flags or sys.platform == "darwin" else ["-s"]
    _run([*compiler, *(["-shared"] if shared else []), "-pthread", *strip, *flags, "-o", str(part), *map(str, parts)])
    part.replace(output)


def _compile(source: Path, command: list[str], objects: Path) -> Path:
    key = hashlib.sha256(shlex.join(command).encode()).hexdigest()[:12]
    part = objects / f"{source.stem}.{key}.o"
    if not _is_current(part):
        new = part.with_suffix(f".{os.getpid()}")  # another process may compile it too
        _run([*command, "-MMD", "-MF", str(part.with_suffix(".d")), "-c", str(source), "-o", str(new)])
        new.replace(part)
    return part


def _is_current(part: Path) -> bool:
    """Whether no file read by its compilation is newer."""
    try:
        built_at = part.stat().st_mtime
        read = part.with_suffix(".d").read_text().partition(":")[2].replace("\\\n", " ").split()
        return all(Path(name).stat().st_mtime <= built_at for name in read)
    except OSError:
        return False


def _knows(compiler: list[str], flags: list[str]) -> bool:
    """Whether a compiler knows an instruction set; GCC before 11 knows neither AVX-VNNI nor AMX, which are left out."""
    result = subprocess.run([*compiler, *flags, "-E", "-x", "c++", os.devnull], capture_output=True)
    if result.returncode:
        print(f"kernels: {shlex.join(compiler)} does not know {shlex.join(flags)}", file=sys.stderr)  # noqa: T201
    return not result.returncode


def _compiler() -> list[str]:
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CompilerError("no C++ compiler; install one (Debian: apt install g++), or name it in CXX")


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise CompilerError(f"{command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)  # noqa: T201
        first = next((line for line in error.stderr.splitlines() if "error" in line), f"{command[0]} failed")
        raise CompilerError(first) from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=HERE / NAME, help="the library")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags")
    options = parser.parse_args()
    try:
        build(options.output, ROOT / "build" / "kernels", options.flags)
    except CompilerError as error:
        sys.exit(f"kernels: {error}")
