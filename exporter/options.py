"""Options of ``specexport build`` and ``compile``. Imports no torch, so that ``--help`` needs none."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from specexport.contract.engines import COMPILERS, BackendName, ComputedIn, EngineRuntime
from specexport.contract.errors import BuildError
from specexport.contract.manifest import GenerationDefaults
from specexport.contract.methods import MethodOptions, method_type, read_methods
from specexport.contract.model import LoweredAs, Probability, StoredAs
from specexport.contract.options import Options, option
from specexport.contract.shapes import batch_points

PREFILL_CHUNK = 64
DEFAULT_BLOCK_SIZE = 32
QUANTIZED: tuple[StoredAs, ...] = ("int8", "int4", "fp8", "stored")
"""Precisions with less than 16 bits; builds report the effect of their rounding."""
_DEFAULTS = GenerationDefaults()
_methods, _sizes, _weights, _device = (
    partial(option, group=group)
    for group in (
        "methods: the first is the default; requests may choose the others by name",
        "sizes",
        "weights",
        "device",
    )
)


# --- engines ----------------------------------------------------------------------------------------------------------
Capability = tuple[int, int]
FP8_CAPABILITY: Capability = (8, 9)
"""The first compute capability with float8_e4m3fn."""
_engine = partial(option, group="engines: for --backend tensorrt and tensorrt-rtx; --compute for onnxruntime-cuda too")


def dotted(capability: Capability) -> str:
    """``(8, 9)`` as ``8.9``."""
    return f"{capability[0]}.{capability[1]}"


def capability(text: str) -> Capability:
    """``89``, ``8.9`` or ``sm_89`` as ``(8, 9)``."""
    digits = text.lower().removeprefix("sm").removeprefix("_").replace(".", "")
    if not digits.isdecimal() or not 2 <= len(digits) <= 3 or digits[0] == "0":
        raise BuildError(f"--compute-capability is {text!r}; expected something like 89, 8.9 or sm_89")
    return int(digits[:-1]), int(digits[-1])


def _capabilities(text: str) -> tuple[Capability, ...]:
    return tuple(map(capability, text.split(",")))


def _batch_sizes(text: str) -> tuple[int, ...]:
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
        tuple[Capability, ...],
        _engine("CC[,CC...]", parse=_capabilities, expected="89, 8.9 or sm_89, or several; in Python pairs (8, 9)"),
    ] = ()
    engine_batch_sizes: Annotated[tuple[int, ...], _engine("B[,B...]", parse=_batch_sizes, ge=1)] = (1,)
    plain_profile: Annotated[bool, _engine()] = False

    def check(self) -> None:
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
    """Checks that devices support the types of a bundle's matrices."""
    older = sorted(device for device in capabilities if device < FP8_CAPABILITY)
    if "fp8" in stored and older:
        raise BuildError(
            f"compute_capability is {dotted(older[0])}, and fp8 weights need {dotted(FP8_CAPABILITY)} "
            "(Ada) or higher, as older GPUs do not know that type; compile for other devices, or build with "
            "--precision int8, which takes as much memory",
            param="compute_capability",
        )


def check_batches(wanted: Sequence[int], built: Sequence[int]) -> None:
    """Checks that a bundle was built for the batch sizes of its engines."""
    unknown = sorted(set(wanted) - set(built))
    if unknown:
        raise BuildError(
            f"engine_batch_sizes has {unknown[0]}, and the bundle is built for {', '.join(map(str, built))}; choose "
            "among these, or build it with that --max-batch-size"
        )


# --- builds -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Storage:
    """The storage of matrices.

    Attributes:
        kind: ``fp16`` and ``bf16`` are cast to fp32 in the graph. ``int8`` and ``int4`` have symmetric scales for
            blocks along the summed axis, ``fp8`` (float8_e4m3fn) a scale for each column; DequantizeLinear restores
            all three. ``stored`` keeps each matrix as the checkpoint stores it, or else takes ``int8``.
        block_size: number of weights that share a scale; halved for a matrix that it does not divide. With None, for
            int8 only, each column has one scale, as opset 20 has no blocks, and rows to look up are stored in fp16.
        rest: the precision of matrices that a quantized checkpoint holds in floating point; None for ``kind``.
        any_scales: whether scales may be of any kind that checkpoints have (with zero points or offsets, in fp16, in
            two levels, for blocks of fp8), and an embedding that is also the head is stored once. For CPUs only:
            TensorRT refuses some of this, and ONNX Runtime was not tried with it on GPUs. int4 then has zero points.
        branches: whether each expert of a mixture has a branch of its own; for CPUs only, as compiled engines and
            captured graphs have no control flow.
    """

    kind: StoredAs
    block_size: int | None
    rest: StoredAs | None = None
    any_scales: bool = False
    branches: bool = False


class BuildSettings(Options, frozen=True, kw_only=True):
    """The settings of a build by ``specexport build``, or on first use.

    In the portable lowering, every column of a quantized matrix has one scale, as opset 20 has no blocks.

    Attributes:
        posterior_threshold: epsilon of typical acceptance.
        posterior_alpha: alpha of typical acceptance.
        max_batch_size: maximum number of concurrent requests; steps are built for the powers of two up to it.
        inputs_embeds: let prompts contain embeddings, such as those of an audio or image encoder.
        precision: precision of the weights; stored keeps each matrix as the checkpoint stores it; fp8 pays only on GPUs
            of compute capability 8.9 or higher (default: stored; of unquantized models fp32 for GPUs and lowered
            portably).
        draft_precision: precision of the draft, Medusa heads or the speculator; lower ones cost acceptance, and never
            change the text (default: int8, or int4 if the target is int4).
        block_size: number of weights that share a scale in int8 and int4 (default: 32, also the maximum for int4
            drafts).
        calibration_data: text to calibrate int4 on, or JSON lines with text or messages (default: a built-in text).
        lowering: portable uses only operators up to opset 20, for TensorRT 10.3 (JetPack 6) and Python 3.10; without
            int4.
    """

    posterior_threshold: Annotated[Probability, _methods("E")] = _DEFAULTS.posterior_threshold
    posterior_alpha: Annotated[Probability, _methods("A")] = _DEFAULTS.posterior_alpha
    max_batch_size: Annotated[int, _sizes("B", ge=1, le=64)] = 8
    inputs_embeds: Annotated[bool, _sizes()] = False
    precision: Annotated[StoredAs | None, _weights()] = None
    draft_precision: Annotated[StoredAs | None, _weights()] = None
    block_size: Annotated[Literal[16, 32, 64, 128, 256] | None, _weights("N")] = None
    calibration_data: Annotated[Path | None, _weights("FILE")] = None
    lowering: Annotated[LoweredAs, _device()] = "native"


class BuildOptions(BuildSettings, frozen=True):
    """The options of a build.

    Attributes:
        target: a model: Hugging Face folder, hub id or .gguf file.
        output: folder to write.
        tensor_parallel: number of processes that share the target on one host; on GPUs each has a GPU of its own.
        max_seq_len: maximum number of tokens of a prompt and its output (default: the model's, at most 2048).
        backend: backend that will run the bundle; all but onnxruntime run whole steps on a GPU.
        overwrite: replace an existing bundle.
        methods: the default first, each with its options: methods, mappings with their keys, or texts as for
            ``--method``. Methods that need no graph work in every bundle and need not be named.
        rest: precision of matrices that a quantized checkpoint holds in floating point; None for ``precision``.
        engines: options of compiling engines; None to leave that to ``specexport compile`` on the device.
        resume: continue after the stages that a killed build finished; for outputs whose name identifies all inputs,
            and for one process at a time.
    """

    target: Annotated[str, option("MODEL")]
    output: Annotated[Path, option("BUNDLE", short="-o")]
    methods: Annotated[tuple[MethodOptions, ...], option(hidden=True, unchecked=True)] = ()
    tensor_parallel: Annotated[int, _device("N", short="-tp", ge=1, le=16)] = 1
    max_seq_len: Annotated[int | None, _sizes("S", ge=2)] = None
    rest: Annotated[StoredAs | None, option(hidden=True)] = None
    backend: Annotated[BackendName, _device()] = "onnxruntime"
    engines: Annotated[CompileOptions | None, option(hidden=True)] = None
    overwrite: bool = False
    resume: Annotated[bool, option(hidden=True)] = False

    def check(self) -> None:
        msgspec.structs.force_setattr(self, "methods", read_methods(self.methods))
        names = [method.name for method in self.methods]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise BuildError(f"method {doubled[0]!r} was given twice; a bundle has each method once")
        if self.engines is not None and self.engines.backend != self.backend:
            raise BuildError(
                f"backend is {self.backend}, but the engines are for {self.engines.backend}", param="backend"
            )
        if self.engines is not None:
            check_stored((self.target_storage.kind, self.draft_storage.kind), self.engines.compute_capability)
            check_batches(self.engines.engine_batch_sizes, batch_points(self.max_batch_size))
        if self.inputs_embeds and self.backend in COMPILERS:
            raise BuildError(
                f"inputs_embeds was given with backend {self.backend}, whose engines read only tokens; leave one out",
                param="inputs_embeds",
            )
        if self.lowering == "portable":
            for name in ("precision", "rest", "draft_precision"):
                if getattr(self, name) == "int4":
                    raise BuildError(
                        f"{name} is 'int4', which the portable lowering cannot store: opset 20 has no four-bit "
                        "integers; choose int8, fp16 or fp32, or the native lowering",
                        param=name,
                    )
            if self.block_size is not None:
                raise BuildError(
                    f"block_size is {self.block_size}, but opset 20 knows no blocks: in the portable lowering each "
                    "column of a matrix has one scale; leave block_size out, or choose the native lowering",
                    param="block_size",
                )
        if self.calibration_data is not None and not self.calibrated:
            raise BuildError(
                f"calibration_data was given with precision {self.precision or 'unset'}, lowering {self.lowering}, "
                f"backend {self.backend} and tensor_parallel {self.tensor_parallel}; only int4 for backend onnxruntime "
                "in one process is calibrated. Leave it out",
                param="calibration_data",
            )

    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime runs the bundle on the CPU, with operators of any kind."""
        return self.lowering == "native" and self.backend == "onnxruntime"

    @property
    def calibrated(self) -> bool:
        """Whether matrices are calibrated on a text: int4 for CPUs, where scales may be of any kind."""
        return self.precision == "int4" and self.rest is None and self.on_cpu and self.tensor_parallel == 1

    @property
    def target_storage(self) -> Storage:
        """The storage of the target's matrices; the portable lowering has one scale per column."""
        block_size = None if self.lowering == "portable" else self.block_size or DEFAULT_BLOCK_SIZE
        branches = self.on_cpu and self.tensor_parallel == 1  # split graphs are cut between nodes, not inside branches
        return Storage(self.precision or "fp32", block_size, self.rest, any_scales=self.on_cpu, branches=branches)

    @property
    def draft_storage(self) -> Storage:
        """The storage of matrices that only serve proposals: of a draft, Medusa heads or an MLP speculator."""
        kind = self.draft_precision or ("int4" if self.precision == "int4" else "int8")
        block_size = self.target_storage.block_size
        if kind == "int4" and block_size is not None:
            block_size = min(block_size, DEFAULT_BLOCK_SIZE)
        return dataclasses.replace(self.target_storage, kind=kind, block_size=block_size, rest=None)


def require_effect(settings: Mapping[str, Any], methods: Sequence[MethodOptions]) -> None:
    """Checks that every setting that a user chose has an effect."""
    if settings.get("draft_precision") is not None and not _stores_drafts(methods):
        raise BuildError(
            "draft_precision was given without a draft, heads or a speculator to apply it to", param="draft_precision"
        )
    require_blocks(settings, methods)


def require_blocks(settings: Mapping[str, Any], methods: Sequence[MethodOptions]) -> None:
    """Checks that a chosen block size applies to some matrix; passes if the checkpoint decides a precision."""
    kinds = {settings.get("precision"), settings.get("draft_precision") if _stores_drafts(methods) else "fp32"}
    if settings.get("block_size") is not None and kinds <= {"fp32", "fp16", "bf16", "fp8"}:
        raise BuildError(
            "block_size was given, and only int8 and int4 have blocks; choose one, or leave it out", param="block_size"
        )


def _stores_drafts(methods: Sequence[MethodOptions]) -> bool:
    return any(method_type(method.name).stores_weights() for method in methods)
