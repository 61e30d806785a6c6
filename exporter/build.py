"""``specexport build``: from checkpoints to a bundle."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import onnx
import torch

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
from specexport.contract.methods import Method
from specexport.contract.reading import file_entry, read_manifest, write_manifest
from specexport.exporter.build_plan import PREFILL_CHUNK
from specexport.exporter.checkpoints.checkpoint import TRANSFORMERS_VERSION, load_tokenizer
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.settings import setting_notes
from specexport.exporter.checkpoints.templates import other_template
from specexport.exporter.engines.bundle import CompileReport, compile_graphs
from specexport.exporter.engines.compiler import load_library, require_collectives
from specexport.exporter.engines.program import write_program
from specexport.exporter.method import Build, exporter_of
from specexport.exporter.models import WrittenTarget, for_checkpoint, target_stage
from specexport.exporter.options import BuildOptions
from specexport.exporter.sound import require_finite
from specexport.exporter.stages import RECORDS, Stages
from specexport.exporter.writing import Progress


def build(
    options: BuildOptions,
    progress: Progress | None = None,
    compiled: Callable[[CompileReport], None] | None = None,
) -> Path:
    """Builds a bundle.

    It is written beside its place and renamed at the end, so that a build that fails or is killed leaves nothing half
    written there.

    Args:
        options: what to build.
        progress: see :data:`Progress`.
        compiled: called with what became of the engines, if the bundle is to have some.

    Returns:
        The bundle's folder.

    Raises:
        BuildError: something about the checkpoints, the options or the output folder is wrong.
    """
    report = progress or (lambda *_: None)
    options = for_checkpoint(options)
    output = options.output
    if output.exists() and not options.overwrite:
        raise BuildError(f"{output}: exists already; choose another folder or pass --overwrite to replace it")
    if output.exists() and not (output / MANIFEST_NAME).is_file():
        raise BuildError(f"{output}: exists and is not a bundle (no {MANIFEST_NAME}); not replacing it")
    if options.engines is not None and options.engines.backend in COMPILERS:
        library = load_library(options.engines.backend)  # whether it is there should not be found out at the end
        if options.tensor_parallel > 1:
            require_collectives(library, options.engines.compute_capability)
    with written_beside(output, overwrite=options.overwrite, resume=options.resume) as folder:
        stages = Stages(folder, _built_with())
        manifest = _fill(folder, options, stages, report)
        if options.engines is not None:
            found = compile_graphs(folder, manifest, options.engines, report)
            if compiled is not None:
                compiled(found)
        stages.close()
    return output


def _fill(folder: Path, options: BuildOptions, stages: Stages, progress: Progress) -> Manifest:
    path = locate(options.target)
    tokenizer = load_tokenizer(path)
    writers: dict[str, str] = {}
    for method in options.methods:
        stage = exporter_of(method).stage
        if stage is not None and (other := writers.setdefault(stage, method.name)) != method.name:
            raise BuildError(f"{other!r} and {method.name!r} both have a {stage}; a bundle has one, so ask for one")
    for method in options.methods:
        exporter_of(method).check(method, path, tokenizer.tokenizer)
    target = stages.run("target", WrittenTarget, lambda: target_stage(folder, options, tokenizer, progress))
    plan, model = target.plan, target.model
    made = _export(Build(folder, options, plan, model.vocab_size, model.max_positions, progress), stages)
    written = [model, *(one for method in made for one in method.models.values())]
    for index, one in enumerate(written):
        progress("running the graphs once", index, len(written))
        require_finite(folder, one, options.lowering)
    progress("running the graphs once", len(written), len(written))

    (folder / "tokenizer").mkdir()
    text = tokenizer.tokenizer.to_str(pretty=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(text, encoding="utf-8")
    templates = _write_templates(folder, tokenizer.chat_templates)
    program: tuple[ProgramGraph, ...] = ()
    if options.backend != "onnxruntime" and options.tensor_parallel == 1:
        progress("tracing the step program", 0, 1)
        program = write_program(folder, made, target.model.cache, options.lowering)
        progress("tracing the step program", 1, 1)
    from specexport import __version__

    end = tokenizer.eos_token_id
    if end is not None and end >= model.vocab_size:
        end = None
    named = other_template(path, tokenizer.chat_templates)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        specexport_version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        built_with=_built_with(),
        backend=options.backend,
        lowering=options.lowering,
        max_seq_len=plan.max_seq_len,
        prefill_chunk=PREFILL_CHUNK,
        batch_sizes=plan.batches,
        target=target.model,
        methods=tuple(made),
        tokenizer=TokenizerInfo(
            file="tokenizer/tokenizer.json",
            eos_token_ids=tuple(dict.fromkeys((*target.eos_token_ids, *([] if end is None else [end])))),
            special_tokens=tokenizer.special_tokens,
            chat_template=templates.pop(DEFAULT_TEMPLATE, None),
            named_templates=templates,
            split_special_tokens=tokenizer.split_special_tokens,
        ),
        generation=msgspec.structs.replace(
            target.generation,
            posterior_threshold=options.posterior_threshold,
            posterior_alpha=options.posterior_alpha,
        ),
        files=_file_entries(folder, stages.files, progress),
        program=program,
        notes=(*setting_notes(path, end, target.eos_token_ids), *(() if named is None else (named,))),
    )
    write_manifest(folder, manifest)
    return read_manifest(folder)


def _export(build: Build, stages: Stages) -> list[Method]:
    """The methods, with the models of their own; those that the stages have on record are not exported again."""
    made: list[Method] = []
    for method in build.plan.methods:
        exporter = exporter_of(method)
        if exporter.stage is not None:
            export = functools.partial(exporter.export, method, build)
            made.append(stages.run(exporter.stage, Method, export))
        else:
            made.append(method)
    return made


def _write_templates(folder: Path, sources: dict[str, str]) -> dict[str, str]:
    """The files of chat templates by name."""
    files = {}
    for name, source in sources.items():
        place = "chat_template" if name == DEFAULT_TEMPLATE else f"additional_chat_templates/{name}"
        files[name] = f"tokenizer/{place}.jinja"
        (folder / files[name]).parent.mkdir(exist_ok=True)
        (folder / files[name]).write_text(source, encoding="utf-8")
    return files


def _built_with() -> dict[str, str]:
    return {"torch": str(torch.__version__), "transformers": TRANSFORMERS_VERSION, "onnx": onnx.__version__}


def _file_entries(folder: Path, known: Sequence[FileEntry], progress: Progress) -> tuple[FileEntry, ...]:
    """Entries of every file; ``known`` are those of files that stages hashed already."""
    entries = {entry.path: entry for entry in known}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and RECORDS not in path.parts)
    for index, path in enumerate(files):
        name = path.relative_to(folder).as_posix()
        if name not in entries:
            entries[name] = file_entry(folder, name)
        progress("hashing files", index + 1, len(files))
    return tuple(entry for _, entry in sorted(entries.items()))
