"""The base classes of methods: what users ask of them, their entries in the manifest, and their capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from specexport.contract.errors import BuildError
from specexport.contract.methods.suggestion import Suggestion, TargetProfile
from specexport.contract.model import Model, StoredAs
from specexport.contract.shapes import CATCH_UP_TOKENS, Size, Strict
from specexport.contract.signature import GraphSignature
from specexport.contract.tensors import DRAFT_TOKENS, Tensor
from specexport.contract.tree import MAX_NODES, TokenTree

Choices = Annotated[tuple[tuple[Annotated[int, Meta(ge=0, lt=MAX_NODES)], ...], ...], Meta(max_length=MAX_NODES)]
"""A token tree as Medusa choices: for each node but the root, the ranks on the path to it."""
DraftTokens = Annotated[int, Meta(ge=1, le=32)]
DEFAULT_DRAFT_TOKENS = 4
"""Chosen for CPUs, where every node of a step costs time; ``specexport tune tree`` finds a device's best trees."""
SourceKind = Literal["checkpoint", "folder"]
"""A model's folder or hub id, or a folder alone."""
CHECKPOINT: Mapping[str, SourceKind] = {"model": "checkpoint"}
"""The ``sources`` of a method with a checkpoint of its own."""


@dataclass(frozen=True)
class Flag:
    """A flag of ``specexport build`` that is short for a method.

    Attributes:
        key: the method's key that takes the flag's value; None for a flag without a value.
        metavar: the value's name in ``--help``.
        const: the value of a flag without one; None if the flag needs a value.
        claims: other methods' flags that, given together with this one, set keys of this method: the key of each.
    """

    name: str
    key: str | None
    help: str
    metavar: str | None = None
    const: str | None = None
    claims: Mapping[str, str] | None = None


class MethodOptions(Strict, frozen=True, kw_only=True, tag_field="method"):
    """The options of a method: the keys of ``build --method``, of ``speculative_config`` and of a request.

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
    flag: ClassVar[Flag | None] = None

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    def for_target(self, parameters: int) -> Method:
        """The method for a target with this many parameters, if it needs no checkpoint; else its exporter makes it."""
        raise BuildError(
            f"the method {self.name} has neither options that make it for a target (for_target) nor an exporter that "
            "resolves them; its package has to define one of them"
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of draft tokens that were chosen, the default first; empty if none were."""
        sizes = self.num_speculative_tokens
        return () if sizes is None else sizes if isinstance(sizes, tuple) else (sizes,)


class CheckpointOptions(MethodOptions, frozen=True, kw_only=True):
    """Options of a method with its own checkpoint.

    Attributes:
        model: its folder or hub id.
    """

    model: str

    main: ClassVar[str] = "model"


class Method:
    """A method in a bundle and its capabilities, for code that does not know it by name or type.

    It is a struct, the method's entry in the manifest: a :class:`BuiltMethod` or a :class:`TextMethod`.

    Attributes:
        trees: the trees a step may verify, the default first, each of a different size.
    """

    if TYPE_CHECKING:
        __struct_config__: ClassVar[msgspec.structs.StructConfig]
        trees: tuple[Choices, ...]

    options: ClassVar[type[MethodOptions]]
    """The struct of a user's options; a :class:`TextMethod` is that struct itself."""
    sources: ClassVar[Mapping[str, SourceKind]] = {}
    """Keys that name checkpoints."""
    role: ClassVar[str] = ""
    """The folder of its own model in a bundle; empty if it has none."""
    suggestion: ClassVar[Suggestion | None] = None
    draft_name: ClassVar[str] = "draft"
    """Its own model in messages."""
    default_sizes: ClassVar[tuple[int, ...]] = (DEFAULT_DRAFT_TOKENS,)
    """Numbers of draft tokens to build for if the user chooses none, the default first."""

    # --- capabilities, which other code uses instead of the method's name or type -------------------------------------
    needs_graph: ClassVar[bool] = True
    """False if it only reads text; it then works in every bundle."""
    needs_training: ClassVar[str | None] = None
    """The model or heads that must be trained for it first; None if none."""
    engine_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of a method without a graph that only the opening of a bundle sets, not a request."""
    whole_model: ClassVar[bool] = False
    """Whether its draft is a complete causal LM, the checkpoint of the key ``model``."""
    takes_hypothesis: ClassVar[bool] = False
    """Whether it proposes from a text given with the request, and nothing without one."""
    branching: ClassVar[Literal[0, 1, 2]] = 0
    """The trees that it can fill: 0 for chains only, 1 for chains with further leaves, 2 for any."""
    own_widths: ClassVar[bool] = False
    """Whether its options set the size of its steps, so that no number of draft tokens can be chosen."""

    @property
    def name(self) -> str:
        """The name by which a request chooses it."""
        return method_name(type(self))

    @property
    def draft(self) -> Model | None:
        """Its own model, once it is written; None if it has none. A field of a :class:`DraftingMethod`."""
        return None

    @property
    def signature(self) -> GraphSignature | None:
        """The signature of its model's graph; None if it has none."""
        return None

    @property
    def written_draft(self) -> Model:
        """Its own model, of a method in a bundle that has one."""
        assert self.draft is not None
        return self.draft

    @property
    def target_outputs(self) -> tuple[Tensor, ...]:
        """The target's outputs that it observes, except the logits."""
        return ()

    @property
    def support(self) -> int:
        """M, the number of tokens to which q gives probability; 0 if tokens are chosen without drawing."""
        return 0

    @property
    def ranks(self) -> int:
        """Number of candidates at each depth, of which a tree's ranks choose."""
        return 1

    @property
    def catch_up(self) -> int:
        """T of a run in which its model drafts, if it has a cache."""
        return CATCH_UP_TOKENS

    @property
    def call_widths(self) -> frozenset[int]:
        """T of its model's calls on a device, if each call drafts one token; empty if one call drafts all."""
        return frozenset({self.catch_up})

    @property
    def reads_embeddings(self) -> bool:
        """Whether it can propose after a prompt with embeddings; a model with a cache reads tokens only."""
        return self.draft is None or not self.draft.cache

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
        """The types in which the matrices that it adds are stored."""
        return frozenset() if self.draft is None else frozenset({self.draft.precision.weights})

    @property
    def drafted_stages(self) -> int:
        """Number of outputs with draft tokens, one a level of a tree; 0 if one output has a row for each token."""
        outputs = () if self.signature is None else self.signature.outputs
        return sum(output.startswith(f"{DRAFT_TOKENS}.") for output in outputs)

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        """T and K of the run in which its model drafts for a tree within a device's step; None if the host proposes.

        A fill graph then fills branching trees with the drafted tokens.
        """
        return None

    def describe(self) -> str:
        """A short description for users."""
        return self.name

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        """What to build for a target, by default its ``suggestion``; None if the method does not suit it."""
        return cls.suggestion

    # --- trees --------------------------------------------------------------------------------------------------------
    def token_trees(self) -> tuple[TokenTree, ...]:
        """The trees, the default first."""
        return _trees(self.trees)

    def validate_tree(self, tree: TokenTree) -> str | None:
        """Why it cannot fill a tree; None if it can."""
        return None

    def validate(self) -> str | None:
        """Why a bundle's entry is invalid as a whole; None if it is valid. Each tree has been validated."""
        return None

    @property
    def extra_nodes(self) -> int:
        """Number of nodes that each step runs in addition to a tree."""
        return 0

    def widths(self) -> tuple[int, ...]:
        """T of every step that it may take, the default tree's first."""
        widths = [self.extra_nodes + len(tree) for tree in self.token_trees()]
        return (*widths, self.extra_nodes + 1) if self.extra_nodes else tuple(widths)

    def drafted_lengths(self) -> frozenset[int] | None:
        """The values of K that its model's graph was built for; None for any."""
        return None

    def smaller_trees(self, target: Model) -> tuple[TokenTree, ...]:
        """The trees that it can fill and that the target's graph verifies at every batch size, the largest first.

        They are its own trees, and chains of its most probable tokens.
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
        """Bytes that it needs besides the target.

        ``files`` has the sizes of the bundle's files by name; a cache for the longest text has ``rows`` rows.
        """
        return 0 if self.draft is None else files[self.draft.weights] + self.draft.cache_row_bytes * rows


M = TypeVar("M", bound=Method)


@lru_cache(maxsize=256)
def _trees(choices: tuple[Choices, ...]) -> tuple[TokenTree, ...]:
    return tuple(map(TokenTree.from_choices, choices))


def method_name(kind: type[Method | MethodOptions]) -> str:
    """The name of a method, from the type of its entry or of its options."""
    return str(kind.__struct_config__.tag)


def with_trees(method: M, trees: tuple[TokenTree, ...]) -> M:
    """The method with these trees."""
    sizes: dict[str, None] = {"num_speculative_tokens": None} if isinstance(method, MethodOptions) else {}
    return _replaced(method, trees=tuple(tree.choices for tree in trees), **sizes)


def with_draft(method: M, model: Model) -> M:
    """The method with this model as its draft, whose source it names if it has such a key."""
    named = {"model": model.source} if "model" in method.sources else {}
    return _replaced(method, draft=model, **named)


def _replaced(method: M, **changes: Any) -> M:
    return msgspec.structs.replace(cast(Any, method), **changes)


def verified_widths(target: Model) -> set[int]:
    """T of the steps in which a target computes the logits of every token."""
    return {point.tokens for point in target.graph.points if point.rows == point.tokens}


def not_a_chain(tree: TokenTree) -> str | None:
    """Why a tree is not a chain of most probable tokens (ranks 0); None if it is such a chain."""
    chain = TokenTree.chain(len(tree))
    return f"the one of {len(tree) - 1} draft tokens is not a chain" if tree.choices != chain.choices else None


class BuiltMethod(Strict, Method, frozen=True, kw_only=True, tag_field="method"):
    """A method that bundles are built for, as a manifest records it; ``options`` documents fields of the same name."""

    trees: tuple[Choices, ...]


class RankedMethod(BuiltMethod, frozen=True, kw_only=True):
    """A method whose model knows several tokens at each depth.

    Attributes:
        candidates: M, the number of tokens known at each depth; for a draft model also the support of q.
    """

    candidates: Size

    @property
    def ranks(self) -> int:
        return self.candidates

    def validate_tree(self, tree: TokenTree) -> str | None:
        most = max(tree.ranks)
        return f"rank {most}, with {self.candidates} candidates" if most >= self.candidates else None


class DraftingMethod(RankedMethod, frozen=True, kw_only=True):
    """A method with its own model, whose folder in the bundle is named by ``role``.

    Attributes:
        draft: the model; None until it is written.
    """

    draft: Model | None = None


class TextMethod(MethodOptions, Method, frozen=True, kw_only=True):
    """A method that only reads text, and proposes chains that are shorter if it finds less.

    It needs neither a graph nor files, so it works in every bundle. A build adds only trees to its options.
    """

    needs_graph: ClassVar[bool] = False
    suits: ClassVar[str] = ""
    """The texts for which it pays, for ``specexport suggest``; empty if it is not suggested."""
    default_sizes: ClassVar[tuple[int, ...]] = (8, 4, 2)

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        """See :meth:`Method.suggest`; no flags are needed, as every bundle has it."""
        sizes = ",".join(map(str, cls.default_sizes))
        return Suggestion(method_name(cls), f"chains of {sizes}", cls.suits, 3) if cls.suits else None

    def for_target(self, parameters: int) -> Method:
        return self

    def validate_tree(self, tree: TokenTree) -> str | None:
        return not_a_chain(tree)

    def smaller_trees(self, target: Model) -> tuple[TokenTree, ...]:
        """See :meth:`Method.smaller_trees`; it proposes only its own trees."""
        return tuple(sorted(self.token_trees(), key=len, reverse=True))


def for_bundle(method: TextMethod, target: Model) -> TextMethod:
    """A method for a bundle that was built without it, with the chains that fit the target's steps."""
    widest = max(verified_widths(target))
    chains = (TokenTree.chain(size + 1) for size in method.sizes or method.default_sizes)
    return with_trees(method, tuple(chain for chain in chains if len(chain) <= widest))
