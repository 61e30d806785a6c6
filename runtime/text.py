"""Output tokens into output text: characters that span tokens, and stop texts that span chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
_SPECIAL_TOKENS: WeakKeyDictionary[Tokenizer, Mapping[int, str]] = WeakKeyDictionary()


class TextStream:
    """Turns tokens into text as they come.

    A character is given out once all its bytes are there, and text that may be the beginning of a stop text only once
    it is clear that it is not.

    Args:
        tokenizer: decodes.
        stop: texts that end the output.
        least: tokens before the one that may complete a stop text.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, least: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._least, self._skip = least, skip_special_tokens
        # Special tokens that stop texts hold: their text is looked at where it is not given out.
        self._hidden: dict[int, str] = {}
        if stop:
            known = special_tokens(tokenizer).items()
            self._hidden = {token: text for token, text in known if any(text in one for one in stop)}
        self._pushed = 0
        # The tokens whose text is not given out yet, after those last given out: how a token reads may depend on what
        # is before it. (The library's own DecodeStream fails where a token changes how earlier ones read.)
        self._window: list[int] = []
        self._known = ""
        self._given = 0
        self._held = _Held()
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token; returns the text that can be given out. Sets :attr:`stopped` if a stop text was completed."""
        self._window.append(token)
        self._pushed += 1
        text = self._decode(self._window)
        hidden = self._hidden.get(token, "") if self._skip else ""
        if len(text) <= len(self._known) or text.endswith(_UNFINISHED):
            return self._release("", hidden) if hidden else ""
        piece = text[len(self._known) :]
        self._window = self._window[self._given :]
        self._known, self._given = self._decode(self._window), len(self._window)
        return self._release(piece, hidden)

    def end(self, token: int) -> str:
        """Adds the token that ends the output, and is no part of its text, though it may complete a stop text."""
        self._pushed += 1
        return self._release(self._rest(), self._hidden.get(token, ""))

    def finish(self) -> str:
        """The rest: text held back, and what the bytes of an unfinished character decode to."""
        text = self._release(self._rest())
        if not self.stopped:
            text += self._held.take(len(self._held))
        return text

    def _rest(self) -> str:
        """What the window's tokens decode to that is not given out yet; nothing is left there."""
        rest = self._decode(self._window)[len(self._known) :]
        self._window, self._known, self._given = [], "", 0
        return rest

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text

    def _release(self, piece: str, hidden: str = "") -> str:
        """What can be given out of the text held back and a piece, behind which a special token may stand."""
        held = self._held
        held.add(piece, hidden)
        found = [at for at in map(held.find, self._stop) if at >= 0]
        if found and self._pushed > self._least:
            self.stopped = True
            text = held.take(min(found))
            held.clear()
            return text
        return held.take(min((held.beginning(stop) for stop in self._stop), default=len(held)))


def special_tokens(tokenizer: Tokenizer) -> Mapping[int, str]:
    """The texts of a tokenizer's special tokens; asking it takes milliseconds where there are thousands."""
    if tokenizer not in _SPECIAL_TOKENS:
        added = tokenizer.get_added_tokens_decoder().items()
        _SPECIAL_TOKENS[tokenizer] = {token: one.content for token, one in added if one.special}
    return _SPECIAL_TOKENS[tokenizer]


class _Held:
    """Text held back. A stop text may be in the text that is given out, or in that with its hidden special tokens."""

    def __init__(self) -> None:
        self._whole = ""
        self._shown: list[int] = []
        """Where the characters to be given out are."""

    def __len__(self) -> int:
        return len(self._whole)

    def add(self, text: str, hidden: str) -> None:
        """Appends text, and hidden text behind it."""
        self._shown += range(len(self._whole), len(self._whole) + len(text))
        self._whole += text + hidden

    def find(self, stop: str) -> int:
        """Where a stop text begins; -1 where it is not."""
        at = self._whole.find(stop)
        if self._text_is_whole:
            return at
        seen = self._text.find(stop)
        places = [at] * (at >= 0) + ([self._shown[seen]] if seen >= 0 else [])
        return min(places, default=-1)

    def beginning(self, stop: str) -> int:
        """Where a stop text may begin that is not complete yet; the end if nowhere."""
        at = len(self._whole) - _overlap(self._whole, stop)
        if self._text_is_whole or not (seen := _overlap(self._text, stop)):
            return at
        return min(at, self._shown[-seen])

    def take(self, end: int) -> str:
        """Removes the text up to a place; what of it is to be given out."""
        text = "".join(self._whole[at] for at in self._shown if at < end)
        self._shown = [at - end for at in self._shown if at >= end]
        self._whole = self._whole[end:]
        return text

    def clear(self) -> None:
        """Removes all."""
        self._whole, self._shown = "", []

    @property
    def _text_is_whole(self) -> bool:
        return len(self._shown) == len(self._whole)

    @property
    def _text(self) -> str:
        return "".join(self._whole[at] for at in self._shown)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
