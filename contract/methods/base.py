"""The base of every method: its options, and its entry in the manifest with its capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from specexport.contract.model import Model, Size, StoredAs, Strict
from specexport.contract.shapes import CATCH_UP_TOKENS
from specexport.contract.signature import GraphSignature
from specexport.contract.tensors import DRAFT_TOKENS, Tensor
from specexport.contract.tree import MAX_NODES, TokenTree

Device = Literal["cpu", "gpu"]
SMALLER = (5.0, 10.0)
"""How many times smaller a draft should be: a larger one costs what it gains, a smaller one guesses badly."""
Choices = Annotated[tuple[tuple[Annotated[int, Meta(ge=0, lt=MAX_NODES)], ...], ...], Meta(max_length=MAX_NODES)]
"""A token tree as Medusa choices: the ranks on the path from the root, for each node but the root."""
DraftTokens = Annotated[int, Meta(ge=1, le=32)]
DEFAULT_DRAFT_TOKENS = 4
"""Chosen for CPUs, where every node of a step costs; ``specexport tune tree`` measures what a device can take."""
BYTES: dict[StoredAs, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.125,
    "int4": 0.625,
    "stored": 1.125,
}
"""Bytes a weight takes, for quantized ones with their share of a scale."""
SourceKind = Literal["checkpoint", "folder"]
"""A model's folder or hub id, or a folder alone."""


@dataclass(frozen=True)
class Suggestion:
    """A method that ``specexport suggest`` names before anything is built.

    Attributes:
        settings: what to build it with, in words.
        rank: its place, the best first.
        flags: those of ``specexport build``; empty if a model has to be downloaded or trained first.
    """

    method: str
    settings: str
    why: str
    rank: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """The target that a method is suggested for.

    Attributes:
        device: where the bundle is to run: on a GPU the nodes of a step are nearly free, on a CPU every node costs.
        drafts: available smaller models, with how many times smaller they are, the best first.
        has_mtp: whether the target's checkpoint holds a layer that drafts.
    """

    parameters: int
    device: Device
    drafts: tuple[tuple[str, float], ...] = ()
    has_mtp: bool = False


@dataclass(frozen=True)
class Flag:
    """A flag of ``specexport build`` that is short for a method.

    Attributes:
        name: such as ``--ngram``.
        key: the key whose value it takes; None for one that takes no value.
        metavar: the value's name in ``--help``.
        const: the value if the flag is given without one; None if it needs one.
        claims: flags of other methods that set keys of this method when both are given: the key of each.
    """

    name: str
    key: str | None
    help: str
    metavar: str | None = None
    const: str | None = None
    claims: Mapping[str, str] | None = None


class MethodOptions(Strict, frozen=True, kw_only=True, tag_field="method"):
    """A user's options of a method: the keys of ``build --method``, of ``speculative_config`` and of a request.

    Attributes:
        num_speculative_tokens: draft tokens a step; of several the first is the default and requests may choose the
            others. None for the method's default, and where ``trees`` is given.
        trees: the trees a step may verify, the default first, each of a different size, so that a request can choose
            one by its number of draft tokens. A chain of K draft tokens is the tree ``[[0], [0, 0], ...]``.
    """

    num_speculative_tokens: DraftTokens | tuple[DraftTokens, ...] | None = None
    trees: tuple[Choices, ...] = ()

    main: ClassVar[str] = "num_speculative_tokens"
    """The key that VALUE sets in ``--method NAME:VALUE``."""
    flags: ClassVar[tuple[Flag, ...]] = ()

    @property
    def name(self) -> str:
        return method_name(type(self))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of draft tokens that were chosen, the default first; empty if none were."""
        sizes = self.num_speculative_tokens
        return () if sizes is None else sizes if isinstance(sizes, tuple) else (sizes,)


class CheckpointOptions(MethodOptions, frozen=True, kw_only=True):
    """Options of a method with a checkpoint of its own.

    Attributes:
        model: its folder or hub id.
    """

    model: str

    main: ClassVar[str] = "model"


class Method:
    """A method in a bundle and its capabilities, for code that does not know it by name or type.

    It is a struct, its entry in the manifest: a :class:`BuiltMethod`, or a :class:`TextMethod`.

    Attributes:
        trees: the trees a step may verify, the default first, each of a different size.
    """

    if TYPE_CHECKING:
        __struct_config__: ClassVar[msgspec.structs.StructConfig]
        trees: tuple[Choices, ...]

    options: ClassVar[type[MethodOptions]]
    """The struct of its options for users; a :class:`TextMethod` is its own."""
    sources: ClassVar[dict[str, SourceKind]] = {}
    """Keys that name checkpoints."""

    # --- capabilities, which others ask for instead of the method's name or type --------------------------------------
    needs_graph: ClassVar[bool] = True
    """False if it only reads text; it then works in every bundle."""
    needs_training: ClassVar[str | None] = None
    """What has to be trained for it first; None for nothing."""
    engine_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of a method without a graph that are set when a bundle is opened, and not by requests."""
    whole_model: ClassVar[bool] = False
    """Whether what drafts is a causal LM of its own, the checkpoint of the key ``model``."""
    takes_hypothesis: ClassVar[bool] = False
    """Whether it proposes from a text given with the request, and nothing without one."""
    branching: ClassVar[Literal[0, 1, 2]] = 0
    """Trees it fills: 0 chains only, 1 chains with further leaves, 2 any."""
    own_widths: ClassVar[bool] = False
    """Whether options of its own set the size of its steps, so that no number of draft tokens can be chosen."""

    @property
    def name(self) -> str:
        """The name by which a request chooses it."""
        return method_name(type(self))

    @property
    def models(self) -> dict[str, Model]:
        """Models of its own by role, which is also the folder's name; at most one."""
        return {}

    @property
    def signatures(self) -> dict[str, GraphSignature]:
        """Signatures of its models' graphs, by role."""
        return {}

    @property
    def target_outputs(self) -> tuple[Tensor, ...]:
        """The target's outputs that it observes, other than the logits."""
        return ()

    @property
    def support(self) -> int:
        """M, the number of tokens to which q gives probability; 0 if tokens are chosen without drawing."""
        return 0

    @property
    def ranks(self) -> int:
        """Tokens known at each depth, which the ranks of a tree count."""
        return 1

    @property
    def catch_up(self) -> int:
        """T of a run in which its model drafts after a cache."""
        return CATCH_UP_TOKENS

    @property
    def call_widths(self) -> frozenset[int]:
        """T of its model's calls on a device that drafts a token a call; empty if one call drafts all."""
        return frozenset({self.catch_up})

    @property
    def reads_embeddings(self) -> bool:
        """Whether it can propose after a prompt with embeddings; a model with a cache of its own reads tokens only."""
        return not any(model.cache for model in self.models.values())

    @classmethod
    def stores_weights(cls) -> bool:
        """Whether a build stores weights for it."""
        return bool(cls.sources)

    @property
    def files(self) -> tuple[str, ...]:
        """Files of the bundle that it needs, other than its models'."""
        return ()

    @property
    def stored(self) -> frozenset[StoredAs]:
        """How the matrices that it adds are stored."""
        return frozenset(model.precision.weights for model in self.models.values())

    @property
    def drafted_stages(self) -> int:
        """Number of outputs with draft tokens, one a level of the tree; 0 if one output has a row for each token."""
        outputs = [str(output) for signature in self.signatures.values() for output in signature.outputs]
        return sum(name.startswith(f"{DRAFT_TOKENS}.") for name in outputs)

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        """T and K of its model's run for a tree in a device's step, whose fill graph lays out branching trees; None if
        the host proposes.
        """
        return None

    def describe(self) -> str:
        """A short description for users."""
        return self.name

    def with_models(self, models: Mapping[str, Model]) -> Method:
        """The method with other models instead of its own (the field ``draft``), such as compiled ones."""
        ours = [models[role] for role in self.models]
        return with_draft(self, ours[0]) if ours else self

    @classmethod
    def suggest(cls, wanted: Wanted) -> Suggestion | None:
        """What to build for a target, where the method may suit it."""
        return None

    # --- trees --------------------------------------------------------------------------------------------------------
    def token_trees(self) -> tuple[TokenTree, ...]:
        """The trees, the default first."""
        return _trees(self.trees)

    def validate_tree(self, tree: TokenTree) -> str | None:
        """Why it cannot fill a tree; None if it can."""
        return None

    def validate(self) -> str | None:
        """What is wrong with a bundle's entry as a whole; None for nothing. Each tree has been validated."""
        return None

    @property
    def extra_nodes(self) -> int:
        """Nodes that each step verifies in addition to a tree."""
        return 0

    def widths(self) -> tuple[int, ...]:
        """T of every step it may take, that of the default tree first."""
        widths = [self.extra_nodes + len(tree) for tree in self.token_trees()]
        return (*widths, self.extra_nodes + 1) if self.extra_nodes else tuple(widths)

    def drafted_lengths(self) -> frozenset[int] | None:
        """The K its model's graph was built for; None for any."""
        return None

    def smaller_trees(self, target: Model) -> tuple[TokenTree, ...]:
        """Trees that it can fill and that the target's graph verifies at every batch size, the largest first: its own,
        and chains of its most probable tokens.
        """
        trees = {len(tree): tree for tree in self.token_trees()}
        deepest = max(tree.depth for tree in trees.values())
        lengths = self.drafted_lengths()
        for nodes in verified_widths(target):
            chain = TokenTree.chain(nodes)
            known = lengths is None or nodes - 1 in lengths
            if 1 < nodes <= deepest + 1 and known and self.validate_tree(chain) is None:
                trees.setdefault(nodes, chain)
        return tuple(tree for _, tree in sorted(trees.items(), reverse=True))

    def memory(self, files: Mapping[str, int], rows: int) -> int:
        """Bytes in addition to the target and its cache; ``rows`` is the cache size for the longest text."""
        return sum(files[model.weights] + model.cache_row_bytes * rows for model in self.models.values())


M = TypeVar("M", bound=Method)


@lru_cache(maxsize=256)
def _trees(choices: tuple[Choices, ...]) -> tuple[TokenTree, ...]:
    return tuple(map(TokenTree.from_choices, choices))


def method_name(kind: type[Method | MethodOptions]) -> str:
    """The name of a method by its type, or its options'."""
    return str(kind.__struct_config__.tag)


def with_trees(method: M, trees: tuple[TokenTree, ...]) -> M:
    """The method with these trees."""
    sizes: dict[str, None] = {"num_speculative_tokens": None} if isinstance(method, MethodOptions) else {}
    return _replaced(method, trees=tuple(tree.choices for tree in trees), **sizes)


def with_draft(method: M, model: Model) -> M:
    """The method with the model of its own."""
    return _replaced(method, draft=model)


def _replaced(method: M, **changes: Any) -> M:
    changed: M = msgspec.structs.replace(cast(Any, method), **changes)
    return changed


def verified_widths(target: Model) -> set[int]:
    """T of the steps in which a target computes logits of every token."""
    return {point.tokens for point in target.graph.points if point.rows == point.tokens}


def not_a_chain(tree: TokenTree) -> str | None:
    """Why a tree is not a chain of most probable tokens (ranks 0); None if it is one."""
    chain = TokenTree.chain(len(tree))
    return f"the one of {len(tree) - 1} draft tokens is not a chain" if tree.choices != chain.choices else None


class BuiltMethod(Strict, Method, frozen=True, kw_only=True, tag_field="method"):
    """A method that bundles are built for, as a manifest records it."""

    trees: tuple[Choices, ...]


class RankedMethod(BuiltMethod, frozen=True, kw_only=True):
    """A method whose model knows several tokens at each depth.

    Attributes:
        candidates: M, the tokens known at each depth, which ranks count; for a draft model also the support of q.
    """

    candidates: Size

    @property
    def ranks(self) -> int:
        return self.candidates

    def validate_tree(self, tree: TokenTree) -> str | None:
        most = max(tree.ranks)
        return f"rank {most}, with {self.candidates} candidates" if most >= self.candidates else None


class TextMethod(MethodOptions, Method, frozen=True, kw_only=True):
    """A method that only reads text and proposes chains, shorter ones where it finds less.

    It needs neither a graph nor files, so it works in every bundle; a build adds nothing to its options but trees.
    """

    needs_graph: ClassVar[bool] = False
    suits: ClassVar[str] = ""
    """When it pays, for ``specexport suggest``; empty to leave it out."""
    default_sizes: ClassVar[tuple[int, ...]] = (8, 4, 2)
    """Draft tokens of its chains if none are chosen."""

    @classmethod
    def suggest(cls, wanted: Wanted) -> Suggestion | None:
        """See :meth:`Method.suggest`; needs no flags, as every bundle has it."""
        sizes = ",".join(map(str, cls.default_sizes))
        return Suggestion(method_name(cls), f"chains of {sizes}", cls.suits, 3) if cls.suits else None

    def default_trees(self) -> tuple[TokenTree, ...]:
        """The chains it proposes where no trees are chosen."""
        return tuple(TokenTree.chain(size + 1) for size in self.sizes or self.default_sizes)

    def validate_tree(self, tree: TokenTree) -> str | None:
        return not_a_chain(tree)

    def smaller_trees(self, target: Model) -> tuple[TokenTree, ...]:
        """See :meth:`Method.smaller_trees`; it proposes no chains but its own trees."""
        return tuple(sorted(self.token_trees(), key=len, reverse=True))


def for_bundle(method: TextMethod, target: Model) -> TextMethod:
    """A method that needs no graph, for a bundle built without it: its chains that fit the target's steps."""
    widest = max(verified_widths(target))
    return with_trees(method, tuple(tree for tree in method.default_trees() if len(tree) <= widest))
