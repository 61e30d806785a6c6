"""Offsets of tokens in their text, for the log-probabilities of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from specexport.runtime.text import TextStream, special_tokens


class PlacedTokens:
    """The texts of an output's tokens with their offsets: the output from an offset on begins with the token's text.

    If several tokens make up a character, one of them has it as its text, and the others are empty. A special token
    that is left out of the text has its name as its text, and no length.

    Args:
        tokenizer: the model's.
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
        """Places the tokens of a prompt that the output follows; ``text`` is the prompt as the answer repeats it."""
        placed = self.add(tokens)
        if "".join(piece for piece, _ in self._visible(tokens, placed)) + self._stream.finish() != text:
            placed = self._by_encoding(text, tokens) or placed
        self._end = len(text)
        self._begin()
        return placed

    def add(self, tokens: Iterable[int]) -> list[tuple[str, int]]:
        """Places further tokens: the text and offset of each."""
        placed = []
        for token in tokens:
            hidden = self._skip and token in self._special
            piece = self._stream.push(token)
            placed.append((self._special[token] if hidden else piece, self._end))
            self._end += len(piece)
        return placed

    def _visible(self, tokens: Sequence[int], placed: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        pairs = zip(tokens, placed, strict=True)
        return [place for token, place in pairs if not (self._skip and token in self._special)]

    def _by_encoding(self, text: str, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Places the tokens of a text that they do not decode to, as some tokenizers change texts; empty if the tokens
        are not the text's.
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
