"""N-gram look-up: proposes the tokens that followed an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, cast

from msgspec import Meta

from specexport.contract.methods.base import Flag, TextMethod
from specexport.runtime.prompt import tokens_before_embeddings
from specexport.runtime.proposal import Opening, Proposer, SlotView, TextProposer

MAX_LOOKUP = 32
LookupSize = Annotated[int, Meta(ge=1, le=MAX_LOOKUP)]
"""Length of an n-gram; limited, as the index has an entry for each token and length."""


class Ngram(TextMethod, frozen=True, kw_only=True, tag="ngram"):
    """The tokens that followed an earlier occurrence of the text's last tokens, in the prompt or in the output.

    Attributes:
        prompt_lookup_max: most tokens to match; tried first.
        prompt_lookup_min: fewest; None for 2, or ``prompt_lookup_max`` if that is less.
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
        """Fewest and most tokens to match."""
        return self.prompt_lookup_min or min(2, self.prompt_lookup_max), self.prompt_lookup_max

    def describe(self) -> str:
        least, most = self.lookup_sizes
        return f"ngram, matches of {most} to {least} tokens"


TRUST = 2
"""Draft tokens per matched token: short matches are often accidental, and every verified token has a cost."""


class NgramIndex:
    """The latest end of every n-gram of a growing text.

    Adding a token takes an entry for each n, whatever the length of the text; so does a look-up.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        text = self._tokens
        for token in tokens:
            # N-grams are added only when a token follows them, so that the text's end never matches itself.
            end = len(text)
            for n in self._sizes:
                if n <= end:
                    self._after[tuple(text[end - n :])] = end
            text.append(token)

    def match(self) -> tuple[int, int] | None:
        """The longest n-gram at the text's end that occurred before: n, and the start of its latest continuation."""
        end = len(self._tokens)
        for n in self._sizes:
            if n <= end and (start := self._after.get(tuple(self._tokens[end - n :]))) is not None:
                return n, start
        return None

    def continuation(self, start: int, count: int) -> list[int]:
        """``count`` tokens of the text from ``start``, repeated periodically beyond its end."""
        period = len(self._tokens) - start
        return [self._tokens[start + at % period] for at in range(count)]


class NgramProposer(TextProposer[NgramIndex]):
    """Proposes the tokens after the latest occurrence of the text's last n tokens, for the largest n that has one.

    A chain has at most ``TRUST`` times n tokens.
    """

    def __init__(self, method: Ngram) -> None:
        super().__init__(method)
        self._method = method

    def ahead(self, view: SlotView) -> Sequence[int]:
        index = self._slots.get(view.slot)
        if index is None:
            method = cast(Ngram, view.options or self._method)
            index = self._slots[view.slot] = NgramIndex(*method.lookup_sizes)
        index.extend(view.tokens[len(index) :])
        if (match := index.match()) is None:
            return ()
        n, start = match
        return tokens_before_embeddings(index.continuation(start, min(TRUST * n, len(view.tree) - 1)))


def open_proposer(method: Ngram, opening: Opening) -> Proposer:
    return NgramProposer(method)
