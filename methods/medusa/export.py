"""Export of Medusa heads into the target's graph, and their comparison with the original heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specexport.contract.folders import expanded
from specexport.contract.tree import TokenTree
from specexport.exporter.build_state import BuildPlan
from specexport.exporter.checkpoints.checkpoint import Checkpoint, as_read, load_reference, reference_states
from specexport.exporter.method import (
    Added,
    Agreement,
    Array,
    MethodExporter,
    TargetOutline,
    Verification,
    vocabulary,
)
from specexport.exporter.options import BuildOptions
from specexport.graphs.propose import MAX_TOP_K
from specexport.methods.medusa.checkpoint import HeadsOutline, count_parameters, load_medusa, read_outline
from specexport.methods.medusa.graph import HeadCandidates, MedusaHeads
from specexport.methods.medusa.spec import Medusa, MedusaOptions

PUBLISHED_ACCURACY = (0.56, 0.32, 0.20, 0.15)
"""Top-1 accuracy of heads 1 to 4 of Vicuna-7B (arXiv 2401.10774)."""
NEXT_RANK = 0.3
"""Assumed ratio of a guess's accuracy to that of the guess one rank above it, if nothing was measured."""


class MedusaExporter(MethodExporter[MedusaOptions, Medusa]):
    """Exports heads as part of the target."""

    def outline(self, options: MedusaOptions, target: TargetOutline) -> Medusa:
        folder = folder_of(options.model)
        heads = read_outline(folder)
        return Medusa(
            trees=(),
            model=str(folder.resolve()),
            heads=heads.count,
            candidates=min(MAX_TOP_K, target.vocab),
            parameters=count_parameters(folder, hidden=target.hidden, vocab=target.vocab),
            weights=target.proposing,
        )

    def sized(self, method: Medusa, size: int) -> TokenTree:
        """See :class:`MethodExporter`; the best tree of that size by the heads' measured or published accuracy."""
        heads = read_outline(folder_of(method.model))
        return TokenTree.best(path_weight(heads), size + 1, method.candidates, heads.count)

    def default_trees(self, method: Medusa) -> tuple[TokenTree, ...]:
        """See :class:`MethodExporter`; the checkpoint's tree, if it has one."""
        published = read_outline(folder_of(method.model)).tree
        return (published,) if published is not None else super().default_trees(method)

    def add_to_target(self, method: Medusa, target: Checkpoint, build: BuildOptions, plan: BuildPlan) -> Added | None:
        heads = heads_of(method.model, target)
        return Added(outputs=HeadCandidates(heads, target.model, method.candidates))

    def compare(self, method: Medusa, run: Verification) -> tuple[str, Agreement] | None:
        target, heads = run.bundle.manifest.target, run.source(method)
        recorded = run.recorded(method)
        model = load_reference(run.source(None), target)
        agreement = run.agreement(target.precision.weights, method.weights)
        for text, tokens in recorded:
            # The heads read the target's cache, which holds all tokens except the last; theirs follow the head's own.
            expected = reference_heads(model, heads, as_read(text[:-1], model))
            agreement.count(expected[1:, : vocabulary(run.bundle.manifest, target)], tokens)
        return "the heads in the target's graph propose the original heads' own token", agreement


def folder_of(source: str) -> Path:
    """The folder of heads."""
    return expanded(source)


def heads_of(source: str, model: Checkpoint) -> MedusaHeads:
    """Loads the heads of a model.

    Raises:
        BuildError: they are another model's.
    """
    return load_medusa(
        folder_of(source), hidden=int(model.model.get_output_embeddings().weight.shape[1]), vocab=model.vocab_size
    )


def path_weight(heads: HeadsOutline, base: tuple[float, ...] = ()) -> Callable[[tuple[int, ...]], float]:
    """A function from a path of ranks to its probability: the heads' measured one, else a product of published ones.

    ``base`` has the probabilities of the depths before those of the heads.
    """

    def weight(path: tuple[int, ...]) -> float:
        first = math.prod(chance * NEXT_RANK**rank for chance, rank in zip(base, path, strict=False))
        ahead = path[len(base) :]
        if not ahead:
            return first
        if heads.accuracy is not None:
            return first * heads.accuracy.paths.get(ahead, 0.0)
        last = len(PUBLISHED_ACCURACY) - 1
        chances = (PUBLISHED_ACCURACY[min(at, last)] * NEXT_RANK**rank for at, rank in enumerate(ahead))
        return math.prod(chances, start=first)

    return weight


def reference_heads(model: Any, heads: Path, text: Array) -> Array:
    """Logits of a model and of its Medusa heads after the last token of a text, float32 ``[1+N,V]``."""
    head = model.get_output_embeddings()
    base, hidden = reference_states(model, text)
    loaded = load_medusa(heads, hidden=int(head.weight.shape[1]), vocab=int(head.weight.shape[0]))
    with torch.no_grad():
        logits: Array = torch.cat([base[-1:], loaded.logits(hidden[-1], head)]).numpy()
    return logits


EXPORTER = MedusaExporter()
