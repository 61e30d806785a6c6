"""N-gram look-up: proposes the tokens that followed an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, cast

from msgspec import Meta

from specexport.contract.methods.base import Flag, TextMethod
from specexport.runtime.prompt import tokens_before_embeddings
from specexport.runtime.proposal import Opening, Proposer, SlotView, TextProposer

MAX_LOOKUP = 32
LookupSize = Annotated[int, Meta(ge=1, le=MAX_LOOKUP)]
"""Length of an n-gram; limited, as every look-up compares that many tokens."""
_MOST = 256
"""Most occurrences that a look-up compares, the latest first: earlier ones would hardly be better, but take time."""


class Ngram(TextMethod, frozen=True, kw_only=True, tag="ngram"):
    """The tokens that followed an earlier occurrence of the text's last tokens, in the prompt or in the output.

    Attributes:
        prompt_lookup_max: most tokens to match; tried first.
        prompt_lookup_min: fewest; None for 2, or ``prompt_lookup_max`` if that is less.
    """

    prompt_lookup_max: LookupSize = 4
    prompt_lookup_min: LookupSize | None = None

    suits = "free; gains where answers repeat their prompt or themselves (edits, summaries, code)"
    flag = Flag("--ngram", None, "propose what followed the last tokens earlier in the text")

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
    """Earlier occurrences of the n-grams of a growing text, from ``shortest`` to ``longest`` tokens.

    It stores only the shortest n-grams, and for each occurrence the one before (hash chains, as in LZ77), so its size
    does not depend on ``longest``. A look-up compares at most ``_MOST`` occurrences with the text's end.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """The end of the latest occurrence of each shortest n-gram."""
        self._before: list[int] = []
        """For an occurrence that ends at an index, the end of the occurrence before; 0 if there is none."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        text = self._tokens
        for token in tokens:
            # N-grams are added only when a token follows them, so that the text's end never matches itself.
            end, before = len(text), 0
            if end >= self._shortest:
                key = tuple(text[end - self._shortest :])
                before, self._latest[key] = self._latest.get(key, 0), end
            self._before.append(before)
            text.append(token)

    def match(self) -> tuple[int, int] | None:
        """The longest n-gram at the text's end that occurred before: n, and the start of its latest continuation."""
        text, size = self._tokens, len(self._tokens)
        longest, start = 0, 0
        end = self._latest.get(tuple(text[size - self._shortest :]), 0) if size >= self._shortest else 0
        for _ in range(_MOST):
            if not end or longest == self._longest:
                break
            if end > longest and text[end - longest - 1] == text[size - longest - 1]:  # it may be longer
                n = self._shortest
                while n < min(self._longest, end) and text[end - n - 1] == text[size - n - 1]:
                    n += 1
                if n > longest:
                    longest, start = n, end
            end = self._before[end]
        return (longest, start) if longest else None

    def continuation(self, start: int, count: int) -> list[int]:
        """``count`` tokens from ``start`` on, as if the text repeated itself beyond its end."""
        period = len(self._tokens) - start
        return [self._tokens[start + at % period] for at in range(count)]


class NgramProposer(TextProposer[NgramIndex]):
    """Proposes the tokens after the latest earlier occurrence of the text's last n tokens, for the largest possible n.

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
