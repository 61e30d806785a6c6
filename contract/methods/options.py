"""The options of methods, and the flags of ``specexport build`` that are short for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from specexport.contract.shapes import Strict
from specexport.contract.tree import MAX_NODES

Choices = Annotated[tuple[tuple[Annotated[int, Meta(ge=0, lt=MAX_NODES)], ...], ...], Meta(max_length=MAX_NODES)]
"""A token tree as Medusa choices: for each node but the root, the ranks on the path to it."""
DraftTokens = Annotated[int, Meta(ge=1, le=32)]
DEFAULT_DRAFT_TOKENS = 4
"""Chosen for CPUs, where every node of a step costs time; ``specexport tune tree`` finds a device's best trees."""
SourceKind = Literal["checkpoint", "folder"]
"""A model's folder or hub id, or a folder alone."""


@dataclass(frozen=True)
class Flag:
    """A flag of ``specexport build`` that is short for a method.

    Attributes:
        name: such as ``--ngram``.
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
