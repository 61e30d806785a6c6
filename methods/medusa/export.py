"""Medusa heads in a bundle: they become part of the target's graph, and are compared with the original heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specexport.contract.folders import expanded
from specexport.contract.tree import TokenTree
from specexport.exporter.build_plan import BuildPlan
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.checkpoints.reference import as_read, load_reference, reference_states
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
from specexport.graphs.top_k import MAX_TOP_K
from specexport.methods.medusa.checkpoint import HeadsOutline, count_parameters, load_medusa, read_outline
from specexport.methods.medusa.graph import HeadCandidates, MedusaHeads
from specexport.methods.medusa.spec import Medusa, MedusaOptions

PUBLISHED_ACCURACY = (0.56, 0.32, 0.20, 0.15)
"""Share of tokens that were a head's best guess, heads 1 to 4 of Vicuna-7B (arXiv 2401.10774)."""
NEXT_RANK = 0.3
"""Without a measurement, a guess is taken to be right this often compared with the guess before it."""


class MedusaExporter(MethodExporter[MedusaOptions, Medusa]):
    """Heads of the target."""

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
        """See :class:`MethodExporter`; the best of that size by what was measured of the heads, or published."""
        heads = read_outline(folder_of(method.model))
        return TokenTree.best(path_weight(heads), size + 1, method.candidates, heads.count)

    def default_trees(self, method: Medusa) -> tuple[TokenTree, ...]:
        """See :class:`MethodExporter`; what the heads bring, if anything."""
        own = read_outline(folder_of(method.model)).tree
        return (own,) if own is not None else super().default_trees(method)

    def add_to_target(self, method: Medusa, target: Checkpoint, build: BuildOptions, plan: BuildPlan) -> Added | None:
        heads = heads_of(method.model, target)
        return Added(outputs=HeadCandidates(heads, target.model, method.candidates))

    def compare(self, method: Medusa, run: Verification) -> tuple[str, Agreement] | None:
        target, heads = run.bundle.manifest.target, run.source(method)
        made = run.recorded(method)
        model = load_reference(run.source(None), target)
        agreement = run.agreement(target.precision.weights, method.weights)
        for text, tokens in made:
            # The heads saw the target's cache, which holds all tokens but the last; theirs follow the head's own.
            said = reference_heads(model, heads, as_read(text[:-1], model))
            agreement.count(said[1:, : vocabulary(run.bundle.manifest, target)], tokens)
        return "the heads in the target's graph propose the original heads' own token", agreement


def folder_of(source: str) -> Path:
    """The folder of heads."""
    return expanded(source)


def heads_of(source: str, model: Checkpoint) -> MedusaHeads:
    """The heads of a model.

    Raises:
        BuildError: they are for another one.
    """
    return load_medusa(
        folder_of(source), hidden=int(model.model.get_output_embeddings().weight.shape[1]), vocab=model.vocab_size
    )


def path_weight(heads: HeadsOutline, own: tuple[float, ...] = ()) -> Callable[[tuple[int, ...]], float]:
    """The chance that a path of ranks comes true: as measured of the heads, else a product of what was published.

    ``own`` are chances of the depths that come before those of the heads.
    """

    def weight(path: tuple[int, ...]) -> float:
        first = math.prod(chance * NEXT_RANK**rank for chance, rank in zip(own, path, strict=False))
        ahead = path[len(own) :]
        if not ahead:
            return first
        if heads.accuracy is not None:
            return first * heads.accuracy.paths.get(ahead, 0.0)
        last = len(PUBLISHED_ACCURACY) - 1
        chances = (PUBLISHED_ACCURACY[min(at, last)] * NEXT_RANK**rank for at, rank in enumerate(ahead))
        return math.prod(chances, start=first)

    return weight


def reference_heads(model: Any, heads: Path, text: Array) -> Array:
    """What a model and Medusa heads on it say after the last token of a text, float32 ``[1+N,V]``."""
    head = model.get_output_embeddings()
    own, hidden = reference_states(model, text)
    loaded = load_medusa(heads, hidden=int(head.weight.shape[1]), vocab=int(head.weight.shape[0]))
    with torch.no_grad():
        logits: Array = torch.cat([own[-1:], loaded.logits(hidden[-1], head)]).numpy()
    return logits


EXPORTER = MedusaExporter()
