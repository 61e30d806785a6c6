"""Options of compiling engines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated

from specexport.contract.engines import COMPILERS, ComputedIn, EngineRuntime
from specexport.contract.errors import BuildError
from specexport.contract.options import Options, option

Capability = tuple[int, int]
FP8_CAPABILITY: Capability = (8, 9)
"""The first compute capability with float8_e4m3fn."""
_engine = partial(option, group="engines: for --backend tensorrt and tensorrt-rtx; --compute for onnxruntime-cuda too")


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


def _capabilities(text: str) -> tuple[Capability, ...]:
    return tuple(map(capability, text.split(",")))


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BuildError(f"--engine-batch-sizes is {text!r}; expected numbers with commas, such as 1,4")
    return tuple(sorted(set(map(int, parts))))


class CompileOptions(Options, frozen=True):
    """Options of compiling a bundle's graphs.

    Attributes:
        backend: library that compiles the engines and runs them.
        compute: type of activations and the KV cache (default: fp32 for fp32 weights, bf16 for bf16, else fp16).
        compute_capability: devices to compile for, such as 86,89,120 (default: for TensorRT-RTX all from 8.0 on, for
            fp8 from 8.9 on; for TensorRT the device of this machine).
        engine_batch_sizes: batch sizes of the bundle to compile for, such as 1,4.
        plain_profile: also compile for one token at a time; plain decoding is then not padded, but weights are stored
            twice.
    """

    backend: EngineRuntime
    compute: Annotated[ComputedIn | None, _engine()] = None
    compute_capability: Annotated[
        tuple[Capability, ...], _engine("CC[,CC...]", parse=_capabilities, expected="pairs such as (8, 9)")
    ] = ()
    engine_batch_sizes: Annotated[tuple[int, ...], _engine("B[,B...]", parse=_sizes, ge=1)] = (1,)
    plain_profile: Annotated[bool, _engine()] = False

    def check(self) -> None:
        """Checks the options against the backend.

        Raises:
            BuildError: options of engines were given for onnxruntime-cuda, or there are no batch sizes.
        """
        chosen = self.compute_capability or self.engine_batch_sizes != (1,) or self.plain_profile
        if self.backend not in COMPILERS and chosen:
            raise BuildError(
                f"backend is {self.backend}, whose graphs run on any device, any number of requests and one token at a "
                "time; compute_capability, engine_batch_sizes and plain_profile are for "
                f"{' and '.join(COMPILERS)}: leave them out",
                param="backend",
            )
        if not self.engine_batch_sizes:
            raise BuildError("engine_batch_sizes is empty; expected at least one", param="engine_batch_sizes")


def check_stored(stored: Collection[str], capabilities: Collection[Capability]) -> None:
    """Checks that devices support the types of a bundle's matrices.

    Raises:
        BuildError: a device does not; names it.
    """
    older = sorted(device for device in capabilities if device < FP8_CAPABILITY)
    if "fp8" in stored and older:
        raise BuildError(
            f"compute_capability is {dotted(older[0])}, and fp8 weights need {dotted(FP8_CAPABILITY)} "
            "(Ada) or higher, as older GPUs do not know that type; compile for other devices, or build with "
            "--precision int8, which takes as much memory",
            param="compute_capability",
        )


def check_batches(wanted: Sequence[int], built: Sequence[int]) -> None:
    """Checks that a bundle was built for the batch sizes of its engines.

    Raises:
        BuildError: it was not; names a missing size and the existing ones.
    """
    unknown = sorted(set(wanted) - set(built))
    if unknown:
        raise BuildError(
            f"engine_batch_sizes has {unknown[0]}, and the bundle is built for {', '.join(map(str, built))}; choose "
            "among these, or build it with that --max-batch-size"
        )
