"""Check that all dependencies of the runtime have wheels for Jetson: aarch64, CPython 3.10 and 3.12 (JetPack 6 and 7).

    python scripts/check_wheels.py

asks the package index, installs nothing, and exits with 1 if a wheel is missing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tomllib
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cpu", "serve", "compile")
"""``tensorrt`` comes with JetPack."""
ALSO = ("cuda-bindings>=12.6",)
PYTHONS = ("3.10", "3.12")
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 36)] + ["manylinux2014_aarch64"]
"""JetPack 6 is Ubuntu 22.04, whose glibc is 2.35."""


def requirements(python: str) -> Iterator[str]:
    """The requirements of ``pyproject.toml`` on a Jetson with this Python."""
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


def main() -> int:
    """Asks pip for every Python; returns the exit status."""
    wanting = 0
    for python in PYTHONS:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        with tempfile.TemporaryDirectory() as nowhere:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--target", nowhere]
            pip += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms]
            done = subprocess.run([*pip, *requirements(python)], capture_output=True, text=True, check=False)
        print(f"aarch64, Python {python}: {'everything has wheels' if done.returncode == 0 else done.stderr.strip()}")
        wanting |= done.returncode != 0
    return int(wanting)


if __name__ == "__main__":
    raise SystemExit(main())
