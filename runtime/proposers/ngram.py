"""N-gram prompt lookup: what followed the text's last tokens when they came before, in the prompt or in the output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specexport.contract.methods.ngram import Ngram
from specexport.runtime.embeds import tokens_before_embeddings
from specexport.runtime.proposal import Chains, Proposal, Proposer, SlotView, moved
from specexport.runtime.proposers.opening import Opening

TRUST = 2
"""Draft tokens a matched token is worth: a short match is often chance, and a step pays for every token it verifies."""


class NgramIndex:
    """Where every n-gram of a growing text ended last.

    A token costs one entry for each n, whatever the length of the text; so does a lookup.

    Args:
        shortest: the smallest n.
        longest: the largest n.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text."""
        text = self._tokens
        for token in tokens:
            # What ends here is entered once something follows it, so that the text's end never finds itself.
            end = len(text)
            for n in self._sizes:
                if n <= end:
                    self._after[tuple(text[end - n :])] = end
            text.append(token)

    def match(self) -> tuple[int, int] | None:
        """The longest n-gram at the text's end that came before: n, and where its latest continuation starts."""
        end = len(self._tokens)
        for n in self._sizes:
            if n <= end and (start := self._after.get(tuple(self._tokens[end - n :]))) is not None:
                return n, start
        return None

    def continuation(self, start: int, count: int) -> list[int]:
        """``count`` tokens from a place in the text on; past its end it goes on as a text of that period would."""
        period = len(self._tokens) - start
        return [self._tokens[start + at % period] for at in range(count)]


class NgramProposer(Proposer):
    """Proposes what followed the latest occurrence of the text's last n tokens, for the largest n that has one.

    Tokens are chosen without drawing (q = 1). The chain is the largest the bundle verifies that is no longer than the
    request's and than ``TRUST`` times n. Where nothing matches, the step is a plain one.

    Args:
        method: the method.
    """

    def __init__(self, method: Ngram) -> None:
        self._method = method
        self._chains = Chains(method.token_trees())
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        made = {}
        for view in views:
            index = self._indexes.get(view.slot)
            if index is None:
                method = view.options if isinstance(view.options, Ngram) else self._method
                index = NgramIndex(*method.lookup_sizes)
                self._indexes[view.slot] = index
            index.extend(view.tokens[len(index) :])
            if (found := index.match()) is None:
                continue
            n, start = found
            ahead = tokens_before_embeddings(index.continuation(start, min(TRUST * n, len(view.tree) - 1)))
            tree = self._chains.within(view.tree, len(ahead))
            if tree is not None:
                tokens = np.array(ahead[: len(tree) - 1], np.int64)
                made[view.slot] = Proposal(tokens, tree, None, tokens[:, None])
        return made

    def move(self, source: int, to: int) -> None:
        moved(self._indexes, source, to)

    def release(self, slot: int) -> None:
        self._indexes.pop(slot, None)


def open_proposer(method: Ngram, opening: Opening) -> Proposer:
    """See :func:`specexport.runtime.proposers.opening.open_proposer`."""
    return NgramProposer(method)
