"""``specexport compile``: adds engines to a bundle."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import onnx

from specexport.contract.engines import COMPILERS, Commit, CompiledEngine, ComputedIn, EngineRuntime, ProgramGraph
from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import with_draft
from specexport.contract.model import Model, StoredAs
from specexport.contract.reading import changing, check_files, exchange_manifest, file_entry
from specexport.contract.values import Progress
from specexport.exporter.build_state import during
from specexport.exporter.engines.compiler import (
    CompilerLibrary,
    EngineReport,
    compile_graph,
    load_library,
    require_collectives,
)
from specexport.exporter.engines.source import CompileJob, model_jobs, program_jobs, write_segments, write_source
from specexport.exporter.options import (
    FP8_CAPABILITY,
    Capability,
    CompileOptions,
    capability,
    check_batches,
    check_stored,
    dotted,
)


@dataclass(frozen=True)
class CompileReport:
    """The result of compiling a bundle's engines."""

    engines: tuple[EngineReport, ...]
    runtime: EngineRuntime
    version: str
    compute_capabilities: tuple[str, ...]


def compile_bundle(folder: Path, options: CompileOptions, progress: Progress | None = None) -> CompileReport:
    """Compiles every graph of a bundle and lists the engines in its manifest.

    Existing engines for other devices and libraries stay; engines for the same device and library are replaced. The
    manifest is replaced atomically at the end, so a compilation that fails or is killed leaves the bundle unchanged.

    Raises:
        BuildError: the library is not installed, does not support the device, or refuses a graph; the bundle accepts
            embeddings in prompts, or lacks a batch size; another process is changing it, or it cannot be written.
        BundleError: the bundle is incomplete.
    """
    with changing(folder) as manifest:
        return compile_graphs(folder, manifest, options, progress or (lambda *_: None))


def compile_graphs(folder: Path, manifest: Manifest, options: CompileOptions, report: Progress) -> CompileReport:
    """As :func:`compile_bundle`, for a bundle that this process has locked or is still writing."""
    check_files(folder, manifest, hashes=False)
    if manifest.target.embedding_size is not None and options.backend in COMPILERS:
        raise BuildError(
            f"{folder}: was built with --inputs-embeds, but engines only read tokens; build it without the flag"
        )
    if manifest.has_states:
        raise BuildError(
            f"{folder}: a model has layers without attention, which run only on CPUs so far; build it with "
            "--backend onnxruntime"
        )
    check_batches(options.engine_batch_sizes, manifest.batch_sizes)
    for role, model in manifest.models.items():
        name = manifest.model_names[role]
        if model.precision.only_cpu:
            raise BuildError(
                f"{folder}: the {name}'s {model.precision.weights} matrices have zero points, or other scales that are "
                f"for CPUs only; build with --backend {options.backend}, which rounds them for that"
            )
        if options.backend in COMPILERS and _transposes_integers(folder / model.graph.master):
            raise BuildError(
                f"{folder}: the {name}'s head is stored once with its embedding, which {options.backend} does not "
                f"read; build with --backend {options.backend}, which stores it apart"
            )
    if options.backend not in COMPILERS:
        _check_bfloat16(manifest, options.compute)
    library = load_library(options.backend) if options.backend in COMPILERS else None
    if library is not None and manifest.target.ranks:
        require_collectives(library, options.compute_capability)
    capabilities = tuple(map(dotted, chosen_devices(library, options, _stored(manifest)))) if library else ()
    compiler = _Compiler(folder, manifest, options, library, capabilities, report)
    models = {role: compiler.model(model) for role, model in manifest.models.items()}
    # The host runs the steps of a split target.
    graphs = () if manifest.target.ranks else manifest.program or _trace_program(folder, manifest)
    program = tuple(map(compiler.program, graphs))
    new = msgspec.structs.replace(
        manifest,
        backend=options.backend,
        target=models["target"],
        methods=tuple(
            with_draft(method, models[method.role]) if method.draft is not None else method
            for method in manifest.methods
        ),
        program=program,
    )
    new = _with_files(folder, manifest, new)
    exchange_manifest(folder, new)
    return CompileReport(tuple(compiler.reports), options.backend, library.version if library else "", capabilities)


def _transposes_integers(path: Path) -> bool:
    """Whether a graph transposes integer constants, which compilers accept only before a DequantizeLinear."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = {constant.name for constant in graph.initializer if constant.data_type == onnx.TensorProto.INT8}
    return any(node.op_type == "Transpose" and node.input[0] in constants for node in graph.node)


@dataclass
class _Compiler:
    """Compiles the graphs of a bundle; without a ``library`` it only rewrites them for onnxruntime."""

    folder: Path
    manifest: Manifest
    options: CompileOptions
    library: CompilerLibrary | None
    capabilities: tuple[str, ...]
    progress: Progress
    reports: list[EngineReport] = field(default_factory=list)

    def model(self, model: Model) -> Model:
        """The model with its engines, or, if it is split, with those of every rank."""
        compute = self.options.compute or default_compute(model.precision.weights)
        new = []
        # An additional profile for one token at a time makes compiled engines store the weights twice.
        plain = self.options.plain_profile or self.library is None
        ranks = len(model.ranks)
        for rank in range(max(1, ranks)):
            part = model.of_rank(rank)
            for job in model_jobs(part, self.manifest, self._batches, plain=plain):
                source = self._source(part.graph.master, compute, job, part.engines, ranks)
                engine = self._engine(source, job, compute, rank)
                new.append(self._with_segments(engine, job, part.engines) if ranks and not self.library else engine)
        return msgspec.structs.replace(model, engines=(*self._kept(model.engines), *new))

    def program(self, graph: ProgramGraph) -> ProgramGraph:
        """A graph of the step program with its engines; the commit graph computes in the caches' type."""
        moves_rows, weights = isinstance(graph, Commit), self.manifest.target.precision.weights
        compute = self.options.compute or default_compute(weights) if moves_rows else "fp32"
        new = []
        for job in program_jobs(graph, self.manifest, self._batches):
            source = self._source(graph.file, compute, job, graph.engines) if moves_rows else self.folder / graph.file
            new.append(self._engine(source, job, compute))
        return msgspec.structs.replace(graph, engines=(*self._kept(graph.engines), *new))

    def _source(
        self, master: str, compute: ComputedIn, job: CompileJob, engines: tuple[CompiledEngine, ...], ranks: int = 0
    ) -> Path:
        """The graph to compile; it is written unless an engine exists that was compiled from it."""
        drafts = f".k{job.drafts}" if job.drafts else ""
        slots = ".slots" if job.several else ""  # B is symbolic there
        kind = "" if self.library else ".cuda"
        path = (self.folder / master).with_name(f"{Path(master).stem}{drafts}{slots}{kind}.{compute}.onnx")
        if any(self.folder / engine.source == path for engine in engines):
            return path
        with during(self.progress, f"writing {path.name}"):
            compiled = self.library is not None
            write_source(self.folder / master, path, compute, job.drafts, job.fixed, compiled=compiled, ranks=ranks)
        return path

    @property
    def _batches(self) -> tuple[int, ...]:
        """Batch sizes of the engines; graphs that are not compiled run any number of slots."""
        return self.options.engine_batch_sizes if self.library else self.manifest.batch_sizes

    def _kept(self, engines: tuple[CompiledEngine, ...]) -> tuple[CompiledEngine, ...]:
        """The engines of other libraries and devices, which are kept."""
        replaced = (self.options.backend, self.capabilities)
        return tuple(engine for engine in engines if (engine.runtime, engine.compute_capabilities) != replaced)

    def _engine(self, source: Path, job: CompileJob, compute: ComputedIn, rank: int = 0) -> CompiledEngine:
        """Compiles a graph; without a library, the source itself is the engine."""
        output = source
        if self.library is None:
            report = _source_report(source, len(job.profiles))
        else:
            devices = "-".join(f"sm{device.replace('.', '')}" for device in self.capabilities)
            output = self._unlisted(source.with_name(f"{source.stem}.{self.options.backend}.{devices}.engine"))
            with during(self.progress, f"compiling {source.stem}"):
                capabilities = tuple(map(capability, self.capabilities))
                report = compile_graph(source, output, job.sizes, self.library, capabilities)
        self.reports.append(report)
        return CompiledEngine(
            file=output.relative_to(self.folder).as_posix(),
            source=source.relative_to(self.folder).as_posix(),
            runtime=self.options.backend,
            version=self.library.version if self.library else "",
            compute_capabilities=self.capabilities,
            compute=compute,
            rank=rank,
            profiles=job.profiles,
        )

    def _with_segments(
        self, engine: CompiledEngine, job: CompileJob, engines: tuple[CompiledEngine, ...]
    ) -> CompiledEngine:
        """A rank's graph with its segments; they are written unless another engine of the same graph has them."""
        segments = next((other.segments for other in engines if other.source == engine.source and other.segments), ())
        if not segments:
            written = write_segments(self.folder / engine.source, job.fixed)
            segments = tuple(path.relative_to(self.folder).as_posix() for path in written)
        return msgspec.structs.replace(engine, segments=segments)

    def _unlisted(self, path: Path) -> Path:
        """The path, with a number if the manifest lists it: listed files stay until the manifest is replaced."""
        listed = {self.folder / entry.path for entry in self.manifest.files}
        unlisted, number = path, 1
        while unlisted in listed:
            number += 1
            unlisted = path.with_name(f"{path.stem}-{number}{path.suffix}")
        return unlisted


def _source_report(source: Path, profiles: int) -> EngineReport:
    start = time.monotonic()
    nodes = onnx.load(source, load_external_data=False).graph.node
    attentions = sum(node.op_type in ("Attention", "GroupQueryAttention") for node in nodes)
    size, seconds = source.stat().st_size, time.monotonic() - start
    return EngineReport(source.name, profiles, len(nodes), attentions, None, size, seconds)


def default_compute(weights: StoredAs) -> ComputedIn:
    """The default type of activations: the weights' type, or fp16 for weights of 8 bits or fewer."""
    return weights if weights == "fp32" or weights == "bf16" else "fp16"


def _check_bfloat16(manifest: Manifest, compute: ComputedIn | None) -> None:
    """Refuses to compute in bf16 with quantized matrices, for which onnxruntime has no kernels on GPUs."""
    weights = manifest.target.precision.weights
    # By default, a method's own model computes in the type that its own matrices suggest.
    in_target = {kind for method in manifest.methods if method.draft is None for kind in method.stored}
    stored = _stored(manifest) if compute else {weights, *in_target}
    blocks = stored & {"int8", "int4"}
    if (compute or default_compute(weights)) == "bf16" and blocks:
        raise BuildError(
            f"compute is bf16, and onnxruntime has no bf16 kernels for {min(blocks)} matrices on GPUs; pass "
            "--compute fp16 or fp32"
        )


def _stored(manifest: Manifest) -> set[StoredAs]:
    """The precisions of the matrices of a bundle's graphs."""
    return {manifest.target.precision.weights}.union(*(method.stored for method in manifest.methods))


def chosen_devices(library: CompilerLibrary, options: CompileOptions, stored: set[StoredAs]) -> tuple[Capability, ...]:
    """The devices to compile for, checked against the library and the stored types."""
    if library.runtime == "tensorrt":
        here = _this_device()
        devices = options.compute_capability
        if devices and set(devices) != {here}:
            raise BuildError(
                f"compute_capability is {', '.join(map(dotted, devices))}, but TensorRT compiles only for "
                f"the device that it runs on, {dotted(here)}; leave it out, or compile on the other device",
                param="compute_capability",
            )
        check_stored(stored, (here,))
        return (here,)
    members = library.trt.ComputeCapability.__members__
    supported = sorted((int(name[2:-1]), int(name[-1])) for name in members if name[2:].isdecimal())
    least = FP8_CAPABILITY if "fp8" in stored else (8, 0)
    chosen = options.compute_capability or tuple(device for device in supported if device >= least)
    unsupported = [device for device in chosen if device not in supported]
    if unsupported:
        raise BuildError(
            f"compute_capability is {dotted(unsupported[0])}, which TensorRT-RTX {library.version} does not know; it "
            f"knows {', '.join(map(dotted, supported))}. Use --backend tensorrt on that device, or ONNX Runtime",
            param="compute_capability",
        )
    check_stored(stored, chosen)
    return tuple(sorted(set(chosen)))


def _this_device() -> Capability:
    """The compute capability of the first GPU."""
    try:
        from cuda.bindings import runtime as cudart
    except ImportError as error:
        raise BuildError(
            f"compiling for tensorrt needs cuda-bindings ({error}); install it with: pip install 'specexport[tensorrt]'"
        ) from error
    status, properties = cudart.cudaGetDeviceProperties(0)
    if status != cudart.cudaError_t.cudaSuccess:
        raise BuildError(
            f"TensorRT compiles on the device that will run the engine, and this machine shows none ({status.name}); "
            "copy the bundle to the device and run specexport compile there"
        )
    return int(properties.major), int(properties.minor)


def _trace_program(folder: Path, manifest: Manifest) -> tuple[ProgramGraph, ...]:
    """Traces the step program of a bundle that was built without one; plain decoding works without it."""
    try:
        from specexport.exporter.trace import write_program
    except ImportError as error:
        if not manifest.methods:
            return ()
        raise BuildError(
            f"{folder}: was built for {manifest.backend} and lacks the step program's graphs, which torch traces "
            f"({error}); build it with --backend tensorrt --no-compile, or compile where the [export] extra is"
        ) from error
    return write_program(folder, manifest.methods, manifest.target.cache, manifest.lowering)


def _with_files(folder: Path, old: Manifest, new: Manifest) -> Manifest:
    """The new manifest with entries for its engines' files, without those that only the old manifest used."""
    old_files, new_files = (_files(folder, manifest) for manifest in (old, new))
    kept = tuple(entry for entry in old.files if entry.path not in old_files | new_files)
    return msgspec.structs.replace(new, files=(*kept, *(file_entry(folder, path) for path in sorted(new_files))))


def _files(folder: Path, manifest: Manifest) -> set[str]:
    """The files of the step program and the engines: graphs, engines, their sources and converted weights."""
    files = {graph.file for graph in manifest.program}
    for engine in manifest.engines:
        converted = Path(engine.source).with_suffix(".bin").as_posix()
        files |= {engine.file, engine.source, *engine.segments}
        if (folder / converted).is_file():
            files.add(converted)
    return files
