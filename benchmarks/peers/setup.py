"""Create the environments of the other engines.

    python -m benchmarks.peers.setup [ort] [openvino] [llamacpp]

Each gets a virtual environment in the root of the repository, with the versions pinned in its requirements file;
llama.cpp is built there for this machine, from the source in llama-cpp-python's source package. transformers runs in
this environment.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEPARATE = ("ort", "openvino", "llamacpp")
# Required by optimum-intel by name only; its usual wheel does not load beside a CPU build of torch.
UNWANTED = {"openvino": ("torchvision",)}
LLAMA_CPP = "0.3.36"
"""Version of llama-cpp-python, whose source package has llama.cpp's in it."""
LLAMA_SOURCE = ROOT / ".venv-peers-llamacpp" / f"llama_cpp_python-{LLAMA_CPP}" / "vendor" / "llama.cpp"
LLAMA_TOOLS = ("llama-server", "llama-quantize")


def python_of(engine: str) -> Path:
    """The path of an engine's interpreter, which may not exist yet."""
    if engine not in SEPARATE:
        return Path(sys.executable)
    return ROOT / f".venv-peers-{engine}" / "bin" / "python"


def llama_tool(name: str) -> str:
    """A program of llama.cpp's."""
    return str(LLAMA_SOURCE / "build" / "bin" / name)


def make(engine: str) -> None:
    """Create the environment of one engine, or update it to the pinned versions."""
    python = python_of(engine)
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pip = [str(python), "-m", "pip"]
    requirements = Path(__file__).with_name(f"requirements-{engine}.txt")
    subprocess.run([*pip, "install", "-c", str(ROOT / "constraints.txt"), "-r", str(requirements)], check=True)
    for package in UNWANTED.get(engine, ()):
        subprocess.run([*pip, "uninstall", "--yes", package], check=True)
    if engine == "llamacpp":
        build_llama(python)


def build_llama(python: Path) -> None:
    """Build llama.cpp's server and quantizer for this processor, without network features."""
    folder = python.parents[1]
    download = [str(python), "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*download, "-d", str(folder), f"llama-cpp-python=={LLAMA_CPP}"], check=True)
    with tarfile.open(folder / f"llama_cpp_python-{LLAMA_CPP}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    cmake, build = str(python.with_name("cmake")), str(LLAMA_SOURCE / "build")
    off = ("LLAMA_OPENSSL", "LLAMA_USE_PREBUILT_UI", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *(f"-D{name}=OFF" for name in off)]
    if platform.machine() == "x86_64":
        # Where the processor has AMX, this version ends as it loads quantized weights for it.
        options += [f"-DCMAKE_{language}_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" for language in ("C", "CXX")]
    ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={python.with_name('ninja')}"]
    subprocess.run([cmake, "-S", str(LLAMA_SOURCE), "-B", build, *ninja, *options], check=True)
    subprocess.run([cmake, "--build", build, "--target", *LLAMA_TOOLS], check=True)


def main() -> int:
    """Create the environments named on the command line, or all."""
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
