"""Options of ``specexport build``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specexport.contract.engines import BACKENDS, COMPILERS, BackendName
from specexport.contract.errors import BuildError
from specexport.contract.methods import MethodOptions, read_methods
from specexport.contract.model import LoweredAs
from specexport.contract.shapes import batch_points
from specexport.exporter.checkpoints.config import quantized_in, read_model_config
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.engines.options import EngineOptions, check_batches, check_stored
from specexport.exporter.storage import PRECISIONS, Precision, Storage

LOWERINGS: tuple[LoweredAs, ...] = ("native", "portable")
DEFAULT_BLOCK_SIZE = 32
DEFAULT_MAX_BATCH_SIZE = 8
MAX_BATCH_SIZE = 64
MAX_RANKS = 16


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    Attributes:
        target: folder or hub id of the model whose distribution is sampled.
        output: the bundle's folder; replaced only with ``overwrite``.
        methods: the default first, each with its options: methods, mappings with their keys, or
            texts as ``--method`` takes. Those that need no graph work in every bundle and need not be named.
        tensor_parallel: processes that share the target, each with its part of every layer; what proposes stays whole.
        inputs_embeds: let prompts hold embeddings instead of tokens.
        max_seq_len: longest sequence in tokens; None for the models' limit, at most 2048.
        max_batch_size: most requests that run at once; steps are planned for the powers of two up to it.
        precision: how the target's matrices are stored; None for fp32, and for a checkpoint that is quantized already
            for what keeps its own integers. Matrices that it has quantized keep them at the same number of bits.
            ``stored`` is as the checkpoint stores them, each in what holds it; it is what None is for a GGUF file.
        rest: how matrices are stored that a quantized checkpoint holds in floating point; None for ``precision``.
        draft_precision: how those of what proposes are: a draft, heads, a speculator; None for int4 where ``precision``
            is, else int8. What they round off costs acceptance and never changes what the target says.
        block_size: quantized weights that share a scale: 16, 32, 64, 128 or 256; None for 32. At most 32 do in what
            proposes in int4: more cost more acceptance than they save. Lowered portably every column of a matrix has
            one scale, as opset 20 knows no blocks.
        calibration_data: a file of text that the target's matrices are rounded to int4 for, or of JSON lines with
            ``text`` or ``messages``; None for the text that ships.
        lowering: ``native`` for ONNX Runtime 1.28 or newer; ``portable`` for TensorRT 10.3 and older ONNX Runtimes.
        posterior_threshold: epsilon of typical acceptance, where a request asks for that and does not say.
        posterior_alpha: its alpha.
        backend: what the bundle is meant to run on. For others than ``onnxruntime`` it also has the step program's
            graphs, which decide on the device what is accepted.
        engines: how to compile them; None to leave that to ``specexport compile`` on the device.
        overwrite: replace an existing bundle.
        resume: go on from the stages that an earlier build finished before it was killed; for outputs whose name stands
            for all that goes into them, and one process at a time.
    """

    target: str
    output: Path
    methods: tuple[MethodOptions, ...] = ()
    tensor_parallel: int = 1
    inputs_embeds: bool = False
    max_seq_len: int | None = None
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    precision: Precision | None = None
    rest: Precision | None = None
    draft_precision: Precision | None = None
    block_size: int | None = None
    calibration_data: Path | None = None
    lowering: LoweredAs = "native"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    backend: BackendName = "onnxruntime"
    engines: EngineOptions | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", read_methods(self.methods))
        names = [method.name for method in self.methods]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise BuildError(f"method {doubled[0]!r} was asked for twice; a bundle has each once")
        for name in ("precision", "rest", "draft_precision"):
            value = getattr(self, name)
            if value is not None and value not in PRECISIONS:
                raise BuildError(f"{name} is {value!r}; expected one of {', '.join(PRECISIONS)}")
        if self.backend not in BACKENDS:
            raise BuildError(f"backend is {self.backend!r}; expected one of {', '.join(BACKENDS)}")
        if self.engines is not None and self.engines.runtime != self.backend:
            raise BuildError(f"backend is {self.backend}, and engines for {self.engines.runtime} were asked for")
        if self.engines is not None:
            check_stored((self.stored.kind, self.proposing.kind), self.engines.capabilities)
            check_batches(self.engines.batch_sizes, batch_points(self.max_batch_size))
        if self.inputs_embeds and self.backend in COMPILERS:
            raise BuildError(
                f"inputs_embeds was given with backend {self.backend}, whose engines read tokens alone; leave one out"
            )
        if not 1 <= self.tensor_parallel <= MAX_RANKS:
            raise BuildError(f"tensor_parallel is {self.tensor_parallel}; expected 1 to {MAX_RANKS}")
        if not 1 <= self.max_batch_size <= MAX_BATCH_SIZE:
            raise BuildError(f"max_batch_size is {self.max_batch_size}; expected 1 to {MAX_BATCH_SIZE}")
        for name in ("posterior_threshold", "posterior_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise BuildError(f"{name} is {getattr(self, name)}; expected 0 to 1")
        if self.lowering not in LOWERINGS:
            raise BuildError(f"lowering is {self.lowering!r}; expected one of {', '.join(LOWERINGS)}")
        if self.block_size not in (None, 16, 32, 64, 128, 256):
            raise BuildError(f"block_size is {self.block_size}; expected 16, 32, 64, 128 or 256")
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
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise BuildError(f"max_seq_len is {self.max_seq_len}; expected at least 2")

    def for_checkpoint(self) -> BuildOptions:
        """These options with a precision: of a target that is quantized already, its own, if no other was asked for.

        What it has not quantized is then stored as it has it. Lowered portably, int4 becomes int8: opset 20 has no
        integers of four bits.

        Raises:
            BuildError: the target is not there, or nothing here reads its format.
        """
        if self.precision not in (None, "stored"):
            return self
        path = locate(self.target)
        quantized = quantized_in(path)
        halves: dict[object, Precision] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        rest = halves.get(read_model_config(path).dtype, "fp32")
        if quantized is None:
            return replace(self, precision=rest if self.precision == "stored" else "fp32")
        if quantized[1] == "stored":
            if self._on_cpu:
                return replace(self, precision="stored")
            if self.precision == "stored":
                raise BuildError(
                    f"precision is 'stored' with lowering {self.lowering} and backend {self.backend}, which have no "
                    "such scales as GGUF; choose another precision, or the native lowering and backend onnxruntime"
                )
            return replace(self, precision="int8")
        kind = "int8" if self.lowering == "portable" and quantized[1] == "int4" else quantized[1]
        return replace(self, precision=kind, rest=rest)

    @property
    def _on_cpu(self) -> bool:
        return self.lowering == "native" and self.backend == "onnxruntime"

    @property
    def calibrated(self) -> bool:
        """Whether matrices are rounded for a text: to int4 for CPUs, where scales may be of any kind."""
        return self.precision == "int4" and self.rest is None and self._on_cpu and self.tensor_parallel == 1

    @property
    def stored(self) -> Storage:
        """How the target's matrices are stored; lowered portably each column has one scale."""
        block_size = None if self.lowering == "portable" else self.block_size or DEFAULT_BLOCK_SIZE
        on_cpu = self._on_cpu
        # Ranks meet between nodes of the graph itself.
        branches = on_cpu and self.tensor_parallel == 1
        return Storage(self.precision or "fp32", block_size, self.rest, any_scales=on_cpu, branches=branches)

    @property
    def proposing(self) -> Storage:
        """How what only proposes is stored: a draft, Medusa heads, an MLP speculator."""
        kind = self.draft_precision or ("int4" if self.precision == "int4" else "int8")
        block_size = self.stored.block_size
        if kind == "int4" and block_size is not None:
            block_size = min(block_size, DEFAULT_BLOCK_SIZE)
        return replace(self.stored, kind=kind, block_size=block_size, rest=None)
