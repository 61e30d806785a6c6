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
"""Precisions that round more than half precision does; builds report by how much."""
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
    """How matrices are stored.

    Attributes:
        kind: ``fp16`` and ``bf16`` are cast to fp32 in the graph. ``int8`` and ``int4`` are symmetric, in blocks along
            the summed axis, and undone by DequantizeLinear; so is ``fp8`` (float8_e4m3fn), with one scale a column.
            ``stored`` takes for each matrix what holds it as the checkpoint does, or else ``int8``.
        block_size: weights that share a scale; halved for a matrix it does not divide. None, for int8 only, gives each
            column one scale, as opset 20 knows no blocks; rows that are looked up are then stored in fp16.
        rest: how matrices that a quantized checkpoint holds in floating point are stored; None for ``kind``.
        any_scales: whether scales may be of any kind that a checkpoint has (with zero points or offsets, in fp16, in
            two levels, of blocks of fp8), and an embedding that is also the head is stored once: for CPUs only, as
            TensorRT refuses some, and ONNX Runtime was not tried with them on GPUs. int4 then has zero points.
        branches: whether each expert of a mixture has a branch of its own: for CPUs only, as compiled engines and
            captured graphs know no control flow.
    """

    kind: StoredAs
    block_size: int | None
    rest: StoredAs | None = None
    any_scales: bool = False
    branches: bool = False


class BuildSettings(Options, frozen=True, kw_only=True):
    """How a model is built, wherever that happens: by ``specexport build``, or on first use.

    Lowered portably, every column of a quantized matrix has one scale, as opset 20 knows no blocks.

    Attributes:
        posterior_threshold: epsilon of typical acceptance.
        posterior_alpha: alpha of typical acceptance.
        max_batch_size: most concurrent requests; steps are built for the powers of two up to it.
        inputs_embeds: let prompts hold embeddings instead of tokens, such as those of an audio or image encoder.
        precision: how matrices are stored; stored: each as the checkpoint has it; fp8 pays only on GPUs of compute
            capability 8.9 or higher (default: fp32, or as the checkpoint is quantized).
        draft_precision: the same for the draft, Medusa heads or the speculator; costs acceptance, never changes the
            text (default: int8, or int4 where the target is).
        block_size: weights that share a scale in int8 and int4 (default: 32, which is also the most in int4 drafts).
        calibration_data: text that int4 is rounded for, or JSON lines with text or messages (default: a text that
            ships).
        lowering: portable: operators up to opset 20 only, for TensorRT 10.3 (JetPack 6) and Python 3.10; not for int4.
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
    """What to build.

    Attributes:
        target: a model: Hugging Face folder, hub id or .gguf file.
        output: folder to write.
        tensor_parallel: processes of one host that share the target; on GPUs each has one of its own.
        max_seq_len: tokens of the longest prompt and its output (default: the model's, at most 2048).
        backend: what will run the bundle; all but onnxruntime run whole steps on a GPU.
        overwrite: replace an existing bundle.
        methods: the default first, each with its options: methods, mappings with their keys, or texts as ``--method``
            takes. Those that need no graph work in every bundle and need not be named.
        rest: how matrices that a quantized checkpoint holds in floating point are stored; None for ``precision``.
        engines: how to compile them; None to leave that to ``specexport compile`` on the device.
        resume: go on from the stages that an earlier build finished before it was killed; for outputs whose name stands
            for all that goes into them, and one process at a time.
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
            raise BuildError(f"method {doubled[0]!r} was asked for twice; a bundle has each once")
        if self.engines is not None and self.engines.backend != self.backend:
            raise BuildError(f"backend is {self.backend}, and engines for {self.engines.backend} were asked for")
        if self.engines is not None:
            check_stored((self.target_storage.kind, self.draft_storage.kind), self.engines.compute_capability)
            check_batches(self.engines.engine_batch_sizes, batch_points(self.max_batch_size))
        if self.inputs_embeds and self.backend in COMPILERS:
            raise BuildError(
                f"inputs_embeds was given with backend {self.backend}, whose engines read only tokens; leave one out"
            )
        if self.lowering == "portable":
            for name in ("precision", "rest", "draft_precision"):
                if getattr(self, name) == "int4":
                    raise BuildError(
                        f"{name} is 'int4', which the portable lowering cannot store: opset 20 has no four-bit "
                        "integers; choose int8, fp16 or fp32, or the native lowering"
                    )
            if self.block_size is not None:
                raise BuildError(
                    f"block_size is {self.block_size}, but opset 20 knows no blocks: lowered portably each column of a "
                    "matrix has one scale; leave block_size out, or choose the native lowering"
                )
        if self.calibration_data is not None and not self.calibrated:
            raise BuildError(
                f"calibration_data was given with precision {self.precision}, lowering {self.lowering}, backend "
                f"{self.backend} and tensor_parallel {self.tensor_parallel}; only int4 for backend onnxruntime in one "
                "process is rounded for a text. Leave it out"
            )

    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime runs it on the CPU, with operators of any kind."""
        return self.lowering == "native" and self.backend == "onnxruntime"

    @property
    def calibrated(self) -> bool:
        """Whether matrices are rounded for a text: to int4 for CPUs, where scales may be of any kind."""
        return self.precision == "int4" and self.rest is None and self.on_cpu and self.tensor_parallel == 1

    @property
    def target_storage(self) -> Storage:
        """How the target's matrices are stored; the portable lowering has one scale per column."""
        block_size = None if self.lowering == "portable" else self.block_size or DEFAULT_BLOCK_SIZE
        branches = self.on_cpu and self.tensor_parallel == 1  # a split graph is cut between nodes, not inside branches
        return Storage(self.precision or "fp32", block_size, self.rest, any_scales=self.on_cpu, branches=branches)

    @property
    def draft_storage(self) -> Storage:
        """How matrices that only serve proposals are stored: of a draft, Medusa heads or an MLP speculator."""
        kind = self.draft_precision or ("int4" if self.precision == "int4" else "int8")
        block_size = self.target_storage.block_size
        if kind == "int4" and block_size is not None:
            block_size = min(block_size, DEFAULT_BLOCK_SIZE)
        return dataclasses.replace(self.target_storage, kind=kind, block_size=block_size, rest=None)


def require_effect(settings: Mapping[str, Any], methods: Sequence[MethodOptions]) -> None:
    """Refuses settings of a build that a user chose and that would change nothing.

    Raises:
        BuildError: names the setting.
    """
    if settings.get("draft_precision") is not None and not _stores_drafts(methods):
        raise BuildError("draft_precision was given without a draft, heads or a speculator to apply it to")
    require_blocks(settings, methods)


def require_blocks(settings: Mapping[str, Any], methods: Sequence[MethodOptions]) -> None:
    """Refuses a size of blocks that no matrix would have, unless a precision is left to the checkpoint.

    Raises:
        BuildError: names the setting.
    """
    kinds = {settings.get("precision"), settings.get("draft_precision") if _stores_drafts(methods) else "fp32"}
    if settings.get("block_size") is not None and kinds <= {"fp32", "fp16", "bf16", "fp8"}:
        raise BuildError("block_size was given, and only int8 and int4 have blocks; choose one, or leave it out")


def _stores_drafts(methods: Sequence[MethodOptions]) -> bool:
    return any(method_type(method.name).stores_weights() for method in methods)
