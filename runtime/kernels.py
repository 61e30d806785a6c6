"""The kernels of ``kernels/``: a library that plugs into onnxruntime, and runs what it claims of a graph on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from specexport.contract.errors import BackendError
from specexport.runtime.machine import cache_folder, machine_key, remove_unused

LIBRARY = Path(__file__).parent.parent / "kernels" / "libspecexport.so"
"""Compiled by ``pip install`` where there is a C++ compiler."""
SWITCH = "SPECEXPORT_KERNELS"
"""Environment variable; 0 leaves every graph to onnxruntime's kernels."""

_RECORDED = "session.record_ep_graph_assignment_info"
_ALONE = "onnxruntime's alone, where texts may part at two tokens that are about equally likely"
_ROUND_NOTHING = frozenset({
    "Abs", "And", "ArgMax", "ArgMin", "Cast", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Equal",
    "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "If",
    "Less", "LessOrEqual", "Loop", "Max", "Min", "Mod", "Neg", "NonZero", "Not", "OneHot", "Or", "Pad", "Range",
    "ReduceMax", "ReduceMin", "Relu", "Reshape", "Scan", "ScatterElements", "ScatterND", "Shape", "Sign", "Size",
    "Slice", "Split", "Squeeze", "TensorScatter", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
    "Add", "DequantizeLinear", "Div", "Mul", "Sub",  # one operation of IEEE 754 for each number
})  # fmt: skip
"""Operators whose rows are the same in any kernel, however many there are."""
_NEEDED = (1, 28)
"""The oldest release of onnxruntime that these kernels are tested with."""


class _Kernels(NamedTuple):
    devices: list[Any]
    """``onnxruntime.OrtEpDevice``; empty where the kernels are not used."""
    described: str
    """Which kernels compute, and if not these, why not and what to do."""
    instruction_set: str = ""


class PackedWeights(NamedTuple):
    """Where a bundle's weights are kept in the order that the kernels read them, for other processes and later ones."""

    folder: Path
    key: str
    """Names of its files begin so."""

    @staticmethod
    def of(files: str, keep: bool) -> PackedWeights | None:
        """Those of a bundle on this machine; None where there are none and none may be kept.

        Args:
            files: a hash of the bundle's files.
            keep: whether to keep them, where they are not yet.
        """
        cache = cache_folder()
        if cache is None:
            return None
        packed = PackedWeights(cache / "packed", machine_key((files,)))
        with contextlib.suppress(OSError):
            there = list(packed.folder.glob(f"{packed.key}*"))
            for file in there:
                os.utime(file)
            if keep and packed.folder.is_dir():
                remove_unused(packed.folder)
            return packed if keep or there else None
        return None


def add_kernels(options: Any, threads: int, packed: PackedWeights | None = None) -> bool:
    """Has a session run what it can on these kernels; what they do not claim runs on onnxruntime's.

    Args:
        options: its ``onnxruntime.SessionOptions``.
        threads: of its operators.
        packed: where packed weights are kept; None for in memory alone.

    Returns:
        Whether it does.

    Raises:
        BackendError: :data:`SWITCH` is neither 0 nor 1.
    """
    devices = _kernels().devices
    if devices:
        settings = {"threads": str(threads)}
        if packed is not None:
            settings |= {"folder": str(packed.folder), "key": packed.key}
        options.add_session_config_entry(_RECORDED, "1")
        options.add_provider_for_devices(devices, settings)
    return bool(devices)


def not_claimed(session: Any) -> Counter[str]:
    """How many operators of a session with these kernels round in onnxruntime's, by type.

    There a row's last bits may depend on how many others run beside it. None, and texts are exact.
    """
    parts = session.get_provider_graph_assignment_info()
    left = (node.op_type for part in parts if part.ep_name == "CPUExecutionProvider" for node in part.get_nodes())
    return Counter(kind for kind in left if kind not in _ROUND_NOTHING)


def kernels_described() -> str:
    """Which kernels graphs run on, on the CPU, in one line.

    Raises:
        BackendError: :data:`SWITCH` is neither 0 nor 1.
    """
    return _kernels().described


def instruction_set() -> str:
    """What the kernels use of the processor; empty where they are not used."""
    return _kernels().instruction_set


def _kernels() -> _Kernels:
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise BackendError(f"{SWITCH} is {switch!r}; expected 0 (onnxruntime's kernels alone) or 1")
    return _Kernels([], f"{_ALONE}: {SWITCH} is 0") if switch == "0" else _register(LIBRARY)


@functools.cache
def _register(library: Path) -> _Kernels:
    """Registers the library with onnxruntime, once a process."""
    try:
        import onnxruntime
    except ImportError:
        return _instead("onnxruntime is not installed; run: pip install 'specexport[cpu]'")
    if not library.is_file():
        return _instead("specexport's are not compiled; install a C++ compiler, then run pip install again")
    if tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < _NEEDED:
        needed = ".".join(map(str, _NEEDED))
        return _instead(
            f"specexport's need onnxruntime {needed}, and {onnxruntime.__version__} is installed; "
            "run: pip install -U 'specexport[cpu]'"
        )
    try:
        named = ctypes.CDLL(str(library)).specexport_instruction_set
        before = len(onnxruntime.get_ep_devices())
        onnxruntime.register_execution_provider_library(str(library), str(library))
        devices = onnxruntime.get_ep_devices()[before:]
    except Exception as error:  # onnxruntime's exceptions share no public base
        first = str(error).partition("\n")[0]
        return _instead(f"{library} cannot be loaded: {first}; run pip install again to compile it")
    if not devices:
        return _instead("specexport's found no CPU among onnxruntime's devices")
    named.restype = ctypes.c_char_p
    return _Kernels(devices, f"specexport's for {named().decode()}", named().decode())


def _instead(reason: str) -> _Kernels:
    return _Kernels([], f"{_ALONE}: {reason}")
