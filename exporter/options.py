"""Options of ``specexport build``. Imports no torch, so that ``--help`` needs none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from specexport.contract.engines import COMPILERS, BackendName
from specexport.contract.errors import BuildError
from specexport.contract.manifest import GenerationDefaults
from specexport.contract.methods import MethodOptions, method_type, read_methods
from specexport.contract.model import LoweredAs, Probability, StoredAs
from specexport.contract.options import Options, option
from specexport.contract.shapes import batch_points
from specexport.exporter.engines.options import CompileOptions, check_batches, check_stored

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
            of compute capability 8.9 or higher (default: fp32, or as the checkpoint is quantized).
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
        """Checks options against each other.

        Raises:
            BuildError: two contradict each other; names them.
        """
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
                f"calibration_data was given with precision {self.precision}, lowering {self.lowering}, backend "
                f"{self.backend} and tensor_parallel {self.tensor_parallel}; only int4 for backend onnxruntime in one "
                "process is calibrated. Leave it out",
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
    """Checks that every setting that a user chose has an effect.

    Raises:
        BuildError: a setting has none; names it.
    """
    if settings.get("draft_precision") is not None and not _stores_drafts(methods):
        raise BuildError(
            "draft_precision was given without a draft, heads or a speculator to apply it to", param="draft_precision"
        )
    require_blocks(settings, methods)


def require_blocks(settings: Mapping[str, Any], methods: Sequence[MethodOptions]) -> None:
    """Checks that a chosen block size applies to some matrix; passes if the checkpoint decides a precision.

    Raises:
        BuildError: it applies to none.
    """
    kinds = {settings.get("precision"), settings.get("draft_precision") if _stores_drafts(methods) else "fp32"}
    if settings.get("block_size") is not None and kinds <= {"fp32", "fp16", "bf16", "fp8"}:
        raise BuildError(
            "block_size was given, and only int8 and int4 have blocks; choose one, or leave it out", param="block_size"
        )


def _stores_drafts(methods: Sequence[MethodOptions]) -> bool:
    return any(method_type(method.name).stores_weights() for method in methods)
