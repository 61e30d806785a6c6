"""Speculation by n-gram prompt lookup."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from specexport.contract.methods.base import Flag, TextMethod

MAX_LOOKUP = 32
LookupSize = Annotated[int, Meta(ge=1, le=MAX_LOOKUP)]
"""Tokens of an n-gram; bounded, as every token of a text is entered once for each size."""


class Ngram(TextMethod, frozen=True, kw_only=True, tag="ngram"):
    """What followed the text's last tokens when they came before, in the prompt or in the output.

    Attributes:
        prompt_lookup_max: most tokens that are matched; tried first.
        prompt_lookup_min: fewest; None for 2, or ``prompt_lookup_max`` where that is less.
    """

    prompt_lookup_max: LookupSize = 4
    prompt_lookup_min: LookupSize | None = None

    suits: ClassVar[str] = "free; gains where answers repeat their prompt or themselves (edits, summaries, code)"
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--ngram", None, "propose what followed the last tokens earlier in the text"),
    )

    def __post_init__(self) -> None:
        if self.prompt_lookup_min is not None and self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}; expected 1 to prompt_lookup_max, which is "
                f"{self.prompt_lookup_max}"
            )

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """Fewest and most tokens that are matched."""
        return self.prompt_lookup_min or min(2, self.prompt_lookup_max), self.prompt_lookup_max

    def describe(self) -> str:
        least, most = self.lookup_sizes
        return f"ngram, matches of {most} to {least} tokens"
