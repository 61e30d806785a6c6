"""Makes an environment in which the real onnxruntime-gpu runs over the null CUDA libraries, and keeps it.

    python -m tests.null_cuda.install     # prints the variables to run something there with

The libraries are compiled with gcc from the sources beside this file; onnxruntime-gpu and CUDA's headers come from the
package index. ``NULL_CUDA_CACHE`` names the folder that keeps them, one in specexport's cache folder unless told.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from specexport.runtime.machine import cache_folder

ONNXRUNTIME = "onnxruntime-gpu==1.31.1"
HEADERS = ("nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37")
SOURCES = Path(__file__).parent
RUNTIME = "libcudart.so.13"
LIBRARIES = {
    "cudart.c": RUNTIME,  # the others need it: first
    "cublas.c": "libcublas.so.13",
    "cublaslt.c": "libcublasLt.so.13",
    "cudnn.c": "libcudnn.so.9",
    "curand.c": "libcurand.so.10",
    "nccl.c": "libnccl.so.2",
    "driver.c": "libcuda.so.1",
}
_INSTALL_SECONDS = 900


class UnavailableError(Exception):
    """The environment cannot be made on this machine; says what is missing."""


def environment() -> dict[str, str]:
    """The variables of a process in which ``onnxruntime`` is the GPU's, and CUDA is null and says zeros.

    Raises:
        UnavailableError: there is no gcc, or a package cannot be installed.
    """
    root = Path(os.environ.get("NULL_CUDA_CACHE") or cache_folder() / "null-cuda").absolute()
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        python = f"{sys.implementation.cache_tag}-"
        packages = _installed(root / (python + ONNXRUNTIME.replace("==", "-")), ONNXRUNTIME)
        headers = _installed(root / "-".join(HEADERS).replace("==", "-"), *HEADERS)
        libraries = _compiled(root, next(headers.rglob("cuda_runtime_api.h")).parent)
    paths = [str(packages), str(SOURCES.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": os.pathsep.join(paths), "NULL_CUDA_ZEROS": "1"}
    return os.environ | ours


def _installed(folder: Path, *requirements: str) -> Path:
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        try:
            _run([*pip, "--target", str(part), *requirements], f"{', '.join(requirements)} cannot be installed")
        except UnavailableError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        part.rename(folder)
    return folder


def _compiled(root: Path, include: Path) -> Path:
    content = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")]):
        content.update(path.read_bytes())
    folder = root / f"libraries-{content.hexdigest()[:16]}"
    if folder.exists():
        return folder
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for source, soname in LIBRARIES.items():
        versions = part / f"{soname}.map"  # the version of a symbol is its library's name
        versions.write_text(f"{soname} {{ global: *; }};", encoding="utf-8")
        _run(
            [
                *("gcc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-Wall"),
                f"-I{include}",
                str(SOURCES / source),
                "-lpthread",
            ]
            + ["-o", str(part / soname), f"-Wl,-soname,{soname}", f"-Wl,--version-script={versions}"]
            + ([] if soname == RUNTIME else [str(part / RUNTIME)]),
            f"{source} cannot be compiled",
        )
    part.rename(folder)
    return folder


def _run(command: list[str], problem: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{problem}: {error}") from error
    if done.returncode:
        raise UnavailableError(f"{problem}: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    result = environment()
    print(*(f"{name}={result[name]}" for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "NULL_CUDA_ZEROS")))
