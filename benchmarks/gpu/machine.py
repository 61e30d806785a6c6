"""Which libraries can run bundles on the GPU that is here, and bundles with engines for it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport.contract.engines import ComputedIn, EngineRuntime
from specexport.contract.errors import BackendError, SpecExportError
from specexport.contract.reading import read_manifest
from specexport.runtime.cuda import ort, trt
from specexport.runtime.cuda.api import Cuda, CudaDevice

Folder = Callable[[], Path]
"""Makes a bundle if it is not there yet, and says where it is."""


@dataclass(frozen=True)
class Found:
    """A library that runs bundles on this GPU.

    Attributes:
        backend: its name for ``Engine.load``.
        version: of the library.
        computes: what it computes fp16 weights in, and what else it is checked in.
        engines: the library whose engines it runs; None where it runs the ONNX graphs.
    """

    backend: str
    version: str
    computes: tuple[ComputedIn, ...]
    engines: EngineRuntime | None = None


def find(cuda: Cuda) -> tuple[list[Found], dict[str, str]]:
    """The libraries that can run on this device, and why the others cannot."""
    looked = {
        "onnxruntime-cuda": _attempt(_onnxruntime),
        "tensorrt": _attempt(lambda: _engine_library("tensorrt", cuda.device)),
        "tensorrt-rtx": _attempt(lambda: _engine_library("tensorrt-rtx", cuda.device)),
    }
    found = [there for there in looked.values() if isinstance(there, Found)]
    return found, {name: why for name, why in looked.items() if isinstance(why, str)}


def _attempt(look: Callable[[], Found]) -> Found | str:
    """What was found, or why nothing was."""
    try:
        return look()
    except SpecExportError as error:
        return str(error)


def _onnxruntime() -> Found:
    return Found("onnxruntime-cuda", str(ort.import_onnxruntime().__version__), ("fp32",))


def _engine_library(runtime: EngineRuntime, device: CudaDevice) -> Found:
    """A library that compiles engines for this device and runs them.

    Raises:
        BackendError: it is not installed, or knows no such device.
    """
    module = trt.import_tensorrt(runtime)
    if importlib.util.find_spec("polygraphy") is None:
        raise BackendError(f"{runtime} is installed, but not what compiles for it: pip install 'specexport[compile]'")
    known = getattr(module, "ComputeCapability", None) if runtime == "tensorrt-rtx" else None
    if known is not None and "SM{}{}".format(*device.capability) not in known.__members__:
        raise BackendError(f"{runtime} {module.__version__} compiles for no {device}")
    return Found(runtime, str(module.__version__), ("fp32", "fp16"), runtime)


def compiled(made: Folder, found: Found, device: CudaDevice, compute: ComputedIn, slots: int = 1) -> Path:
    """A bundle, with engines for this device if the library runs engines.

    Compiled in a process of its own, as one process drives one library only.

    Args:
        made: makes the bundle.
        found: what is to run it.
        device: the GPU.
        compute: what its engines compute in.
        slots: requests that they run at once.

    Raises:
        RuntimeError: it cannot be compiled; with what the compiler says.
    """
    folder = made()
    if found.engines is None or _has_engines(folder, found, device, compute, slots):
        return folder
    command: list[Any] = [sys.executable, "-m", "specexport", "compile", folder, "--backend", found.engines]
    command += [
        "--engine-batch-sizes",
        slots,
        "--compute",
        compute,
        "--compute-capability",
        "{}.{}".format(*device.capability),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"specexport compile {folder}: {done.stderr.strip() or done.stdout.strip()}")
    return folder


def _has_engines(folder: Path, found: Found, device: CudaDevice, compute: ComputedIn, slots: int) -> bool:
    return any(
        (engine.runtime, engine.version, engine.compute) == (found.engines, found.version, compute)
        and engine.runs_on(device.capability)
        and any(point.batch == slots for point in engine.profiles)
        for engine in read_manifest(folder).target.engines
    )
