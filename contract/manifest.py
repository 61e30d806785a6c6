"""The bundle manifest, ``specexport.json``: its schema, and what is checked when one is read.

The schema is documented for readers in ``docs/bundle-format.md``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from specexport.contract.engines import Backend, Engine, ProgramGraph
from specexport.contract.errors import BundleError, SpecExportError
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import MAX_NODES, TokenTree

FORMAT_VERSION = 3
MANIFEST_NAME = "specexport.json"
_MAX_MANIFEST_BYTES = 16 << 20
_MAX_CACHE_BYTES = 1 << 40

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Size = Annotated[int, Meta(ge=1, le=2**24)]
"""A dimension of a tensor; bounded, so that a forged manifest cannot ask for absurd allocations unnoticed."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
StoredAs = Literal["fp32", "fp16", "int8", "int4"]
LoweredAs = Literal["native", "portable"]
"""Which operators the graphs are made of: the newest, which write the cache in place, or those of opset 20, which
return new rows for the runtime to copy."""
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
MAX_LOOKUP = 32
LookupSize = Annotated[int, Meta(ge=1, le=MAX_LOOKUP)]
"""Tokens of an n-gram; bounded, as every token of a text is entered once for each size."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class FileEntry(_Strict, frozen=True):
    """One file of the bundle; every file but the manifest has an entry.

    Attributes:
        path: relative to the bundle, with forward slashes.
        size: bytes.
        sha256: of the content, in hexadecimal.
    """

    path: str
    size: Count
    sha256: Sha256


class PointGraph(_Strict, frozen=True):
    """The static-shape graph of one shape point."""

    point: ShapePoint
    file: str


class Graph(_Strict, frozen=True):
    """One compiled graph: the symbolic master and its static shapes.

    Attributes:
        master: ONNX file with symbolic B, T and S.
        points: the shapes it may run at, each with its own ONNX file.
    """

    master: str
    points: tuple[PointGraph, ...]


class CacheLayer(_Strict, frozen=True):
    """Key/value heads and head sizes of one layer."""

    heads: Size
    key_size: Size
    value_size: Size


class PrecisionInfo(_Strict, frozen=True):
    """What a model stores and what it computes in.

    Attributes:
        weights: how matrices are stored.
        compute: what activations and sums are, on the bundle's backend.
        cache: what the KV cache holds.
        block_size: weights that share a scale, for int8 and int4; None where each column of a matrix has one.
        weight_rms_error: relative root-mean-square error of the quantized weights.
        logits_rms_error: what that did to the logits of a target, relative to their spread, on a sample of text.
        same_choice: share of the sample's tokens after which the quantized target prefers the same token.
        not_quantized: matrices left in fp32, and why.
    """

    weights: StoredAs
    compute: Literal["fp32"]
    cache: Literal["fp32"]
    block_size: Positive | None = None
    weight_rms_error: float | None = None
    logits_rms_error: float | None = None
    same_choice: float | None = None
    not_quantized: dict[str, str] = {}


class Model(_Strict, frozen=True):
    """A target or a draft.

    Attributes:
        family: transformers' ``model_type``.
        source: where it was loaded from, for ``verify``; nothing at run time depends on it.
        parameters: number of parameters.
        vocab_size: width of the logits.
        max_positions: longest sequence the model was made for.
        precision: see :class:`PrecisionInfo`.
        cache: one entry a layer.
        weights: the weights file, shared by all its graphs.
        graph: a step graph for a target, a propose graph for a draft.
        engines: that graph, compiled for devices.
    """

    family: str
    source: str
    parameters: Positive
    vocab_size: Size
    max_positions: Size
    precision: PrecisionInfo
    cache: tuple[CacheLayer, ...]
    weights: str
    graph: Graph
    engines: tuple[Engine, ...] = ()


Choices = Annotated[tuple[tuple[Annotated[int, Meta(ge=0, lt=MAX_NODES)], ...], ...], Meta(max_length=MAX_NODES)]
"""A token tree as Medusa choices: the ranks on the path from the root, for each node but the root."""


class _Method(_Strict, frozen=True):
    """A way to propose.

    Attributes:
        trees: the trees a step may verify, the default first; no two have as many nodes, so that a request can choose
            one by its number of draft tokens. A chain of K draft tokens is the tree ``[[0], [0, 0], ...]``.
    """

    trees: Annotated[tuple[Choices, ...], Meta(min_length=1)]

    def token_trees(self) -> tuple[TokenTree, ...]:
        """The trees, the default first."""
        return tuple(TokenTree.from_choices(choices) for choices in self.trees)

    def misfit(self, tree: TokenTree) -> str | None:
        """Why a tree is none that this method can fill; None for one that it can, as any is unless a method says so."""
        return None

    def widths(self) -> tuple[int, ...]:
        """T of every step it may ask for, that of the default tree first."""
        return tuple(len(tree) for tree in self.token_trees())


class _Ranked(_Method, frozen=True):
    """A way to propose by a model that knows several tokens at each depth.

    Attributes:
        candidates: M, the tokens known at each depth, which ranks count; for a draft model also the support of q.
    """

    candidates: Size

    def misfit(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        return (
            f"rank {max(tree.ranks)}, with {self.candidates} candidates" if max(tree.ranks) >= self.candidates else None
        )


def _not_a_chain(tree: TokenTree) -> str | None:
    # Of most probable tokens: a single path of other ranks is none.
    chain = TokenTree.chain(len(tree))
    return f"the one of {len(tree) - 1} draft tokens is not a chain" if tree.choices != chain.choices else None


class _Chained(_Method, frozen=True):
    """A way to propose by looking in text: chains, of which steps verify shorter ones where less is found."""

    def misfit(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        return _not_a_chain(tree)


class DraftModel(_Ranked, frozen=True, tag_field="name", tag="draft_model"):
    """Speculation by a smaller model (Leviathan 2023, Chen 2023).

    It drafts a chain; a tree may add less probable tokens beside each token of that chain.

    Attributes:
        draft: the model, as a propose graph.
    """

    draft: Model

    def misfit(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        spine = "only the most probable token of each depth can have children"
        return super().misfit(tree) or (None if tree.has_spine else spine)


class SelfDraft(DraftModel, frozen=True, tag_field="name", tag="self_draft"):
    """Speculation by the target's own first layers, whose output its final norm and head read too early.

    The draft's graph lies beside the target's and reads the same weights file.

    Attributes:
        layers: how many.
    """

    layers: Size


class UniversalDraft(DraftModel, frozen=True, tag_field="name", tag="universal_draft"):
    """Speculation by a smaller model with a tokenizer of its own: text is translated both ways. Chains only.

    What is proposed follows from the text alone, without drawing. A step verifies a shorter chain where the draft's
    tokens make fewer of the target's.

    Attributes:
        tokenizer: the draft's ``tokenizer.json``.
    """

    tokenizer: str

    def misfit(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        return _not_a_chain(tree)


class Medusa(_Ranked, frozen=True, tag_field="name", tag="medusa"):
    """Speculation by heads on the target's last hidden state (Medusa, arXiv 2401.10774), in the target's step graph.

    Attributes:
        heads: how many; a tree is at most as deep.
        source: where they were loaded from, for ``verify``.
        parameters: theirs alone.
        weights: how their matrices are stored.
    """

    heads: Size
    source: str
    parameters: Positive
    weights: StoredAs

    def misfit(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads else None
        return super().misfit(tree) or deep


class MedusaDraft(_Ranked, frozen=True, tag_field="name", tag="medusa_draft"):
    """Speculation by a smaller model with Medusa heads, which proposes a whole tree in one pass.

    Attributes:
        heads: how many; a tree is at most one deeper, as the draft's own head comes first.
        source: where the heads were loaded from, for ``verify``.
        draft: the model, as a step graph that makes candidates instead of logits.
    """

    heads: Size
    source: str
    draft: Model

    def misfit(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads + 1 else None
        return super().misfit(tree) or deep


class Ngram(_Chained, frozen=True, tag_field="name", tag="ngram"):
    """Speculation by n-gram prompt lookup: what followed the text's last tokens when they came before. Chains only.

    A request's tree is the longest chain; steps verify shorter ones of the trees where less is found.

    Attributes:
        prompt_lookup_max: most tokens that are matched; tried first.
        prompt_lookup_min: fewest.
    """

    prompt_lookup_max: LookupSize
    prompt_lookup_min: LookupSize


class Suffix(_Chained, frozen=True, tag_field="name", tag="suffix"):
    """Speculation by a suffix automaton (SuffixDecoding, arXiv 2411.04975). Chains only, as for :class:`Ngram`.

    Attributes:
        max_spec_factor: most draft tokens for a matched token.
        min_token_prob: a chain ends before its estimated probability falls below this.
    """

    max_spec_factor: Annotated[float, Meta(gt=0.0, le=128.0)]
    min_token_prob: Probability


class Hypothesis(_Chained, frozen=True, tag_field="name", tag="hypothesis"):
    """Speculation by a text given with the request, the output as somebody expects it. Chains only, as for Ngram."""


class Lookahead(_Method, frozen=True, tag_field="name", tag="lookahead"):
    """Speculation by Jacobi iteration in the target's own steps (lookahead decoding, arXiv 2402.02057).

    A step runs the window, W columns by N - 1 levels of which the root is the first, beside the guesses. A request's
    tree is its most guesses, chains of N - 1 tokens; where guesses are fewer or share their beginnings, steps take the
    smallest width that holds them.

    Attributes:
        window: W, columns.
        ngram: N, tokens of an n-gram; a guess is one without its first.
        prompt_seeding: whether the pool starts with the prompt's n-grams.
    """

    window: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    ngram: Annotated[int, Meta(ge=2, le=32)]
    prompt_seeding: bool

    @property
    def window_nodes(self) -> int:
        """Nodes of the window, the root included."""
        return self.window * (self.ngram - 1)

    def misfit(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        guesses = (len(tree) - 1) // (self.ngram - 1)
        if tree.choices != guess_tree(guesses, self.ngram).choices:
            return f"the one of {len(tree) - 1} draft tokens is not made of chains of {self.ngram - 1} off the root"
        if self.window < self.ngram - 2:
            return f"window {self.window}, with n-grams of {self.ngram}; the window fills only with {self.ngram - 2}"
        if self.window_nodes + len(tree) - 1 > MAX_NODES:
            return f"{self.window_nodes + len(tree) - 1} nodes a step, at most {MAX_NODES} are verified"
        return None

    def widths(self) -> tuple[int, ...]:
        """See :class:`_Method`."""
        return (*(self.window_nodes + len(tree) - 1 for tree in self.token_trees()), self.window_nodes)


def guess_tree(guesses: int, ngram: int) -> TokenTree:
    """G guesses of lookahead decoding: chains of N - 1 tokens off the root."""
    return TokenTree.from_choices([(guess, *[0] * at) for guess in range(guesses) for at in range(ngram - 1)])


Ranked = DraftModel | Medusa | MedusaDraft
"""Methods in which a model proposes; their trees may branch."""
Lookup = Ngram | Suffix | Hypothesis
"""Methods that look in text, and need neither a model nor files."""
Method = DraftModel | SelfDraft | UniversalDraft | Medusa | MedusaDraft | Ngram | Suffix | Hypothesis | Lookahead
HYPOTHESIS = "hypothesis"
"""The one method that proposes nothing unless a request brings something."""


def method_name(method: Method) -> str:
    """The name a request chooses a method by."""
    return str(type(method).__struct_config__.tag)


class TokenizerInfo(_Strict, frozen=True):
    """The tokenizer's files and special tokens.

    Attributes:
        file: ``tokenizer.json`` as the tokenizers library reads it.
        eos_token_ids: tokens that end a text.
        special_tokens: ``bos_token`` and the like, for chat templates.
        chat_template: Jinja template file, if the model has one.
    """

    file: str
    eos_token_ids: tuple[Count, ...]
    special_tokens: dict[str, str] = {}
    chat_template: str | None = None


class GenerationDefaults(_Strict, frozen=True):
    """What a parameter is that is not given: the model's own defaults, and those of typical acceptance."""

    temperature: Annotated[float, Meta(ge=0.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Count = 0
    min_p: Probability = 0.0
    posterior_threshold: Probability = 0.09
    posterior_alpha: Probability = 0.3


class Manifest(_Strict, frozen=True):
    """The whole of ``specexport.json``.

    Attributes:
        format_version: of this schema; a reader refuses a newer one.
        specexport_version: that wrote the bundle.
        created: ISO 8601, UTC.
        built_with: versions of the libraries that matter.
        backend: what the bundle is meant to run on. Whatever that is, its ONNX graphs are there too.
        lowering: which operators they are made of.
        max_seq_len: longest sequence (prompt and output), in tokens.
        prefill_chunk: tokens a prefill step takes.
        batch_sizes: slots the graphs were made for.
        target: the model whose distribution is sampled.
        methods: the ways to propose, one of a kind, the default first; none for plain decoding.
        tokenizer: shared by target and draft.
        generation: sampling defaults.
        files: every file but this one.
        program: the step program's own graphs, for backends that keep a step on the device.
    """

    format_version: int
    specexport_version: str
    created: str
    built_with: dict[str, str]
    backend: Backend
    lowering: LoweredAs
    max_seq_len: Size
    prefill_chunk: Size
    batch_sizes: Annotated[tuple[Size, ...], Meta(min_length=1)]
    target: Model
    methods: tuple[Method, ...]
    tokenizer: TokenizerInfo
    generation: GenerationDefaults
    files: tuple[FileEntry, ...]
    program: tuple[ProgramGraph, ...] = ()

    @property
    def models(self) -> dict[str, Model]:
        """Every model by its role: ``target``, and ``draft`` and ``self_draft`` where there is one."""
        found = {"target": self.target}
        for method in self.methods:
            if isinstance(method, DraftModel | MedusaDraft):
                found["self_draft" if isinstance(method, SelfDraft) else "draft"] = method.draft
        return found

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Every engine: the models', then the step program's."""
        holders = (*self.models.values(), *self.program)
        return tuple(engine for holder in holders for engine in holder.engines)

    def method(self, name: str) -> Method | None:
        """The method of a name, if the bundle has it."""
        return next((method for method in self.methods if method_name(method) == name), None)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes ``specexport.json`` into a folder."""
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Reads and validates the manifest alone; files are not looked at.

    Raises:
        BundleError: the folder or the manifest is missing, malformed, too new, or names a path outside the bundle.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such folder; expected a bundle made by 'specexport build'")
    if not path.is_file():
        raise BundleError(f"{folder}: no {MANIFEST_NAME}; expected a bundle made by 'specexport build'")
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
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BundleError(f"{path}: not a valid manifest: {error}; build the bundle again") from error
    _check_references(path, manifest)
    _check_shapes(path, manifest)
    return manifest


class _Version(msgspec.Struct):
    format_version: Annotated[int, Meta(ge=1)]


def _check_references(path: Path, manifest: Manifest) -> None:
    """Every path stays in the bundle, and every file that is used has a size and a hash."""
    listed = set()
    for entry in manifest.files:
        pure = PurePosixPath(entry.path)
        plain = entry.path == str(pure) and not pure.is_absolute() and ".." not in pure.parts
        if not plain or "\\" in entry.path or ":" in entry.path:
            raise BundleError(f"{path}: files: {entry.path!r} is not a plain path in the bundle; refusing to load it")
        if entry.path in listed:
            raise BundleError(f"{path}: files: {entry.path!r} is listed twice")
        listed.add(entry.path)
    used = [manifest.tokenizer.file, *([manifest.tokenizer.chat_template] if manifest.tokenizer.chat_template else [])]
    used += [method.tokenizer for method in manifest.methods if isinstance(method, UniversalDraft)]
    for model in manifest.models.values():
        used += [model.weights, model.graph.master, *(p.file for p in model.graph.points)]
    used += [graph.file for graph in manifest.program]
    used += [name for engine in manifest.engines for name in (engine.file, engine.source)]
    for name in used:
        if name not in listed:
            raise BundleError(f"{path}: {name!r} is used but not listed under files; build the bundle again")


def _check_shapes(path: Path, manifest: Manifest) -> None:
    """Every shape the engine runs at is there, and none asks for an absurd amount of memory."""
    names = [method_name(method) for method in manifest.methods]
    drafts = {"draft_model", "medusa_draft", "universal_draft"} & set(names)
    if len(set(names)) != len(names) or len(drafts) > 1:
        raise BundleError(f"{path}: methods: {', '.join(names)}; expected each once, and one with a draft at most")
    verified = {1}
    for name, method in zip(names, manifest.methods, strict=True):
        verified |= _tree_sizes(path, name, method)
    propose_graphs = [method.draft for method in manifest.methods if isinstance(method, DraftModel)]
    for role, model in manifest.models.items():
        points = [graph.point for graph in model.graph.points]
        width = sum(layer.heads * (layer.key_size + layer.value_size) for layer in model.cache)
        size = 4 * width * max((point.batch * point.cache for point in points), default=0)
        if not all(point.cache for point in points):
            raise BundleError(f"{path}: a shape point of the {role} has no cache rows; build the bundle again")
        if size > _MAX_CACHE_BYTES:
            raise BundleError(f"{path}: the {role}'s cache would take {size} bytes; refusing to load it")
        steps = {(tokens, tokens) for tokens in verified} if role == "target" else set()
        propose = any(model is draft for draft in propose_graphs)
        needed = steps | {(manifest.prefill_chunk, 0 if propose else 1)}
        missing = needed - {(point.tokens, point.rows) for point in points if point.batch == 1}
        if missing:
            raise BundleError(
                f"{path}: no shape point of the {role} has {min(missing)[0]} tokens; build the bundle again"
            )
        _check_batches(path, role, points, manifest)
        caches, propose = {(point.batch, point.cache) for point in points}, any(point.drafts for point in points)
        for engine in model.engines:
            for profile in engine.profiles:
                if (profile.batch, profile.cache) not in caches or bool(profile.drafts) != propose:
                    raise BundleError(
                        f"{path}: engine {engine.file}: no shape point of the {role} is like its profile {profile}; "
                        "compile the bundle again"
                    )


def _check_batches(path: Path, role: str, points: Sequence[ShapePoint], manifest: Manifest) -> None:
    """Every shape is there at every batch size, prefill chunks of one slot aside, and at every cache size."""
    sizes = manifest.batch_sizes
    if sizes[:1] != (1,) or list(sizes) != sorted(set(sizes)):
        raise BundleError(f"{path}: batch_sizes are {list(sizes)}; expected them to ascend from 1")
    caches = {point.cache for point in points}
    shapes = {(point.tokens, point.rows, point.drafts) for point in points}
    for tokens, rows, drafts in shapes:
        there = {(p.batch, p.cache) for p in points if (p.tokens, p.rows, p.drafts) == (tokens, rows, drafts)}
        batches = (1,) if tokens == manifest.prefill_chunk and rows != tokens else sizes
        absent = {(batch, cache) for batch in batches for cache in caches} - there
        if absent:
            wanted = ShapePoint(min(absent)[0], tokens, min(absent)[1], rows, drafts)
            raise BundleError(f"{path}: the {role} has no shape point {wanted}; build the bundle again")


def _tree_sizes(path: Path, name: str, method: Method) -> set[int]:
    """Widths of a method's steps; its trees are checked to be trees that it can fill."""
    if isinstance(method, Ngram) and method.prompt_lookup_min > method.prompt_lookup_max:
        raise BundleError(
            f"{path}: ngram: prompt_lookup_min is {method.prompt_lookup_min}, more than prompt_lookup_max, "
            f"{method.prompt_lookup_max}; build the bundle again"
        )
    sizes: set[int] = set()
    for choices in method.trees:
        try:
            tree = TokenTree.from_choices(choices)
        except SpecExportError as error:
            raise BundleError(f"{path}: {name}: trees: {error}; build the bundle again") from error
        if len(tree) in sizes or len(tree) == 1:
            raise BundleError(f"{path}: {name}: trees: two have {len(tree) - 1} draft tokens, or one has none")
        sizes.add(len(tree))
        if (misfit := method.misfit(tree)) is not None:
            raise BundleError(f"{path}: {name}: trees: {misfit}")
    return set(method.widths())


def file_entry(folder: Path, name: str) -> FileEntry:
    """The entry of one file of a bundle."""
    path = folder / name
    return FileEntry(path=name, size=path.stat().st_size, sha256=sha256(path))


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256_310(file)


def _sha256_310(file: object) -> str:
    """``hashlib.file_digest`` for Python 3.10."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):  # type: ignore[attr-defined]
        digest.update(block)
    return digest.hexdigest()


def check_files(
    folder: Path, manifest: Manifest, *, hashes: bool, progress: Callable[[int], None] | None = None
) -> None:
    """Checks that every listed file is inside the bundle, whole, and (with ``hashes``) unaltered.

    Args:
        folder: the bundle.
        manifest: its manifest.
        hashes: also compare SHA-256; costs about a second for two gigabytes.
        progress: called with the bytes of each file checked.

    Raises:
        BundleError: names the first file that is missing, outside, of another size, or altered.
    """
    root = folder.resolve()
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            raise BundleError(f"{path}: missing; the bundle is incomplete, copy or build it again")
        if not path.resolve().is_relative_to(root):
            raise BundleError(f"{path}: leads outside the bundle to {path.resolve()}; refusing to load it")
        size = path.stat().st_size
        if size != entry.size:
            raise BundleError(
                f"{path}: {size} bytes, expected {entry.size}; the file was cut short or replaced, copy or build the "
                "bundle again"
            )
        if hashes:
            found = sha256(path)
            if found != entry.sha256:
                raise BundleError(
                    f"{path}: sha256 is {found}, expected {entry.sha256}; the file was altered, copy or build the "
                    "bundle again"
                )
        if progress:
            progress(entry.size)
