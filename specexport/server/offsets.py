"""Where tokens begin in the text that they make, for the log-probabilities of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from specexport.runtime.text import TextStream, special_tokens


class PlacedTokens:
    """Texts of an output's tokens, and where each begins: the text from there on begins with it.

    Of a character of several tokens one has the whole, and the others are empty. A special token that is
    left out of the text has its name, and takes no place.

    Args:
        tokenizer: decodes.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._special = special_tokens(tokenizer)
        self._end = 0
        self._begin()

    def _begin(self) -> None:
        self._stream = TextStream(self._tokenizer, skip_special_tokens=self._skip)

    def prompt(self, text: str, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """The tokens of a prompt, which the output follows; ``text`` is what the answer repeats of it."""
        placed = self.add(tokens)
        if "".join(piece for piece, _ in self._shown(tokens, placed)) + self._stream.finish() != text:
            placed = self._by_encoding(text, tokens) or placed
        self._end = len(text)
        self._begin()
        return placed

    def add(self, tokens: Iterable[int]) -> list[tuple[str, int]]:
        """Further tokens: the text of each, and where it begins."""
        placed = []
        for token in tokens:
            hidden = self._skip and token in self._special
            piece = self._stream.push(token)
            placed.append((self._special[token] if hidden else piece, self._end))
            self._end += len(piece)
        return placed

    def _shown(self, tokens: Sequence[int], placed: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        pairs = zip(tokens, placed, strict=True)
        return [one for token, one in pairs if not (self._skip and token in self._special)]

    def _by_encoding(self, text: str, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """The same of a text that is not what its tokens decode to, as some tokenizers change texts; empty where the
        tokens are not the text's.
        """
        for add_special_tokens in (True, False):
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            if list(encoding.ids) == list(tokens):
                break
        else:
            return []
        placed, end = [], 0
        for token, (_, after) in zip(tokens, encoding.offsets, strict=True):
            after = max(end, after)
            hidden = after == end and token in self._special
            placed.append((self._special[token] if hidden else text[end:after], end))
            end = after
        return placed
