"""Reads, checks and writes a bundle's manifest and files."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.engines import COMPILERS
from specexport.contract.errors import UNREADABLE, BuildError, BundleError, SpecExportError, explained
from specexport.contract.folders import expanded, write_lock, writing
from specexport.contract.manifest import FORMAT_VERSION, MANIFEST_NAME, FileEntry, Manifest
from specexport.contract.methods import Method, MethodOptions, decode_hook
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.contract.values import counted

_MAX_MANIFEST_BYTES = 16 << 20
_MAX_CACHE_BYTES = 1 << 40
_PART = f"{MANIFEST_NAME}.part"
_REPLACEABLE = (".onnx", ".engine", ".bin", ".part")
"""Suffixes of graphs, engines, their converted weights, and unfinished files."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes ``specexport.json`` into a folder."""
    (folder / MANIFEST_NAME).write_bytes(_encoded(manifest))


def _encoded(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[Manifest]:
    """Locks a bundle whose graphs and engines the block replaces, and yields its manifest.

    The block writes files first and the manifest last (:func:`exchange_manifest`), so that the bundle is always
    complete. Graphs and engines that the manifest does not list are removed before and after.

    Raises:
        BundleError: the bundle is incomplete.
        BuildError: another process changes it, it is a snapshot in the hub's cache, or the system refuses to write;
            names the path.
    """
    manifest = read_manifest(folder)
    root = folder.resolve()
    if not all((folder / entry.path).resolve().is_relative_to(root) for entry in manifest.files):
        raise BuildError(
            f"{folder}: a snapshot in the hub's cache, whose files are not to be changed; copy it (cp -rL) and change "
            "the copy"
        )
    with writing(folder), write_lock(folder):
        manifest = read_manifest(folder)
        (folder / _PART).touch()  # refuses a folder that cannot be written before any work is done
        _sweep(folder, manifest)
        try:
            yield manifest
        finally:
            _sweep(folder, read_manifest(folder))


def _sweep(folder: Path, manifest: Manifest) -> None:
    listed = {folder / entry.path for entry in manifest.files}
    for path in list(folder.rglob("*")):
        if path.suffix in _REPLACEABLE and path not in listed:
            path.unlink(missing_ok=True)


def exchange_manifest(folder: Path, manifest: Manifest) -> None:
    """Checks a manifest as a reader would, then replaces the old one; requires :func:`changing`."""
    part = folder / _PART
    part.write_bytes(_encoded(manifest))
    _read(part)
    part.replace(folder / MANIFEST_NAME)


def is_bundle(path: str | Path) -> bool:
    """Whether a path is a bundle's, and not a checkpoint's, or the name of a model on the hub."""
    return (expanded(path) / MANIFEST_NAME).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Reads and validates a bundle's manifest, but not its other files.

    Raises:
        BundleError: the folder or the manifest is missing, malformed, too new, or names a path outside the bundle.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "no such folder"
        raise BundleError(f"{folder}: {what}; expected a bundle made by 'specexport build'")
    if not path.is_file():
        raise BundleError(f"{folder}: no {MANIFEST_NAME}; expected a bundle made by 'specexport build'")
    return _read(path)


def _read(path: Path) -> Manifest:
    size = path.stat().st_size
    if size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{path}: {size} bytes; a manifest has at most {_MAX_MANIFEST_BYTES}")
    raw = path.read_bytes()
    try:
        version = msgspec.json.decode(raw, type=_Version).format_version
        if version > FORMAT_VERSION:
            raise BundleError(
                f"{path}: format version {version} is newer than {FORMAT_VERSION}, the newest this specexport reads; "
                "upgrade specexport or build the bundle again"
            )
        if version < FORMAT_VERSION:
            raise BundleError(
                f"{path}: format version {version} is older than {FORMAT_VERSION}, which this specexport reads; build "
                "the bundle again"
            )
        manifest = msgspec.json.decode(raw, type=Manifest, dec_hook=decode_hook)
    except UNREADABLE as error:
        raise BundleError(f"{path}: not a valid manifest: {explained(error)}; build the bundle again") from error
    try:
        for check in (_check_files_listed, _check_methods, _check_tokens, _check_models):
            check(manifest)
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from error
    return manifest


class _Version(msgspec.Struct):
    format_version: Annotated[int, Meta(ge=1)]


def _invalid(what: str, again: str = "build") -> BundleError:
    """The error for an invalid manifest, with its remedy."""
    return BundleError(f"{what}; {again} the bundle again")


def _check_files_listed(manifest: Manifest) -> None:
    """Checks that every path stays in the bundle, and that every used file is listed."""
    listed = set()
    for entry in manifest.files:
        pure = PurePosixPath(entry.path)
        plain = entry.path == str(pure) and not pure.is_absolute() and ".." not in pure.parts
        if not plain or "\\" in entry.path or ":" in entry.path:
            raise _invalid(f"files: {entry.path!r} is not a plain path in the bundle")
        if entry.path in listed:
            raise _invalid(f"files: {entry.path!r} is listed twice")
        listed.add(entry.path)
    used = [manifest.tokenizer.file, *manifest.tokenizer.templates.values()]
    used += [file for method in manifest.methods for file in method.files]
    for model in manifest.models.values():
        used += [model.weights, model.graph.master]
        used += [file for rank in model.ranks for file in (rank.weights, rank.master, *rank.segments)]
    used += [graph.file for graph in manifest.program]
    used += [name for engine in manifest.engines for name in (engine.file, engine.source, *engine.segments)]
    for name in used:
        if name not in listed:
            raise _invalid(f"{name!r} is used but not listed under files")


def _check_methods(manifest: Manifest) -> None:
    """Checks that methods differ in name and role, and that each has its model, which reads tokens."""
    names = [method.name for method in manifest.methods]
    roles = [method.role for method in manifest.methods if method.draft is not None]
    if len(set(names)) != len(names) or len(set(roles)) != len(roles):
        raise _invalid(f"methods: {', '.join(names)}; expected each once, and at most one with a draft")
    for method in manifest.methods:
        if (method.signature is None) != (method.draft is None):
            raise _invalid(f"{method.name}: its model is missing")
        if isinstance(method, MethodOptions) and method.sizes:
            raise _invalid(f"{method.name}: num_speculative_tokens is given beside trees")
        if method.draft is not None and method.draft.embedding_size is not None:
            raise _invalid(f"embedding_size of the {method.role}: expected null")


def _check_tokens(manifest: Manifest) -> None:
    """Checks that the target has the tokenizer's and the rules' tokens, and positions for the longest text."""
    target = manifest.target
    beyond = [token for token in manifest.tokenizer.eos_token_ids if token >= target.vocab_size]
    if beyond:
        raise _invalid(f"tokenizer.eos_token_ids: {beyond[0]} is not a token; the target has {target.vocab_size}")
    for rule, tokens in manifest.generation.rules.tokens.items():
        if (most := max(tokens, default=0)) >= target.vocab_size:
            raise _invalid(f"generation.rules.{rule}: {most} is not a token; the target has {target.vocab_size}")
    if manifest.max_seq_len > target.max_positions:
        raise _invalid(f"max_seq_len is {manifest.max_seq_len}, but target.max_positions is {target.max_positions}")


def _check_models(manifest: Manifest) -> None:
    """Checks that all shapes exist that the engine needs, and that none takes an absurd amount of memory."""
    verified = {1}.union(*map(_tree_sizes, manifest.methods))
    proposing = {
        method.role
        for method in manifest.methods
        if method.signature is not None and tensors.LOGITS_ROWS not in method.signature.inputs
    }
    for role, model in manifest.models.items():
        points = model.graph.points
        _check_ranks(role, model)
        _check_points(role, points, role in proposing, manifest)
        width = sum(layer.heads * (layer.key_size + layer.value_size) for layer in model.cache)
        size = 4 * width * max((point.batch * point.cache for point in points), default=0)
        size += manifest.batch_sizes[-1] * sum(layer.nbytes for layer in model.states)
        if model.cache and not all(point.cache for point in points):
            raise _invalid(f"a shape point of the {role} has no cache rows")
        if size > _MAX_CACHE_BYTES:
            raise _invalid(f"the {role}'s cache would take {size} bytes")
        steps = {(tokens, tokens) for tokens in verified} if role == "target" else set()
        chunk = {(manifest.prefill_chunk, 0 if role in proposing else 1)} if model.cache else set()
        missing = (steps | chunk) - {(point.tokens, point.rows) for point in points if point.batch == 1}
        if missing:
            raise _invalid(f"no shape point of the {role} has {counted(min(missing)[0], 'token')}")
        _check_batches(role, points, manifest)
        caches, propose = {(point.batch, point.cache) for point in points}, any(point.drafts for point in points)
        for engine in model.engines:
            for profile in engine.profiles:
                if (profile.batch, profile.cache) not in caches or bool(profile.drafts) != propose:
                    raise _invalid(
                        f"engine {engine.file}: no shape point of the {role} is like its profile {profile}", "compile"
                    )


def _check_ranks(role: str, model: Model) -> None:
    """Checks that only a target is split, into ranks with as many segments and a whole number of heads each."""
    ranks = model.ranks
    if beyond := [engine for engine in model.engines if engine.rank >= max(1, len(ranks))]:
        raise _invalid(
            f"engine {beyond[0].file}: rank is {beyond[0].rank}, and the {role} has {len(ranks)} ranks", "compile"
        )
    for runtime in {engine.runtime for engine in model.engines}:
        counts = {len(engine.segments) for engine in model.engines if engine.runtime == runtime}
        if len(counts) > 1 or (min(counts) > 1) != (bool(ranks) and runtime not in COMPILERS):
            raise _invalid(
                f"engines of the {role} for {runtime}: expected as many segments of each rank for onnxruntime-cuda, "
                "and none elsewhere",
                "compile",
            )
    if not ranks:
        return
    uneven = any(layer.heads % len(ranks) for layer in model.cache)
    cut = len({len(rank.segments) for rank in ranks}) == 1 and len(ranks[0].segments) > 1
    if role != "target" or len(ranks) < 2 or uneven or not cut or model.states:
        raise _invalid(
            f"ranks of the {role}: expected two or more of a target, with as many segments each and an equal share of "
            "its heads"
        )


def _check_points(role: str, points: Sequence[ShapePoint], proposes: bool, manifest: Manifest) -> None:
    """Checks that points are unique and fit the kind of graph, and that the cache has room for a step at the end."""
    if not points:
        raise _invalid(f"there is no shape point of the {role}")
    cached = bool(manifest.models[role].cache)
    fed = [manifest.prefill_chunk, *(method.catch_up for method in manifest.methods if method.role == role)]
    doubled = len(set(points)) != len(points)
    for point in points:
        fits = point.rows in (1, point.tokens) and not point.drafts
        if proposes:
            fits = not point.rows and point.drafts > 0 and (not cached or point.tokens in fed)
        if doubled or not fits:
            raise _invalid(f"graph.points of the {role}: {point} is listed twice, or is not a shape of such a graph")
    widest, rows = max(point.tokens for point in points), max(point.cache for point in points)
    if role == "target" and manifest.max_seq_len + widest > rows + 1:
        raise _invalid(
            f"max_seq_len is {manifest.max_seq_len}, and the largest cache of {rows} rows has no room for a step "
            f"of {widest} tokens after it"
        )


def _check_batches(role: str, points: Sequence[ShapePoint], manifest: Manifest) -> None:
    """Checks that every shape exists at every cache size and, except for prefill chunks, at every batch size."""
    sizes = manifest.batch_sizes
    if sizes[:1] != (1,) or list(sizes) != sorted(set(sizes)):
        raise _invalid(f"batch_sizes are {list(sizes)}; expected them to ascend from 1")
    expected = {
        ShapePoint(batch, tokens, cache, rows, drafts)
        for tokens, rows, drafts in {(point.tokens, point.rows, point.drafts) for point in points}
        for batch in ((1,) if tokens == manifest.prefill_chunk and rows != tokens else sizes)
        for cache in {point.cache for point in points}
    }
    if missing := expected.difference(points):
        raise _invalid(f"the {role} has no shape point {min(missing)}")


def _tree_sizes(method: Method) -> set[int]:
    """The widths of a method's steps; checks that the method can fill its trees."""
    name, sizes = method.name, set[int]()
    for choices in method.trees:
        try:
            tree = TokenTree.from_choices(choices)
        except SpecExportError as error:
            raise _invalid(f"{name}: trees: {error}") from error
        if len(tree) in sizes or len(tree) == 1:
            raise _invalid(f"{name}: trees: two have {counted(len(tree) - 1, 'draft token')}, or one has none")
        sizes.add(len(tree))
        if (reason := method.validate_tree(tree)) is not None:
            raise _invalid(f"{name}: trees: {reason}")
    if not sizes:
        raise _invalid(f"{name}: trees: there are none")
    if (reason := method.validate()) is not None:
        raise _invalid(f"{name}: {reason}")
    return set(method.widths())


def file_entry(folder: Path, name: str) -> FileEntry:
    """The manifest's entry for a file of the bundle."""
    path = folder / name
    return FileEntry(path=name, size=path.stat().st_size, sha256=sha256(path))


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_files(
    folder: Path, manifest: Manifest, *, hashes: bool, progress: Callable[[int], None] | None = None
) -> None:
    """Checks that every listed file is inside the bundle, complete, and (with ``hashes``) unaltered.

    In the cache of the Hugging Face hub a snapshot's files are links into ``blobs``, which count as inside.

    Args:
        hashes: whether to compare SHA-256 too, which takes about a second for two gigabytes.

    Raises:
        BundleError: names the first file that is missing, outside, of another size, or altered.
    """
    root = folder.resolve()
    roots = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            raise BundleError(f"{path}: missing; the bundle is incomplete, copy or build it again")
        if not any(map(path.resolve().is_relative_to, roots)):
            raise BundleError(f"{path}: leads outside the bundle to {path.resolve()}; copy that file here")
        size = path.stat().st_size
        if size != entry.size:
            raise BundleError(
                f"{path}: {size} bytes, expected {entry.size}; the file was cut short or replaced, copy or build the "
                "bundle again"
            )
        if hashes:
            digest = sha256(path)
            if digest != entry.sha256:
                raise BundleError(
                    f"{path}: sha256 is {digest}, expected {entry.sha256}; the file was altered, copy or build the "
                    "bundle again"
                )
        if progress:
            progress(entry.size)
