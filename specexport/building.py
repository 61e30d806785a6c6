"""Builds bundles for commands and engines: optional extras, progress bars, and the cache of bundles.

The cache holds a bundle for each combination of options and contents of checkpoints.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import io
import json
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from tqdm import tqdm

from specexport.contract.engines import ENGINE_RUNTIMES
from specexport.contract.errors import BuildError, BundleError, RequestError
from specexport.contract.folders import describe_error, expanded, locked, remove, temporary_folder, writing
from specexport.contract.manifest import Manifest
from specexport.contract.methods import MethodOptions, method_type
from specexport.contract.reading import read_manifest, sha256
from specexport.exporter.checkpoints.locate import GGUF, find
from specexport.exporter.checkpoints.quiet import gc_paused
from specexport.exporter.options import CompileOptions, require_effect
from specexport.exporter.records import fingerprint
from specexport.options import EngineOptions
from specexport.runtime.bundle import check_bundle
from specexport.runtime.machine import MachineRecord, cache_folder, remove_unused

_BYTES = 1 << 20
"""Progress with a larger total counts bytes."""
_BAR = "{desc:38} {percentage:3.0f}% {elapsed} {bar}"
_FINISHED_BAR = _BAR + " {n_fmt}B of {total_fmt}B"
_RUNNING_BAR = _FINISHED_BAR + ", {remaining} left"
_READ = (".json", ".safetensors", ".gguf", ".jinja", ".txt", ".model", ".pt", "pytorch_model.bin", "adapter_model.bin")
"""Suffixes of the files that a build may read from a checkpoint."""
_TEMPLATES = "additional_chat_templates/*.jinja"
_BY_CONTENT = ("target", "methods", "calibration_data")
"""Options of a build that name files; the files' content counts, not their paths."""
_ABANDONED_AFTER = 7 * 24 * 3600
"""Seconds after which an unfinished build is removed."""


@contextmanager
def needs_extra(doing: str, extra: str) -> Iterator[None]:
    """Turns failed imports in its block into an error that names the missing extra.

    Raises:
        BuildError: an import failed.
    """
    try:
        yield
    except ImportError as error:
        reason: BaseException = error
        while reason.__cause__ is not None:  # transformers hides which of its imports failed
            reason = reason.__cause__
        remedy = f"install it with: pip install 'specexport[{extra}]'"
        if not isinstance(reason, ImportError):  # such as an AttributeError of a namespace
            remedy = f"one of its libraries fails; see whether a file or folder in {Path.cwd()} has a library's name"
        raise BuildError(f"{doing} needs the [{extra}] extra ({reason}); {remedy}") from error


def exporter(doing: str = "building") -> types.ModuleType:
    """Imports the exporter.

    Args:
        doing: what it is for, in an error.

    Raises:
        BuildError: the ``[export]`` extra is not installed, or Python is older than 3.11.
    """
    if sys.version_info < (3, 11):
        raise BuildError(
            f"{doing} needs Python 3.11 or newer; this is {sys.version_info.major}.{sys.version_info.minor}, where "
            "bundles only run"
        )
    with needs_extra(doing, "export"), gc_paused():
        from specexport.exporter import build
    # Collecting millions of objects at exit would take Python more than a second.
    atexit.register(gc.freeze)
    return build


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows the progress of a step, given its name, the amount done and the total.

    It writes to standard error: a bar for each step in a terminal, otherwise a line for each finished step.
    """
    stream = sys.stderr  # steps may replace it to silence libraries
    terminal, size = stream.isatty(), shutil.get_terminal_size()
    bars: dict[str, tqdm[NoReturn]] = {}

    def report(name: str, done: int, total: int) -> None:
        bar = bars.get(name)
        if bar is None or (bar.disable and done < total):
            bar = bars[name] = tqdm(
                desc=name,
                total=total,
                unit_scale=True,
                unit_divisor=1024,
                bar_format=_RUNNING_BAR if total >= _BYTES else _BAR,
                file=stream if terminal else io.StringIO(),
                ncols=min(80, size.columns),
                nrows=size.lines,
            )
        if bar.disable:  # the step has finished
            return
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.bar_format = _FINISHED_BAR if total >= _BYTES else _BAR
            if not terminal:
                print(bar, file=stream)
            bar.close()

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()


def warn_of_settings(manifest: Manifest) -> None:
    """Warns on standard error of settings that make texts differ from transformers'."""
    for note in manifest.notes:
        print(f"warning: {note}", file=sys.stderr)


def cached_bundle(
    options: Mapping[str, Any], build: Callable[[dict[str, Any], Path], object], *, check_hashes: bool = True
) -> Path:
    """Returns the checked bundle of these build options, and builds it if it is missing or damaged.

    Its name is a hash of the options and of the contents of all checkpoints and the calibration data: changed files are
    built again, moved files are not. If several processes need a bundle, one builds it and the others wait. A killed
    build leaves nothing under the bundle's name; the next build resumes after the models that were written. A damaged
    bundle is removed with a warning. Building also removes unfinished builds untouched for a week. Without a writable
    home folder or ``$SPECEXPORT_CACHE``, a bundle is deleted when the process ends, with a warning.

    Args:
        options: fields of ``BuildOptions``, without ``output``.
        build: called with the options and the output folder.
        check_hashes: compare files with their hashes; otherwise only with their sizes.

    Raises:
        BuildError: a checkpoint or the calibration data cannot be found, or the build fails.
    """
    root = cache_folder() or temporary_folder()
    methods: tuple[MethodOptions, ...] = options.get("methods", ())
    checkpoints = {"target": find(str(options["target"]))}
    for method in methods:
        for key, kind in method_type(method.name).sources.items():
            source = str(getattr(method, key))
            checkpoints[f"{method.name}.{key}"] = find(source) if kind == "checkpoint" else expanded(source)
    text = options.get("calibration_data")
    identity = {
        "options": {key: value for key, value in options.items() if key not in _BY_CONTENT},
        "calibration_data": None if text is None else _file_hash(Path(text)),
        "methods": [
            {
                key: value
                for key, value in msgspec.to_builtins(method).items()
                if key not in method_type(method.name).sources
            }
            for method in methods
        ],
        "checkpoints": {name: _content(folder) for name, folder in checkpoints.items()},
        "exporter": fingerprint(),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    name = f"{Path(str(options['target'])).name}-{key[:16]}"
    bundle = root / "bundles" / name
    if damage(bundle, check_hashes) is None:
        return bundle
    if not _is_usable(root):
        root = temporary_folder()
        bundle = root / "bundles" / name
        if damage(bundle, check_hashes) is None:
            return bundle
        warnings.warn(
            "there is no writable home folder: the bundle is deleted when this process ends; set SPECEXPORT_CACHE to a "
            "folder to keep it",
            stacklevel=2,
        )
    with _writing_cache(root):
        bundle.parent.mkdir(parents=True, exist_ok=True)
        with locked(bundle.parent / f".{bundle.name}.turn"):
            damaged = damage(bundle, check_hashes)
            if damaged is not None:  # no other process has built it meanwhile
                if os.path.lexists(bundle):
                    warnings.warn(f"{damaged}; it is removed and built again", stacklevel=2)
                    remove(bundle)
                remove_unused(root.glob("*/.*"), seconds=_ABANDONED_AFTER)
                build(dict(options), bundle)
    return bundle


@contextmanager
def _writing_cache(root: Path) -> Iterator[None]:
    """Turns errors of writing below the cache folder into errors that say how to choose another."""
    try:
        with writing(root):
            yield
    except BuildError as error:
        if error.__cause__ is None or not str(error).startswith(str(root)):
            raise
        raise BuildError(f"{error}; SPECEXPORT_CACHE names the cache folder: set it to another one") from error


def _is_usable(root: Path) -> bool:
    """Whether the cache folder is writable; a folder named by ``$SPECEXPORT_CACHE`` is used in any case."""
    if os.environ.get("SPECEXPORT_CACHE"):
        return True
    if cache_folder() is None:
        return False
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    return os.access(root, os.W_OK)


def damage(bundle: Path, check_hashes: bool) -> BundleError | None:
    """The error that a bundle is missing or damaged; None if it is intact."""
    try:
        check_bundle(bundle, read_manifest(bundle), hashes=check_hashes)
    except BundleError as error:
        return error
    return None


def _content(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint, by name; stored in the cache folder until a file's size or time changes."""
    hashes: dict[str, str] = {}
    files = sorted([*folder.iterdir(), *folder.glob(_TEMPLATES)]) if folder.is_dir() else []
    # Other files in the folder of a GGUF model were derived from it, perhaps by this process.
    models = [file for file in files if file.suffix == GGUF]
    for file in files if any(file.suffix == ".safetensors" for file in files) else models or files:
        if not file.name.endswith(_READ) or not file.is_file():
            continue
        state = file.stat()
        stamp = f"{state.st_size} {state.st_mtime_ns} {state.st_ino}"
        record = MachineRecord("hashes", (ascii(file.resolve()), stamp), str)
        digest = record.load()
        if digest is None:
            digest = sha256(file)
            record.save(digest)
        hashes[file.relative_to(folder).as_posix()] = digest
    return hashes


def _file_hash(file: Path) -> str:
    """SHA-256 of a file that an option names."""
    try:
        return sha256(file)
    except OSError as error:
        raise BuildError(describe_error(error, file)) from error


def no_chat_template(model: str | Path | None) -> RequestError:
    """The error for messages to a model that has no chat template."""
    return RequestError(
        f"{model}: the model has no chat template, so it cannot read messages; continue texts with: specexport run "
        f"{model}"
    )


def bundle_of_model(
    options: EngineOptions, methods: tuple[MethodOptions, ...], build: dict[str, Any], *, chat: bool = False
) -> Path:
    """The folder of a model's bundle in the cache; see :func:`cached_bundle`.

    Args:
        build: settings of the build, as far as the caller set them.
        chat: refuse to build a model without a chat template.
    """
    require_effect(build, methods)
    identity = {name: str(value) if isinstance(value, Path) else value for name, value in build.items()}
    identity |= {"target": str(options.model), "methods": methods}
    for name, value in (("max_seq_len", options.max_model_len), ("tensor_parallel", options.tensor_parallel_size)):
        identity |= {} if value is None else {name: value}
    if options.backend not in (None, "onnxruntime"):  # onnxruntime runs any bundle
        identity["backend"] = options.backend
    return cached_bundle(identity, partial(_build, chat=chat), check_hashes=options.check_hashes)


def _build(options: dict[str, Any], output: Path, *, chat: bool) -> None:
    module = exporter()
    if chat and not module.load_tokenizer(module.locate(options["target"])).chat_templates:
        raise no_chat_template(options["target"])
    backend = options.get("backend")
    engines = CompileOptions(backend) if backend in ENGINE_RUNTIMES else None
    settings = module.BuildOptions(output=output, resume=True, engines=engines, **options)
    print(f"building {output}", file=sys.stderr)
    with progress_bars() as progress:
        warn_of_settings(read_manifest(module.build(settings, progress)))
