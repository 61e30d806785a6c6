"""The schema of a bundle's manifest, ``specexport.json``, and the shapes of the step program that follow from it.

``docs/bundle-format.md`` documents it for readers; :mod:`specexport.contract.reading` reads and checks it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specexport.contract.engines import Accept, BackendName, CompiledEngine, Fill, ProgramGraph
from specexport.contract.methods.base import Method
from specexport.contract.model import Count, LoweredAs, Model, Probability
from specexport.contract.shapes import ShapePoint, Size, Strict
from specexport.contract.signature import GraphSignature, target_signature
from specexport.contract.tree import TokenTree

_MOST = 2**31 - 1
Whole = Annotated[int, Meta(ge=0, le=_MOST)]
Length = Annotated[int, Meta(ge=1, le=_MOST)]
TokenSequence = Annotated[tuple[Whole, ...], Meta(min_length=1)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
"""The share of the probability that a filter keeps."""
Penalty = Annotated[float, Meta(ge=0.01, le=100.0)]
_Suppressed = tuple[Annotated[int, Meta(ge=-_MOST, le=_MOST)], ...]
FORMAT_VERSION = 9
MANIFEST_NAME = "specexport.json"
FILTERS = frozenset({"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"})
"""Rules that affect sampling only."""
_LONGEST = 80
"""Most characters of a setting's value in a message."""
DEFAULT_TEMPLATE = "default"
"""Name of the default chat template."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class GenerationRules(Strict, frozen=True):
    """Rules that change logits or bound lengths; names and meanings are transformers', the defaults change nothing.

    "Text" is the prompt and the output so far.

    Attributes:
        max_length: most tokens of a prompt and its output; None for no limit.
        min_length: fewest tokens of a prompt and its output before a token that ends the output.
        sequence_bias: added to the logit of a sequence's last token where the text ends with the tokens before it.
        encoder_repetition_penalty: multiplies positive logits of the prompt's tokens, and divides negative ones.
        no_repeat_ngram_size: n-grams of this many tokens do not occur twice in the text; 0 for no such rule.
        encoder_no_repeat_ngram_size: no n-gram of this many tokens of the prompt occurs in the output.
        bad_words_ids: sequences that do not occur in the output; a single token that ends the output is exempt.
        forced_bos_token_id: the token after a text of one token.
        forced_eos_token_id: the last token of an output of the greatest length; of several, any.
        exponential_decay_length_penalty: after this many tokens, the logits of tokens that end the output rise, by
            the factor to the power of the number of tokens since.
        suppress_tokens: tokens that do not occur in the output.
        begin_suppress_tokens: tokens that the output does not begin with.
        top_h: keeps the most probable tokens within this share of the distribution's entropy; None keeps all. This
            filter comes before top-k, the following ones after min-p.
        typical_p: keeps the tokens whose information is closest to the entropy, up to this total probability.
        epsilon_cutoff: drops tokens less probable than this.
        eta_cutoff: drops tokens less probable than this, or than its square root times exp(-entropy) if that is less.
    """

    max_length: Length | None = None
    min_length: Whole = 0
    sequence_bias: tuple[tuple[TokenSequence, float], ...] = ()
    encoder_repetition_penalty: Penalty = 1.0
    no_repeat_ngram_size: Whole = 0
    encoder_no_repeat_ngram_size: Whole = 0
    bad_words_ids: tuple[TokenSequence, ...] = ()
    forced_bos_token_id: Whole | None = None
    forced_eos_token_id: Whole | TokenSequence | None = None
    exponential_decay_length_penalty: tuple[Whole, Annotated[float, Meta(gt=0.0, le=100.0)]] | None = None
    suppress_tokens: _Suppressed = ()
    begin_suppress_tokens: _Suppressed = ()
    top_h: Share | None = None
    typical_p: Share = 1.0
    epsilon_cutoff: Probability = 0.0
    eta_cutoff: Probability = 0.0

    @property
    def change_logits(self) -> bool:
        """Whether logits change before anything is sampled."""
        return self._set({*self.__struct_fields__} - {"max_length", *FILTERS})

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """The tokens that the model must have, by the rule that mentions them."""
        last = self.forced_eos_token_id
        return {
            "sequence_bias": tuple(token for sequence, _ in self.sequence_bias for token in sequence),
            "bad_words_ids": tuple(token for sequence in self.bad_words_ids for token in sequence),
            "forced_bos_token_id": () if self.forced_bos_token_id is None else (self.forced_bos_token_id,),
            "forced_eos_token_id": () if last is None else (last,) if isinstance(last, int) else last,
        }

    @property
    def filter_tokens(self) -> bool:
        """Whether some filter drops tokens by their probabilities."""
        return self._set(FILTERS)

    def _set(self, names: Collection[str]) -> bool:
        return any(getattr(self, name) != getattr(NO_RULES, name) for name in names)


NO_RULES = GenerationRules()


class FileEntry(Strict, frozen=True):
    """A file of the bundle; every file but the manifest has an entry.

    Attributes:
        path: relative to the bundle, with forward slashes.
    """

    path: str
    size: Count
    sha256: Sha256


class TokenizerInfo(Strict, frozen=True):
    """The tokenizer's files and special tokens.

    Attributes:
        file: ``tokenizer.json`` as the tokenizers library reads it.
        special_tokens: ``bos_token`` and the like, for chat templates.
        templates: files of the model's Jinja templates: its only or default one, and others such as ``tool_use``.
        split_special_tokens: whether special tokens in a text are encoded as plain text.
    """

    file: str
    eos_token_ids: tuple[Count, ...]
    special_tokens: dict[str, str] = msgspec.field(default_factory=dict)
    templates: dict[str, str] = msgspec.field(default_factory=dict)
    split_special_tokens: bool = False


class GenerationDefaults(Strict, frozen=True):
    """Defaults of sampling parameters: the model's, and those of typical acceptance.

    Attributes:
        max_tokens: most tokens of an output; None if the model sets no limit.
        min_tokens: fewest tokens before one that ends the output.
    """

    temperature: Annotated[float, Meta(ge=0.0)] = 0.0
    top_p: Probability = 1.0
    top_k: Count = 0
    min_p: Probability = 0.0
    repetition_penalty: Penalty = 1.0
    max_tokens: Length | None = None
    min_tokens: Count = 0
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    rules: GenerationRules = NO_RULES
    posterior_threshold: Probability = 0.09
    posterior_alpha: Probability = 0.3


class SettingNote(Strict, frozen=True):
    """A setting of the checkpoint that makes transformers' texts and the bundle's differ.

    Attributes:
        file: the file that has it.
        value: its value as JSON, shortened.
        note: how the texts differ.
    """

    file: str
    key: str
    value: str
    note: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key} is {self.value}: {self.note}"


def short(value: Any) -> str:
    """A setting's value, shortened for a message."""
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    text = text.encode("utf-8", "replace").decode()  # JSON allows lone surrogates
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class Manifest(Strict, frozen=True):
    """The whole of ``specexport.json``.

    Attributes:
        format_version: version of this schema; readers refuse any other.
        specexport_version: version of specexport that wrote the bundle.
        backend: the backend that the bundle was built for; it has ONNX graphs in any case.
        lowering: the operators that these graphs use.
        max_seq_len: longest sequence (prompt and output), in tokens.
        prefill_chunk: number of tokens that a prefill step reads.
        batch_sizes: numbers of slots that the graphs run for, ascending from 1.
        target: the model whose distribution is sampled.
        methods: the ways to propose, at most one of each kind, the default first; none for plain decoding.
        files: every file but this one.
        program: the graphs of the step program, for backends that keep a step on the device.
        notes: settings that make its texts differ from transformers'; purely informative.
    """

    format_version: int
    specexport_version: str
    created: str
    built_with: dict[str, str]
    backend: BackendName
    lowering: LoweredAs
    max_seq_len: Size
    prefill_chunk: Size
    batch_sizes: Annotated[tuple[Size, ...], Meta(min_length=1)]
    target: Model
    methods: tuple[Method, ...]  # read by contract.methods.decode_hook
    tokenizer: TokenizerInfo
    generation: GenerationDefaults
    files: tuple[FileEntry, ...]
    program: tuple[ProgramGraph, ...] = ()
    notes: tuple[SettingNote, ...] = ()

    @property
    def models(self) -> dict[str, Model]:
        """All models by role: ``target``, and the methods' roles."""
        return {"target": self.target} | {m.role: m.draft for m in self.methods if m.draft is not None}

    @property
    def model_names(self) -> dict[str, str]:
        """The models' names in messages, by role."""
        return {"target": "target"} | {method.role: method.draft_name for method in self.methods}

    @property
    def has_states(self) -> bool:
        """Whether a model has layers without attention."""
        return any(model.states for model in self.models.values())

    @property
    def engines(self) -> tuple[CompiledEngine, ...]:
        """All engines: the models', then the step program's."""
        holders = (*self.models.values(), *self.program)
        return tuple(engine for holder in holders for engine in holder.engines)

    @property
    def target_signature(self) -> GraphSignature:
        """The signature of the target's step graph, with the outputs that methods observe."""
        return target_signature(self.target, [tensor for method in self.methods for tensor in method.target_outputs])

    def method(self, name: str) -> Method | None:
        """The method of a name, if the bundle has it."""
        return next((method for method in self.methods if method.name == name), None)


def program_points(graph: ProgramGraph, manifest: Manifest, batch: int, cache: int) -> tuple[ShapePoint, ...]:
    """The shapes of a graph of the step program, one for every size of a tree that needs it; ascending.

    An accept graph also has the shape of the widest step, for methods that need no graph. With one slot it reads the
    first N rows of the logits, whatever follows them. With several slots their logits lie T rows apart, so N is T.
    """
    trees = {tree for method in manifest.methods for tree in method.token_trees()}
    verified = {point for point in manifest.target.graph.points if point.batch == batch}
    widths = {point.tokens for point in verified if point.rows == point.tokens > 1}
    if isinstance(graph, Accept):
        sizes = widths if batch > 1 or not widths else {max(widths), *map(len, trees)}
        points = {ShapePoint(batch, nodes, 0, nodes) for nodes in sizes}
    elif isinstance(graph, Fill):
        methods = [method for method in manifest.methods if fills(graph, method)]
        points = {fill_point(method, tree, batch) for method in methods for tree in filled_trees(method)}
    else:
        branching = {len(tree) for tree in trees if not tree.is_chain}
        sizes = {width for width in widths if width >= min(branching)} if batch > 1 and branching else branching
        points = {ShapePoint(batch, nodes, cache) for nodes in sizes}
    return tuple(sorted(points))


def fills(graph: Fill, method: Method) -> bool:
    """Whether a fill graph fills the trees of a method."""
    stages_of = (method.support, method.drafted_stages)
    return bool(filled_trees(method)) and stages_of == (graph.candidates, graph.stages)


def filled_trees(method: Method) -> list[TokenTree]:
    """The trees of a method that a fill graph fills."""
    staged = method.drafted_stages > 0
    drafted = [tree for tree in method.token_trees() if method.device_run(tree) is not None]
    return [tree for tree in drafted if staged or not tree.is_chain]


def fill_point(method: Method, tree: TokenTree, batch: int) -> ShapePoint:
    """The shape at which the fill graph fills a tree of a method that drafts on the device."""
    tokens, drafts = method.device_run(tree) or (0, 0)
    return ShapePoint(batch, len(tree), 0, tokens if method.drafted_stages else 0, drafts)


def program_sizes(point: ShapePoint, vocab: int) -> dict[str, int]:
    """Sizes of the symbols of a step program's graph: N is the point's tokens, V the width of the logits."""
    nodes = point.tokens
    return point.sizes | {"N": nodes, "N-1": nodes - 1, "drafts": nodes - 1, "drafts + 1": nodes, "V": vocab}
