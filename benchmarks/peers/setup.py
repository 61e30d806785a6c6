"""Make the environments that the other engines run in.

    python -m benchmarks.peers.setup [ort] [openvino]

Each gets a virtual environment in the root of the repository, with the versions pinned in its requirements file. What
transformers needs is the environment this runs in.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEPARATE = ("ort", "openvino")
# Required by optimum-intel by name only; its usual wheel does not load beside a CPU build of torch.
UNWANTED = {"openvino": ("torchvision",)}


def python_of(engine: str) -> Path:
    """The interpreter that runs an engine, whether or not it has been made yet."""
    if engine not in SEPARATE:
        return Path(sys.executable)
    return ROOT / f".venv-peers-{engine}" / "bin" / "python"


def make(engine: str) -> None:
    """Make the environment of one engine, or bring it to the pinned versions."""
    python = python_of(engine)
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pip = [str(python), "-m", "pip"]
    requirements = Path(__file__).with_name(f"requirements-{engine}.txt")
    subprocess.run([*pip, "install", "-c", str(ROOT / "constraints.txt"), "-r", str(requirements)], check=True)
    for package in UNWANTED.get(engine, ()):
        subprocess.run([*pip, "uninstall", "--yes", package], check=True)


def main() -> int:
    """Make the environments named on the command line, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.setup", description="Make the environments.")
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(SEPARATE)}; default: all")
    for engine in parser.parse_args().engines or SEPARATE:
        if engine not in SEPARATE:
            parser.error(f"{engine} has no environment of its own; choose from {', '.join(SEPARATE)}")
        try:
            make(engine)
        except subprocess.CalledProcessError as error:
            print(f"error: the environment of {engine} could not be made: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
