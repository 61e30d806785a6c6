"""``specexport build``: from checkpoints to a bundle."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import onnx
import torch
import transformers

from specexport.contract.engines import COMPILERS, ProgramGraph
from specexport.contract.errors import BuildError
from specexport.contract.folders import written_beside
from specexport.contract.manifest import (
    DEFAULT_TEMPLATE,
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    TokenizerInfo,
)
from specexport.contract.methods import Method, method_type
from specexport.contract.reading import file_entry, is_bundle, read_manifest, write_manifest
from specexport.contract.signature import target_signature
from specexport.contract.values import Progress
from specexport.exporter.build_state import Build, WrittenTarget
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.settings import setting_notes
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, other_template, other_tokens
from specexport.exporter.engines.bundle import CompileReport, chosen_devices, compile_graphs
from specexport.exporter.engines.compiler import load_library, require_collectives
from specexport.exporter.graph_checks import require_finite
from specexport.exporter.method import exporter_of
from specexport.exporter.options import PREFILL_CHUNK, BuildOptions, require_blocks
from specexport.exporter.records import RECORDS, Records
from specexport.exporter.target import build_target, for_checkpoint
from specexport.exporter.trace import write_program


def build(
    options: BuildOptions,
    progress: Progress | None = None,
    compiled: Callable[[CompileReport], None] | None = None,
) -> Path:
    """Builds a bundle.

    It is written to a folder beside the output and renamed at the end, so that a build that fails or is killed leaves
    no partial bundle. ``compiled`` is called with the report on the engines, if any are compiled.

    Raises:
        BuildError: the checkpoints, the options or the output folder are invalid.
    """
    report = progress or (lambda *_: None)
    _require_output(options)  # before anything is downloaded
    options = for_checkpoint(options)
    require_blocks(msgspec.structs.asdict(options), options.methods)
    if options.engines is not None and options.engines.backend in COMPILERS:
        library = load_library(options.engines.backend)  # fails before the long build rather than after it
        if options.tensor_parallel > 1:
            require_collectives(library, options.engines.compute_capability)
        chosen_devices(library, options.engines, {options.target_storage.kind, options.draft_storage.kind})
    with written_beside(options.output, overwrite=options.overwrite, resume=options.resume) as folder:
        records = Records(folder)
        source = locate(options.target)
        build = Build(options, folder, report, source, load_tokenizer(source))
        check_methods(build)
        build.target = records.run("target", WrittenTarget, lambda: build_target(build))
        methods = write_drafts(build, records)
        check_graphs(build, methods)
        templates = write_tokenizer(build)
        program = trace_program(build, methods)
        manifest = describe_bundle(build, methods, templates, program, records.files)
        if options.engines is not None:
            engines = compile_graphs(folder, manifest, options.engines, report)
            if compiled is not None:
                compiled(engines)
        records.close()
    return options.output


def _require_output(options: BuildOptions) -> None:
    output = options.output
    if output.exists() and not options.overwrite:
        raise BuildError(f"{output}: exists already; choose another folder or pass --overwrite to replace it")
    if output.exists() and not is_bundle(output):
        raise BuildError(f"{output}: exists and is not a bundle (no {MANIFEST_NAME}); not replacing it")


def check_methods(build: Build) -> None:
    """Refuses methods that write the same folder of the bundle, and checkpoints that do not fit the target."""
    writers: dict[str, str] = {}
    for method in build.options.methods:
        role = method_type(method.name).role
        if role and (other := writers.setdefault(role, method.name)) != method.name:
            raise BuildError(f"{other!r} and {method.name!r} both have a {role}; choose one of these methods")
    for method in build.options.methods:
        exporter_of(method).check(method, build.source, build.tokenizer.tokenizer)


def write_drafts(build: Build, records: Records) -> tuple[Method, ...]:
    """Builds the methods' own models; returns the methods with them."""
    methods: list[Method] = []
    for method in build.plan.methods:
        if method.role and method.draft is None:  # otherwise it was written with the target
            export = exporter_of(method).export
            method = records.run(method.role, Method, functools.partial(export, method, build))
        methods.append(method)
    return tuple(methods)


def check_graphs(build: Build, methods: Sequence[Method]) -> None:
    """Runs every graph once, and refuses outputs that are not finite."""
    graphs = [(build.target.model, target_signature(build.target.model, ()))]
    graphs += [(method.written_draft, method.signature) for method in methods if method.signature is not None]
    for index, (model, signature) in enumerate(graphs):
        build.progress("running the graphs once", index, len(graphs))
        require_finite(build.folder, model, signature, build.options.lowering)
    build.progress("running the graphs once", len(graphs), len(graphs))


def write_tokenizer(build: Build) -> dict[str, str]:
    """Writes the tokenizer and the chat templates; returns the templates' files by name."""
    folder = build.folder / "tokenizer"
    folder.mkdir()
    text = build.tokenizer.tokenizer.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    templates = {}
    for name, source in build.tokenizer.chat_templates.items():
        stem = "chat_template" if name == DEFAULT_TEMPLATE else f"additional_chat_templates/{name}"
        file = folder / f"{stem}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source, encoding="utf-8")
        templates[name] = file.relative_to(build.folder).as_posix()
    return templates


def trace_program(build: Build, methods: Sequence[Method]) -> tuple[ProgramGraph, ...]:
    """Traces the step program, which keeps a step on a device."""
    if build.options.backend == "onnxruntime" or build.options.tensor_parallel > 1:
        return ()
    with build.during("tracing the step program"):
        return write_program(build.folder, methods, build.target.model.cache, build.options.lowering)


def describe_bundle(
    build: Build,
    methods: tuple[Method, ...],
    templates: dict[str, str],
    program: tuple[ProgramGraph, ...],
    recorded: Sequence[FileEntry],
) -> Manifest:
    """Writes the manifest and returns it; ``recorded`` holds the entries of files that are already hashed."""
    from specexport import __version__

    options, plan, tokenizer, target = build.options, build.plan, build.tokenizer, build.target
    end = tokenizer.eos_token_id
    if end is not None and end >= build.vocab_size:
        end = None
    notes = setting_notes(build.source, end, target.eos_token_ids)
    others = other_template(build.source, tokenizer.chat_templates), other_tokens(build.source, tokenizer.tokenizer)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        specexport_version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        built_with={
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "onnx": onnx.__version__,
        },
        backend=options.backend,
        lowering=options.lowering,
        max_seq_len=plan.max_seq_len,
        prefill_chunk=PREFILL_CHUNK,
        batch_sizes=plan.batches,
        target=target.model,
        methods=methods,
        tokenizer=TokenizerInfo(
            file="tokenizer/tokenizer.json",
            eos_token_ids=tuple(dict.fromkeys((*target.eos_token_ids, *([] if end is None else [end])))),
            special_tokens=tokenizer.special_tokens,
            templates=templates,
            split_special_tokens=tokenizer.split_special_tokens,
        ),
        generation=msgspec.structs.replace(
            target.generation,
            posterior_threshold=options.posterior_threshold,
            posterior_alpha=options.posterior_alpha,
        ),
        files=_file_entries(build, recorded),
        program=program,
        notes=(*notes, *(note for note in others if note is not None)),
    )
    write_manifest(build.folder, manifest)
    return read_manifest(build.folder)


def _file_entries(build: Build, recorded: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    entries = {entry.path: entry for entry in recorded}
    files = sorted(path for path in build.folder.rglob("*") if path.is_file() and RECORDS not in path.parts)
    for index, path in enumerate(files):
        name = path.relative_to(build.folder).as_posix()
        if name not in entries:
            entries[name] = file_entry(build.folder, name)
        build.progress("hashing files", index + 1, len(files))
    return tuple(entry for _, entry in sorted(entries.items()))
