"""The trees and shapes of a bundle, as far as they follow from options and a few numbers of the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specexport.checkpoints.medusa import HeadsOutline, read_outline
from specexport.checkpoints.mlp_speculator import SpeculatorOutline, read_speculator
from specexport.contract.methods import Hypothesis, Method, Ngram, Suffix
from specexport.contract.shapes import batch_points, cache_buckets
from specexport.exporter import methods, points
from specexport.exporter.options import BuildOptions


@dataclass(frozen=True)
class BuildPlan:
    """What every stage of a build goes by.

    Attributes:
        plan: the trees of every method, the default method first.
        text_only: the methods that need no model but the target.
        widths: T of their steps.
        batches: B of the graphs, ascending.
        caches: S of the graphs, ascending.
    """

    plan: methods.Plan
    text_only: tuple[Method, ...]
    widths: frozenset[int]
    batches: tuple[int, ...]
    caches: tuple[int, ...]

    @classmethod
    def of(cls, options: BuildOptions, vocab: int, parameters: int, max_seq_len: int) -> BuildPlan:
        """The layout of a target with so many tokens and parameters.

        Raises:
            BuildError: a tree is one its proposer cannot fill, or heads or a speculator are malformed.
        """
        heads, draft_heads = heads_outline(options.medusa), heads_outline(options.draft_medusa)
        plan = methods.plan(options, heads, draft_heads, speculator_outline(options), vocab)
        text_only = tuple(_text_only(options, plan, parameters))
        widths = frozenset(width for method in text_only for width in method.widths())
        batches = batch_points(options.max_batch_size)
        caches = cache_buckets(max_seq_len, max(*points.verify_widths(plan, batches, widths), points.PREFILL_CHUNK))
        return cls(plan, text_only, widths, batches, caches)


def heads_outline(source: str | None) -> HeadsOutline | None:
    """What Medusa heads a folder holds, if one is named."""
    return read_outline(Path(source).expanduser()) if source is not None else None


def speculator_outline(options: BuildOptions) -> SpeculatorOutline | None:
    """What MLP speculator the options name, if they do."""
    return read_speculator(options.mlp_speculator) if options.mlp_speculator is not None else None


def _text_only(options: BuildOptions, plan: methods.Plan, parameters: int) -> list[Method]:
    """The methods that need no model but the target."""
    made: list[Method] = []
    if options.ngram:
        made.append(
            Ngram(
                trees=tuple(tree.choices for tree in plan["ngram"]),
                prompt_lookup_max=options.prompt_lookup_max,
                prompt_lookup_min=options.prompt_lookup_min,
            )
        )
    if options.suffix:
        made.append(
            Suffix(
                trees=tuple(tree.choices for tree in plan["suffix"]),
                max_spec_factor=methods.MAX_SPEC_FACTOR,
                min_token_prob=methods.MIN_TOKEN_PROB,
            )
        )
    if options.hypothesis:
        made.append(Hypothesis(trees=tuple(tree.choices for tree in plan["hypothesis"])))
    if options.lookahead is not None:
        made.append(methods.lookahead(options.lookahead, options.lookahead_seeding, parameters))
    return made
