"""The kernels of ``kernels/``: an onnxruntime plugin that runs the parts of a graph that it claims, on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from specexport.contract.errors import BackendError
from specexport.runtime.machine import cache_folder, disable_telemetry, machine_key, remove_unused

LIBRARY = Path(__file__).parents[3] / "kernels" / "libspecexport.so"
"""Compiled by ``pip install`` if there is a C++ compiler."""
SWITCH = "SPECEXPORT_KERNELS"
"""Environment variable; 0 runs all graphs on onnxruntime's kernels."""

_RECORDED = "session.record_ep_graph_assignment_info"
_ALONE = "onnxruntime's alone, where texts may differ at two tokens that are about equally likely"
_BATCH_INVARIANT = frozenset({
    "Abs", "And", "ArgMax", "ArgMin", "Cast", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Equal",
    "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "If",
    "Less", "LessOrEqual", "Loop", "Max", "Min", "Mod", "Neg", "NonZero", "Not", "OneHot", "Or", "Pad", "Range",
    "ReduceMax", "ReduceMin", "Relu", "Reshape", "Scan", "ScatterElements", "ScatterND", "Shape", "Sign", "Size",
    "Slice", "Split", "Squeeze", "TensorScatter", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
    "Add", "DequantizeLinear", "Div", "Mul", "Sub",  # one operation of IEEE 754 for each number
})  # fmt: skip
"""Operators that compute a row equally in any kernel, whatever the number of rows."""
_MINIMUM = (1, 28)
"""The oldest release of onnxruntime that these kernels are tested with."""


class Kernels(NamedTuple):
    """The kernels that run graphs on the CPU: ours, or onnxruntime's alone.

    Attributes:
        devices: ``onnxruntime.OrtEpDevice`` of our kernels; empty if they are not used.
        described: a description of the kernels; if ours are not used, also the reason and the remedy.
        instruction_set: the instruction set that our kernels use; empty if they are not used.
        build: identifies the build of our kernels, which may change without the version; empty if they are not used.
    """

    devices: list[Any]
    described: str
    instruction_set: str = ""
    build: str = ""


class PackedWeights(NamedTuple):
    """The cache of a bundle's weights in the order in which the kernels read them, shared by processes.

    Attributes:
        key: the prefix of its file names.
    """

    folder: Path
    key: str

    @staticmethod
    def of(files: str, keep: bool) -> PackedWeights | None:
        """The cache of a bundle's weights, by a hash of its files; None if it is missing and ``keep`` is False."""
        cache = cache_folder()
        if cache is None:
            return None
        packed = PackedWeights(cache / "packed", machine_key((files,)))
        with contextlib.suppress(OSError):
            entries = list(packed.folder.glob(f"{packed.key}*"))
            for file in entries:
                os.utime(file)
            if keep and packed.folder.is_dir():
                remove_unused(packed.folder.iterdir())
            return packed if keep or entries else None
        return None


def add_kernels(options: Any, threads: int, packed: PackedWeights | None = None) -> bool:
    """Adds our kernels to a session's options; nodes that they do not claim run on onnxruntime's kernels.

    Returns:
        Whether our kernels are used.
    """
    devices = kernels().devices
    if devices:
        settings = {"threads": str(threads)}
        if packed is not None:
            settings |= {"folder": str(packed.folder), "key": packed.key}
        options.add_session_config_entry(_RECORDED, "1")
        options.add_provider_for_devices(devices, settings)
    return bool(devices)


def not_claimed(session: Any) -> Counter[str]:
    """The numbers of rounding operators in a session that run on onnxruntime's kernels, by type.

    In these a row's last bits may depend on the number of rows. If there are none, texts are exact.
    """
    parts = session.get_provider_graph_assignment_info()
    unclaimed = (node.op_type for part in parts if part.ep_name == "CPUExecutionProvider" for node in part.get_nodes())
    return Counter(kind for kind in unclaimed if kind not in _BATCH_INVARIANT)


def kernels() -> Kernels:
    """The kernels of this process."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise BackendError(f"{SWITCH} is {switch!r}; expected 0 (onnxruntime's kernels alone) or 1")
    return Kernels([], f"{_ALONE}: {SWITCH} is 0") if switch == "0" else _register(LIBRARY)


@functools.cache
def _register(library: Path) -> Kernels:
    """Registers our kernels with onnxruntime, once for each process."""
    disable_telemetry()
    try:
        import onnxruntime
    except ImportError:
        return _onnxruntime_alone("onnxruntime is not installed; run: pip install 'specexport[cpu]'")
    if not library.is_file():
        return _onnxruntime_alone("specexport's are not compiled; install a C++ compiler, then run pip install again")
    if tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < _MINIMUM:
        minimum = ".".join(map(str, _MINIMUM))
        return _onnxruntime_alone(
            f"specexport's need onnxruntime {minimum}, and {onnxruntime.__version__} is installed; "
            "run: pip install -U 'specexport[cpu]'"
        )
    try:
        instruction_set_name = ctypes.CDLL(str(library)).specexport_instruction_set
        before = len(onnxruntime.get_ep_devices())
        onnxruntime.register_execution_provider_library(str(library), str(library))
        devices = onnxruntime.get_ep_devices()[before:]
    except Exception as error:  # onnxruntime's exceptions share no public base
        first = str(error).partition("\n")[0]
        return _onnxruntime_alone(f"{library} cannot be loaded: {first}; run pip install again to compile it")
    if not devices:
        return _onnxruntime_alone("specexport's found no CPU among onnxruntime's devices")
    instruction_set_name.restype = ctypes.c_char_p
    name, status = instruction_set_name().decode(), library.stat()
    return Kernels(devices, f"specexport's for {name}", name, f"{status.st_size} {status.st_mtime_ns}")


def _onnxruntime_alone(reason: str) -> Kernels:
    return Kernels([], f"{_ALONE}: {reason}")
