"""Which trees a bundle is built for: what the user named, or what suits the proposer."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from specexport.checkpoints.medusa import HeadsOutline
from specexport.checkpoints.mlp_speculator import SpeculatorOutline
from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.methods import Lookahead
from specexport.contract.tree import MAX_NODES, TokenTree
from specexport.exporter.options import BuildOptions
from specexport.graphs.medusa import MAX_TOP_K
from specexport.graphs.propose import MAX_CANDIDATES

DEFAULT_DRAFT_TOKENS = 4
"""Chosen for CPUs, where every node of a step costs; ``specexport tune tree`` measures what a device can take."""
UNIVERSAL_DRAFT_TOKENS = (4, 2, 1)
"""The draft's tokens make more or fewer of the target's, so that shorter chains must be there too."""
LOOKUP_DRAFT_TOKENS = {"ngram": (8, 4, 2), "suffix": (8, 4, 2), "hypothesis": (16, 8, 4, 2)}
"""Of the methods that look in text, which take a shorter chain where they have found less."""
MAX_SPEC_FACTOR, MIN_TOKEN_PROB = 1.5, 0.1
"""Of suffix decoding. With the chains above a match of one token, often chance, proposes nothing."""

PUBLISHED_ACCURACY = (0.56, 0.32, 0.20, 0.15)
"""Share of tokens that were a head's best guess, heads 1 to 4 of Vicuna-7B (arXiv 2401.10774)."""
_OWN_ACCURACY = 0.8
"""Stands in for how often a draft's own head is right."""
_STAGE_ACCURACY = 0.6
"""Stands in for how often a stage of an MLP speculator is right after tokens that were."""
_NEVER_SEEN = 1e-6
"""Where there was a measurement, how much a path that never came true weighs of what is usual."""
_NEXT_RANK = 0.3
"""Without a measurement, a guess is taken to be right this often compared with the guess before it."""

LOOKAHEAD = {"cpu": (4, 3, 4), "small": (7, 5, 7), "medium": (10, 5, 10), "large": (15, 5, 15)}
"""W, N and G. The larger ones are the paper's (arXiv 2402.02057) for models of 33, 13 and 7 thousand million
parameters: the larger the model, the fewer tokens a GPU computes for nothing. ``cpu`` is for devices where every node
costs."""

Trees = tuple[TokenTree, ...]
Plan = dict[str, Trees]
"""By the name of a method: its trees, the default first."""


def candidates(vocab: int) -> int:
    """M, the ranks of a Medusa head's candidates."""
    return min(MAX_TOP_K, vocab)


def plan(
    options: BuildOptions,
    heads: HeadsOutline | None,
    draft_heads: HeadsOutline | None,
    speculator: SpeculatorOutline | None,
    vocab: int,
) -> Plan:
    """The trees of every method a bundle is to have, the default method first.

    Args:
        options: of the build.
        heads: of the target.
        draft_heads: of the draft.
        speculator: of the target.
        vocab: tokens that can be proposed.

    Raises:
        BuildError: a tree is one its proposer cannot fill; says why.
    """
    found: Plan = {}
    named = tuple(tree if isinstance(tree, TokenTree) else _load(tree) for tree in options.trees)
    # Beside heads or a speculator, which fill wider ones, a draft needs none.
    of_draft = () if heads is not None or speculator is not None else named
    if options.draft is not None and draft_heads is None:
        sizes = options.sizes or (() if of_draft else (DEFAULT_DRAFT_TOKENS,))
        found["draft_model"] = _trees(of_draft, tuple(TokenTree.chain(size + 1) for size in sizes))
        for tree in of_draft:
            if not tree.has_spine:
                raise BuildError(
                    "a draft model drafts a chain, so only the most probable token of each depth can have children; "
                    f"the tree of {len(tree) - 1} draft tokens has others that do"
                )
            _require_ranks(tree, min(MAX_CANDIDATES, vocab))
    elif draft_heads is not None:
        found["medusa_draft"] = _of_heads(options, of_draft, draft_heads, 1, vocab)
    if options.universal_draft is not None:
        sizes = options.sizes or UNIVERSAL_DRAFT_TOKENS
        found["universal_draft"] = tuple(TokenTree.chain(size + 1) for size in sizes)
    if options.self_draft_layers is not None:
        sizes = options.sizes or (DEFAULT_DRAFT_TOKENS,)
        found["self_draft"] = tuple(TokenTree.chain(size + 1) for size in sizes)
    if heads is not None:
        found["medusa"] = _of_heads(options, named, heads, 0, vocab)
    if speculator is not None:
        found["mlp_speculator"] = _of_speculator(options, named, speculator)
    for name in options.lookups:
        found[name] = tuple(TokenTree.chain(size + 1) for size in options.sizes or LOOKUP_DRAFT_TOKENS[name])
    return found


def lookahead(wanted: str | tuple[int, int, int], seeding: bool, parameters: int) -> Lookahead:
    """The method of lookahead decoding.

    Args:
        wanted: W, N and G, a preset of :data:`LOOKAHEAD`, or ``gpu`` for the preset that suits the model's size.
        seeding: whether the pool starts with the prompt's n-grams.
        parameters: of the target.

    Raises:
        BuildError: there is no such preset, or a step of these sizes cannot be.
    """
    if isinstance(wanted, str):
        name = "large" if parameters < 10e9 else "medium" if parameters < 20e9 else "small"
        sizes = LOOKAHEAD.get(name if wanted == "gpu" else wanted)
        if sizes is None:
            raise BuildError(f"lookahead is {wanted!r}; expected W,N,G or one of gpu, {', '.join(LOOKAHEAD)}")
    else:
        sizes = wanted
    window, ngram, guesses = sizes
    named = f"lookahead is {window},{ngram},{guesses}"
    if window < 1 or guesses < 1 or not 2 <= ngram <= 32:
        raise BuildError(f"{named}; expected W and G of at least 1 and N of 2 to 32")
    if (ngram - 1) * (window + guesses) > MAX_NODES:
        nodes = (ngram - 1) * (window + guesses)
        raise BuildError(f"{named}, (N - 1)(W + G) = {nodes} tokens a step; at most {MAX_NODES} are verified")
    if window < ngram - 2:
        raise BuildError(f"{named}; the window fills only if W is at least N - 2 = {ngram - 2}")
    return Lookahead.of(window, ngram, guesses, seeding)


def _of_heads(options: BuildOptions, named: Trees, heads: HeadsOutline, own: int, vocab: int) -> Trees:
    """Trees for heads, after ``own`` depths that the model's own head proposes for."""
    depth = heads.count + own
    for tree in named:
        if tree.depth > depth:
            raise BuildError(
                f"the tree of {len(tree) - 1} draft tokens is {tree.depth} deep, and {heads.path} holds {heads.count} "
                f"heads, which propose {depth} tokens ahead; choose a shallower tree"
            )
        _require_ranks(tree, candidates(vocab))
    if not named and not options.sizes and heads.tree is not None:
        return (heads.tree,)
    sizes = options.sizes or (() if named else (DEFAULT_DRAFT_TOKENS,))

    def weight(path: tuple[int, ...]) -> float:
        """The chance that a path comes true: as measured, else a product of what was published."""
        first = math.prod((_OWN_ACCURACY * _NEXT_RANK**rank for rank in path[:own]), start=1.0)
        ahead = path[own:]
        if not ahead:
            return first
        if heads.accuracy is not None:
            return first * heads.accuracy.paths.get(ahead, 0.0)
        last = len(PUBLISHED_ACCURACY) - 1
        chances = (PUBLISHED_ACCURACY[min(at, last)] * _NEXT_RANK**rank for at, rank in enumerate(ahead))
        return math.prod(chances, start=first)

    ranks = candidates(vocab)
    return _trees(named, tuple(TokenTree.best(weight, size + 1, ranks, depth) for size in sizes))


def _of_speculator(options: BuildOptions, named: Trees, speculator: SpeculatorOutline) -> Trees:
    """Trees for an MLP speculator; those of a size are no wider than it asks for."""
    for tree in named:
        if tree.depth > speculator.stages:
            raise BuildError(
                f"the tree of {len(tree) - 1} draft tokens is {tree.depth} deep, and {speculator.path} holds "
                f"{speculator.stages} stages, which propose a token each; choose a shallower tree"
            )
        _require_ranks(tree, min(MAX_CANDIDATES, speculator.vocab))
    sizes = options.sizes or (() if named else (min(DEFAULT_DRAFT_TOKENS, _most_nodes(speculator.widths)),))

    def weight(path: tuple[int, ...]) -> float:
        """The chance that a path comes true: as measured, else, far below that, a product of what is usual."""
        if any(rank >= width for rank, width in zip(path, speculator.widths, strict=False)):
            return 0.0
        usual = math.prod(_STAGE_ACCURACY * _NEXT_RANK**rank for rank in path)
        if speculator.accuracy is None:
            return usual
        return speculator.accuracy.paths.get(path, _NEVER_SEEN * usual)

    sized = tuple(TokenTree.best(weight, size + 1, max(speculator.widths), speculator.stages) for size in sizes)
    for tree, size in zip(sized, sizes, strict=True):
        if len(tree) != size + 1:
            raise BuildError(
                f"num_speculative_tokens is {size}, and the widest tree of {speculator.path} has {len(tree) - 1}: its "
                f"top_k_tokens_per_head is {list(speculator.widths)}. Ask for fewer, or name a tree"
            )
    return _trees(named, sized)


def _most_nodes(widths: Sequence[int]) -> int:
    """Draft tokens of the widest tree."""
    return sum(itertools.accumulate(widths, operator.mul))


def _trees(named: Trees, sized: Trees) -> Trees:
    """Named trees first; no two of one size."""
    found: dict[int, TokenTree] = {}
    for tree in (*named, *sized):
        if len(tree) == 1:
            raise BuildError("a token tree has no draft token; expected at least one")
        other = found.setdefault(len(tree), tree)
        if other != tree:
            raise BuildError(
                f"two trees have {len(tree) - 1} draft tokens; requests choose a tree by that number, so no two may"
            )
    return tuple(found.values())


def _require_ranks(tree: TokenTree, known: int) -> None:
    if max(tree.ranks) >= known:
        raise BuildError(
            f"the tree of {len(tree) - 1} draft tokens has a node of rank {max(tree.ranks)}; ranks below {known} are "
            "proposed"
        )


def _load(source: object) -> TokenTree:
    try:
        return TokenTree.load(str(source))
    except SpecExportError as error:
        raise BuildError(str(error)) from error
