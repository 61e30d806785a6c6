"""Speculation by lookahead decoding."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from specexport.contract.methods.base import BuiltMethod, Flag, MethodOptions, Suggestion, TargetProfile
from specexport.contract.tree import MAX_NODES, TokenTree

Window = Annotated[int, Meta(ge=1, le=MAX_NODES)]
NgramSize = Annotated[int, Meta(ge=2, le=32)]
Guesses = Annotated[int, Meta(ge=1, le=MAX_NODES)]

PRESETS = {"cpu": (4, 3, 4), "small": (7, 5, 7), "medium": (10, 5, 10), "large": (15, 5, 15)}
"""W, N and G. The larger presets are the paper's (arXiv 2402.02057) for models of 33B, 13B and 7B parameters: the
larger the model, the fewer extra tokens are free on a GPU. ``cpu`` is for devices on which every node costs time."""


class LookaheadOptions(MethodOptions, frozen=True, kw_only=True, tag="lookahead"):
    """Options of lookahead decoding.

    Attributes:
        preset: names W, N and G: one of ``PRESETS``, or ``gpu`` for the one that suits the target's size.
        window: W, columns.
        ngram: N, tokens of an n-gram; a guess is one without its first.
        guesses: G, most guesses a step.
        prompt_seeding: whether the pool starts with the prompt's n-grams.
    """

    preset: str | None = None
    window: Window | None = None
    ngram: NgramSize | None = None
    guesses: Guesses | None = None
    prompt_seeding: bool = True

    main: ClassVar[str] = "preset"
    flag: ClassVar[Flag | None] = Flag(
        "--lookahead",
        "preset",
        "lookahead decoding: columns of the window, tokens of an n-gram, guesses a step; or gpu for the paper's sizes "
        "(alone: 4,3,4, for CPUs)",
        "W,N,G",
        const="cpu",
    )

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None:
            raise ValueError("num_speculative_tokens was given; its steps follow from window, ngram and guesses")
        sizes = [size for size in (self.window, self.ngram, self.guesses) if size is not None]
        if sizes and (len(sizes) < 3 or self.preset is not None):
            raise ValueError("window, ngram and guesses belong together, and exclude a preset; give all three or none")
        if self.preset is not None and "," not in self.preset and self.preset not in (*PRESETS, "gpu"):
            raise ValueError(f"preset is {self.preset!r}; expected W,N,G or one of gpu, {', '.join(PRESETS)}")


class Lookahead(BuiltMethod, frozen=True, kw_only=True, tag="lookahead"):
    """Jacobi iteration within the target's own steps yields n-grams, which are verified as guesses (arXiv 2402.02057).

    A step runs the window, W columns by N - 1 levels whose first node is the root, together with the guesses. A
    request's tree is the maximum number of guesses, chains of N - 1 tokens; if there are fewer guesses, or they have a
    common prefix, steps take the smallest width that suffices.

    Attributes:
        window: W.
        ngram: N.
        guesses: G.
        prompt_seeding: see :class:`LookaheadOptions`.
    """

    window: Window
    ngram: NgramSize
    guesses: Guesses
    prompt_seeding: bool

    options: ClassVar[type[MethodOptions]] = LookaheadOptions
    own_widths: ClassVar[bool] = True

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        gpu = target.device == "gpu"
        W, N, G = PRESETS[gpu_preset(target.parameters) if gpu else "cpu"]
        return Suggestion(
            "lookahead",
            f"W,N,G = {W},{N},{G}: {(N - 1) * (W + G)} nodes a step",
            "needs nothing but arithmetic to spare" + (", which a GPU has at batch 1" if gpu else "; a CPU has little"),
            5,
            ("--lookahead", f"{W},{N},{G}") if gpu else (),
        )

    @property
    def window_nodes(self) -> int:
        """The number of the window's nodes, including the root."""
        return self.window * (self.ngram - 1)

    @property
    def extra_nodes(self) -> int:
        return self.window_nodes - 1

    def describe(self) -> str:
        seeded = ", seeded from the prompt" if self.prompt_seeding else ""
        return f"lookahead, window {self.window}, n-grams of {self.ngram}{seeded}"

    def validate_tree(self, tree: TokenTree) -> str | None:
        W, N = self.window, self.ngram
        guesses = (len(tree) - 1) // (N - 1)
        if tree.choices != guess_tree(guesses, N).choices:
            return f"the one of {len(tree) - 1} draft tokens does not consist of chains of {N - 1} below the root"
        if W < N - 2:
            return f"window {W}, with n-grams of {N}; the window fills only with {N - 2}"
        if self.window_nodes + len(tree) - 1 > MAX_NODES:
            return f"{self.window_nodes + len(tree) - 1} nodes a step, at most {MAX_NODES} are verified"
        return None


def gpu_preset(parameters: int) -> str:
    """The preset for a target with this many parameters on a GPU."""
    return "large" if parameters < 10e9 else "medium" if parameters < 20e9 else "small"


def guess_tree(guesses: int, ngram: int) -> TokenTree:
    """The tree of G guesses: chains of N - 1 tokens below the root."""
    return TokenTree.from_choices([(guess, *[0] * at) for guess in range(guesses) for at in range(ngram - 1)])
