"""Speculation by a suffix automaton."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from specexport.contract.methods.base import Flag, TextMethod
from specexport.contract.model import Probability


class Suffix(TextMethod, frozen=True, kw_only=True, tag="suffix"):
    """The most frequent continuation of the longest suffix that was seen before (SuffixDecoding, arXiv 2411.04975).

    Attributes:
        max_spec_factor: most draft tokens for a matched token. With chains of two tokens and more, a match of one
            token, often chance, then proposes nothing.
        min_token_prob: a chain ends before its estimated probability falls below this.
        store_tokens: tokens of earlier outputs that are looked in too, at about half a kilobyte each; the oldest go
            first. 0 for none. It changes how much is accepted, never the text.
    """

    max_spec_factor: Annotated[float, Meta(gt=0.0, le=128.0)] = 1.5
    min_token_prob: Probability = 0.1
    store_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 0

    suits: ClassVar[str] = "free; gains where answers repeat their prompt, themselves or each other"
    engine_keys: ClassVar[frozenset[str]] = frozenset({"store_tokens"})
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--suffix", None, "propose the most frequent continuation of the longest suffix seen before"),
    )

    def describe(self) -> str:
        stored = f", {self.store_tokens:,} tokens of earlier outputs" if self.store_tokens else ""
        return (
            f"suffix, at most {self.max_spec_factor:g} a matched token, down to probability {self.min_token_prob:g}"
            f"{stored}"
        )
