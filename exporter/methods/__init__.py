"""How a method gets into a bundle, and how ``verify`` looks at it: a file each, found through the registry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy.typing as npt

from specexport.contract.errors import BuildError
from specexport.contract.methods import Method, part, with_trees
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specexport.checkpoints.checkpoint import Checkpoint
    from specexport.checkpoints.outline import ModelOutline
    from specexport.contract.manifest import Manifest
    from specexport.exporter.build_plan import BuildPlan
    from specexport.exporter.options import BuildOptions
    from specexport.exporter.writing import Part, Progress
    from specexport.graphs.medusa import MedusaHeads
    from specexport.runtime.bundle import Bundle

M = TypeVar("M", bound=Method)
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TargetOutline:
    """What trees depend on, and what methods observe: V, how many parameters and layers the target has; its folder."""

    vocab: int
    parameters: int
    layers: int
    path: Path = Path()


@dataclass(frozen=True)
class Build:
    """A build whose target is known.

    Attributes:
        vocab_size: V of the target.
        max_positions: longest text that the target was made for, in tokens.
    """

    folder: Path
    options: BuildOptions
    plan: BuildPlan
    vocab_size: int
    max_positions: int
    progress: Progress


class Agreement(Protocol):
    """Positions at which a graph and the model it was made from both name the next token."""

    def count(self, reference: Array, chosen: Array) -> None:
        """Adds positions: the model's logits ``[N,V]`` and the graph's tokens ``[N]``."""


class Verification(Protocol):
    """What ``verify`` lends a method to compare its graph with what it was built from.

    Attributes:
        texts: token ids of prompts.
    """

    bundle: Bundle
    texts: list[list[int]]

    def source(self, method: Method | None, key: str = "model") -> Path:
        """The folder of a checkpoint a method names, or of the target; what cannot be had ends the check."""

    def drafted(self, method: Method, texts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        """Texts, each with the chain proposed after it: as if all, one and none of the drafts before were accepted."""

    def recorded(self, method: Method) -> list[tuple[list[int], Array]]:
        """Texts while they are decoded, each with the best candidate at every depth, int64 ``[depths]``."""

    def agreement(self, *stored: str) -> Agreement:
        """What counts; how far off tokens may be depends on how weights are stored."""


@dataclass(frozen=True)
class MetaDraft:
    """A draft without its weights, for ``plan``.

    Attributes:
        source: its folder or hub id, and its method.
        outline: what it is made of.
        block: most tokens that it drafts, all in one pass; None where each takes a pass.
    """

    source: str
    outline: ModelOutline
    block: int | None = None


class MethodExporter(Generic[M]):
    """A method's part of a build and of ``verify``. What is done here suits a method that reads text alone."""

    stage: ClassVar[str | None] = None
    """The folder it writes a model of its own into, in a stage after the target's."""

    def check(self, method: M, target: Path, tokenizer: Tokenizer) -> None:
        """Refuses checkpoints that do not belong together, before anything large is read."""

    def outline(self, method: M, target: TargetOutline) -> M:
        """The method with what its checkpoints say of themselves, without reading weights."""
        return method

    def sized(self, method: M, size: int) -> TokenTree:
        """Its tree of so many draft tokens."""
        return TokenTree.chain(size + 1)

    def default_trees(self, method: M) -> tuple[TokenTree, ...]:
        """What it verifies where nobody says."""
        return method.default_trees()

    def plan(self, method: M, target: TargetOutline) -> M:
        """The method with the trees it is built for.

        Raises:
            BuildError: a tree is one that it cannot fill; says why.
        """
        known = self.outline(method, target)
        sized = tuple(self.sized(known, size) for size in known.sizes)
        trees = _distinct(known.name, (*known.token_trees(), *sized)) or self.default_trees(known)
        for tree in trees:
            if (reason := known.validate_tree(tree)) is not None:
                raise BuildError(f"{known.name}: the tree of {len(tree) - 1} draft tokens cannot be filled: {reason}")
        planned = with_trees(known, trees)
        if (reason := planned.validate()) is not None:
            raise BuildError(f"{known.name}: {reason}")
        return planned

    def heads(self, method: M, target: Checkpoint) -> MedusaHeads | None:
        """Heads that become part of the target's graph; checkpoints that do not fit the target are refused."""
        return None

    def part(self, method: M, target: Checkpoint, build: BuildOptions, plan: BuildPlan) -> Part | None:
        """A graph beside the target's that reads the same weights."""
        return None

    def in_target(self, method: M, options: BuildOptions, heads: MedusaHeads | None, model: Model | None) -> M:
        """The bundle's entry of what the target's stage wrote for it: heads, or the model of its part."""
        return method

    def export(self, method: M, build: Build) -> M:
        """Writes a model of its own into the folder :attr:`stage`; the bundle's entry."""
        return method

    def points(self, method: M, plan: BuildPlan) -> tuple[ShapePoint, ...]:
        """Of the graph of its own model."""
        return ()

    def meta_draft(self, method: M, target: str, outline: ModelOutline) -> MetaDraft | None:
        """What drafts over the target's own states, where it is a model of its own.

        Args:
            method: its options.
            target: folder or hub id.
            outline: the target's.

        Raises:
            BuildError: its configuration cannot be read, or it is of another target.
        """
        return None

    def compare(self, method: M, run: Verification) -> tuple[str, Agreement] | None:
        """Compares what it proposes with what its original would.

        Returns:
            What was compared, as the beginning of a sentence, and the result; None where there is nothing to compare.

        Raises:
            BundleError: a checkpoint is another model.
        """
        return None


def exporter_of(method: M) -> MethodExporter[M]:
    """A method's exporter."""
    found: MethodExporter[M] = part(method, "exporter").EXPORTER
    return found


def _distinct(name: str, trees: tuple[TokenTree, ...]) -> tuple[TokenTree, ...]:
    found: dict[int, TokenTree] = {}
    for tree in trees:
        if len(tree) == 1:
            raise BuildError(f"{name}: a token tree has no draft token; expected at least one")
        if found.setdefault(len(tree), tree) != tree:
            raise BuildError(
                f"{name}: two trees have {len(tree) - 1} draft tokens; requests choose a tree by that number, so no "
                "two may"
            )
    return tuple(found.values())


def vocabulary(manifest: Manifest, model: Model) -> int:
    """Tokens that a draft may propose: those that both know."""
    return min(manifest.target.vocab_size, model.vocab_size)
