"""The interface through which a method is built into a bundle and compared by ``verify``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy.typing as npt

from specexport.contract.errors import BuildError
from specexport.contract.methods import Method, MethodOptions, part, with_draft, with_trees
from specexport.contract.methods.suggestion import Device
from specexport.contract.model import Model, StoredAs
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree

if TYPE_CHECKING:
    import onnx_ir as ir
    from tokenizers import Tokenizer

    from specexport.contract.manifest import Manifest
    from specexport.exporter.build_state import Build, BuildPlan
    from specexport.exporter.checkpoints.checkpoint import Checkpoint
    from specexport.exporter.checkpoints.sizes import ModelSizes
    from specexport.exporter.options import BuildOptions
    from specexport.exporter.writing import TracedGraph
    from specexport.graphs.step import Addition
    from specexport.runtime.bundle import Bundle

O = TypeVar("O", bound=MethodOptions)
M = TypeVar("M", bound=Method)
Array = npt.NDArray[Any]

_LEAVES = tuple(
    TokenTree.from_choices(choices)
    for choices in (
        ((0,), (0, 0), (1,)),
        ((0,), (0, 0), (0, 0, 0), (1,), (2,)),
        ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,), (2,), (0, 1)),
    )
)
"""Chains with leaves beside them: a leaf costs a row of the step, a longer chain another pass of the draft. For a draft
that is right half of the time they commit 5 to 10 % more tokens a second than any chain."""


@dataclass(frozen=True)
class TargetInfo:
    """The properties of a target that methods need: trees depend on its sizes, and drafts must fit it.

    Attributes:
        vocab: V, the width of its logits.
        hidden: H, the width of its head's input.
        device: where the bundle will run.
    """

    vocab: int
    parameters: int
    layers: int
    hidden: int
    path: Path
    draft_storage: StoredAs
    max_seq_len: int
    device: Device = "cpu"


class Verification(Protocol):
    """The services that ``verify`` passes to a method, to compare its graph with its checkpoint."""

    bundle: Bundle
    texts: list[list[int]]

    def source(self, method: Method | None, key: str = "model") -> Path:
        """The folder of a method's checkpoint, or of the target if None; ends the check if it is missing."""

    def drafted(self, method: Method, texts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        """Texts with the chains proposed after them, after all, one or none of the last draft tokens were accepted."""

    def recorded(self, method: Method) -> list[tuple[list[int], Array]]:
        """Texts during decoding, each with the best candidate at every depth, int64 ``[depths]``."""


@dataclass(frozen=True)
class MetaDraft:
    """A draft without its weights, for ``plan``.

    Attributes:
        source: folder or hub id, with the method.
        block: maximum number of tokens that a pass drafts; None if each token takes a pass.
    """

    source: str
    sizes: ModelSizes
    block: int | None = None


class MethodExporter(Generic[O, M]):
    """A method's part of a build and of ``verify``. The defaults suit a method without checkpoints."""

    def check(self, options: O, target: Path, tokenizer: Tokenizer) -> None:
        """Refuses checkpoints that do not fit each other, before anything large is read."""

    def resolve(self, options: O, target: TargetInfo) -> M:
        """The method, from the configurations of its checkpoints without their weights; it may lack trees.

        Raises:
            BuildError: the checkpoints belong to another target, or support only shorter texts.
        """
        return cast(M, options.for_target(target.parameters))

    def tree_of_size(self, method: M, size: int) -> TokenTree:
        """The method's tree of ``size`` draft tokens."""
        return TokenTree.chain(size + 1)

    def default_trees(self, method: M, device: Device) -> tuple[TokenTree, ...]:
        """The trees that it verifies by default."""
        chains = tuple(self.tree_of_size(method, size) for size in method.default_sizes)
        # On a GPU every tree is a graph of its own.
        leaves = _LEAVES if method.branching == 1 and device == "cpu" else ()
        return *chains, *(tree for tree in leaves if method.validate_tree(tree) is None)

    def plan(self, options: O, target: TargetInfo) -> M:
        """The method with the trees to build for.

        Raises:
            BuildError: it cannot fill one of the trees.
        """
        method = self.resolve(options, target)
        requested = (
            *map(TokenTree.from_choices, options.trees),
            *(self.tree_of_size(method, size) for size in options.sizes),
        )
        trees = _distinct(method.name, requested) or method.token_trees() or self.default_trees(method, target.device)
        for tree in trees:
            if (reason := method.validate_tree(tree)) is not None:
                raise BuildError(f"{method.name}: the tree of {len(tree) - 1} draft tokens cannot be filled: {reason}")
        planned = with_trees(method, trees)
        if (reason := planned.validate()) is not None:
            raise BuildError(f"{method.name}: {reason}")
        return planned

    def add_to_target(
        self, method: M, target: Checkpoint, build: BuildOptions, plan: BuildPlan
    ) -> Addition | TracedGraph | None:
        """The method's addition to the target, if any.

        An addition adds outputs to the target's graph; a graph over the same weights becomes the method's model.

        Raises:
            BuildError: the method does not fit the target.
        """
        return None

    def load(self, method: M, build: Build) -> Checkpoint:
        """Loads its own model, of a method that has one and does not write it with the target."""
        raise NotImplementedError(f"the exporter of {method.name} has to load its model")

    def trace(self, method: M, draft: Checkpoint, build: Build) -> ir.Model:
        """Traces the graph of its own model."""
        raise NotImplementedError(f"the exporter of {method.name} has to trace its model")

    def export(self, method: M, build: Build) -> M:
        """Writes its own model to files of its role, and returns the manifest's entry.

        Tensors that the target has too, as stored, are read from the target's file.
        """
        from specexport.exporter.external_data import stored_tensors  # these import torch or onnx
        from specexport.exporter.writing import TracedGraph, tracing, write_models

        draft = self.load(method, build)
        with build.during(f"tracing the {method.draft_name}"), tracing(draft):
            graph = self.trace(method, draft, build)
        points, states = self.points(method, build.plan), tuple(draft.states.values())
        traced = TracedGraph(graph, points, draft.cache, draft.parameters, states)
        target = build.target.model
        (model,) = write_models(
            build,
            method.role,
            method.draft_name,
            [traced],
            draft,
            build.options.draft_storage,
            shared=None if target.ranks else stored_tensors(build.folder / target.graph.master),
        )
        return with_draft(method, model)

    def points(self, method: M, plan: BuildPlan) -> tuple[ShapePoint, ...]:
        """The shape points of its own model's graph, by default those of a propose graph."""
        return plan.propose_points(method)

    def meta_draft(self, options: O, target: str, sizes: ModelSizes) -> MetaDraft | None:
        """The draft, if it is a separate model over the target's states.

        Raises:
            BuildError: the draft's configuration cannot be read, or belongs to another target.
        """
        return None

    def compare(self, method: M, run: Verification) -> Iterator[tuple[Array, Array]]:
        """Compares the method's graph with its original checkpoint; yields nothing if it has no graph of its own.

        Yields:
            Logits ``[N,V]`` of the original after N texts, and the tokens ``[N]`` that the graph proposed there.

        Raises:
            BundleError: a checkpoint is another model.
        """
        return iter(())


def exporter_of(method: Method | MethodOptions) -> MethodExporter[Any, Any]:
    """A method's exporter: ``EXPORTER`` of its module ``export``, if it has one."""
    return getattr(part(method, "export"), "EXPORTER", None) or MethodExporter()


def _distinct(name: str, trees: tuple[TokenTree, ...]) -> tuple[TokenTree, ...]:
    by_size: dict[int, TokenTree] = {}
    for tree in trees:
        if len(tree) == 1:
            raise BuildError(f"{name}: a token tree has no draft token; expected at least one")
        if by_size.setdefault(len(tree), tree) != tree:
            raise BuildError(
                f"{name}: two trees have {len(tree) - 1} draft tokens, but requests choose a tree by that number; "
                "give trees of different sizes"
            )
    return tuple(by_size.values())


def vocabulary(manifest: Manifest, model: Model) -> int:
    """The number of tokens that a draft may propose: the size of the smaller vocabulary."""
    return min(manifest.target.vocab_size, model.vocab_size)
