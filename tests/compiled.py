"""Bundles with engines of ``tests.tensorrt_stand_in``, at the shapes that ``specexport compile`` gives real ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from specexport.contract import engines as ce
from specexport.contract.manifest import Manifest
from specexport.contract.methods import with_draft
from specexport.contract.model import Model
from specexport.contract.reading import file_entry, read_manifest, write_manifest
from specexport.exporter.engines.source import CompileJob, model_jobs, program_jobs
from tests.tensorrt_stand_in import TensorRT


def compiled(
    source: Path,
    folder: Path,
    *,
    program: Sequence[ce.ProgramGraph] = (),
    plain: bool = False,
    batches: Sequence[int] = (1,),
    **changes: Any,
) -> Path:
    """A copy of a bundle with engines.

    Args:
        source: the bundle.
        folder: where to copy it, unless it lies there already.
        program: the step program's graphs, which are in the folder.
        plain: whether the target also runs one token at a time.
        batches: batch sizes of steps.
        changes: of what the manifest says of every engine.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    manifest = read_manifest(folder)

    def engine(file: str, job: CompileJob, rank: int = 0, **more: Any) -> ce.CompiledEngine:
        path = Path(file).with_suffix(".engine")
        (folder / path).write_text(json.dumps({"file": file, "profiles": job.sizes, **more}))
        described = {
            "file": path.as_posix(),
            "source": file,
            "runtime": "tensorrt-rtx",
            "version": TensorRT.__version__,
            "compute_capabilities": ("8.9",),
            "compute": "fp32",
            "rank": rank,
            "profiles": job.profiles,
        }
        return ce.CompiledEngine(**(described | changes))

    def with_engines(model: Model) -> Model:
        jobs = model_jobs(model, manifest, batches, plain=plain)
        compiled_engines = [engine(model.graph.master, job) for job in jobs if not model.ranks]
        for rank, files in enumerate(model.ranks):
            (job,) = jobs
            compiled_engines.append(engine(files.master, job, rank, segments=files.segments, ranks=len(model.ranks)))
        return msgspec.structs.replace(model, engines=tuple(compiled_engines))

    def program_engines(graph: ce.ProgramGraph) -> ce.ProgramGraph:
        jobs = program_jobs(graph, manifest, batches)
        return msgspec.structs.replace(graph, engines=tuple(engine(graph.file, job) for job in jobs))

    new: Manifest = msgspec.structs.replace(
        manifest,
        backend="tensorrt-rtx",
        target=with_engines(manifest.target),
        methods=tuple(
            with_draft(method, with_engines(method.draft)) if method.draft is not None else method
            for method in manifest.methods
        ),
        program=tuple(map(program_engines, program)),
    )
    added = sorted({name for each in new.engines for name in (each.file, each.source)})
    listed = {file_.path for file_ in manifest.files}
    files = (*manifest.files, *(file_entry(folder, name) for name in added if name not in listed))
    write_manifest(folder, msgspec.structs.replace(new, files=files))
    return folder
