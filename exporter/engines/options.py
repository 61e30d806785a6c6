"""Options of engines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specexport.contract.engines import COMPILERS, ENGINE_RUNTIMES, ComputedIn, EngineRuntime
from specexport.contract.errors import BuildError

COMPUTE: tuple[ComputedIn, ...] = ("fp32", "fp16", "bf16")

Capability = tuple[int, int]
FP8_CAPABILITY: Capability = (8, 9)
"""The first to know float8_e4m3fn."""


@dataclass(frozen=True)
class EngineOptions:
    """How to compile a bundle's graphs.

    Attributes:
        runtime: the library that will run them, and compiles them unless it runs ONNX graphs.
        compute: what activations and the KV cache are; None for fp32 where weights are fp32, bf16 where they are bf16,
            and fp16 elsewhere.
        capabilities: devices to compile for, as ``(major, minor)``. None given: every one that TensorRT-RTX knows from
            8.0 on, for fp8 weights from 8.9 on; for TensorRT the device of this machine, as it compiles for no other.
        batch_sizes: how many slots steps take, ascending; of the batch sizes the bundle was built for. An engine can
            be loaded for any of them.
        plain: also compile for one token at a time. Kernels for one token want weights in an order of their own, so
            this stores them a second time; without it plain decoding runs padded to the narrowest tree.
    """

    runtime: EngineRuntime
    compute: ComputedIn | None = None
    capabilities: tuple[Capability, ...] = ()
    batch_sizes: tuple[int, ...] = (1,)
    plain: bool = False

    def __post_init__(self) -> None:
        if self.runtime not in ENGINE_RUNTIMES:
            known = ", ".join(ENGINE_RUNTIMES)
            raise BuildError(f"backend is {self.runtime!r}; expected one of {known} to compile for")
        if self.compute not in (None, *COMPUTE):
            raise BuildError(f"compute is {self.compute!r}; expected one of {', '.join(COMPUTE)}")
        if self.runtime not in COMPILERS and (self.capabilities or self.batch_sizes != (1,) or self.plain):
            raise BuildError(
                f"backend is {self.runtime}, whose graphs run on any device, any number of requests and one token at a "
                "time; compute capabilities, engine_batch_sizes and a plain profile are for "
                f"{' and '.join(COMPILERS)}: leave them out"
            )
        if not self.batch_sizes or any(size < 1 for size in self.batch_sizes):
            raise BuildError(f"engine_batch_sizes are {list(self.batch_sizes)}; expected at least one, each 1 or more")


def check_stored(stored: Collection[str], capabilities: Collection[Capability]) -> None:
    """Checks that devices compute in the types that a bundle's matrices are stored in.

    Raises:
        BuildError: one does not; names it.
    """
    older = sorted(device for device in capabilities if device < FP8_CAPABILITY)
    if "fp8" in stored and older:
        raise BuildError(
            f"compute_capability is {dotted(older[0])}, and fp8 weights need {dotted(FP8_CAPABILITY)} "
            "(Ada) or higher, as older GPUs do not know that type; compile for other devices, or build with "
            "--precision int8, which takes as much memory"
        )


def check_batches(asked: Sequence[int], built: Sequence[int]) -> None:
    """Checks that a bundle was built for the batch sizes that engines are to be compiled for.

    Raises:
        BuildError: it was not; names one and what there is.
    """
    unknown = sorted(set(asked) - set(built))
    if unknown:
        raise BuildError(
            f"engine_batch_sizes has {unknown[0]}, and the bundle is built for {', '.join(map(str, built))}; choose of "
            "these, or build it with that --max-batch-size"
        )


def dotted(capability: Capability) -> str:
    """``(8, 9)`` as ``8.9``."""
    return f"{capability[0]}.{capability[1]}"


def capability(text: str) -> Capability:
    """``89``, ``8.9`` or ``sm_89`` as ``(8, 9)``.

    Raises:
        BuildError: the text is none of these.
    """
    digits = text.lower().removeprefix("sm").removeprefix("_").replace(".", "")
    if not digits.isdecimal() or not 2 <= len(digits) <= 3 or digits[0] == "0":
        raise BuildError(f"compute capability {text!r}: expected something like 89, 8.9 or sm_89")
    return int(digits[:-1]), int(digits[-1])
