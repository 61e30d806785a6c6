"""Output tokens into output text: characters that span tokens, and stop texts that span chunks."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"


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
        self._pushed = 0
        # The tokens whose text is not given out yet, after those last given out: how a token reads may depend on what
        # is before it. (The library's own DecodeStream fails where a token changes how earlier ones read.)
        self._window: list[int] = []
        self._known = ""
        self._given = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token; returns the text that can be given out. Sets :attr:`stopped` if a stop text was completed."""
        self._window.append(token)
        self._pushed += 1
        text = self._decode(self._window)
        if len(text) <= len(self._known) or text.endswith(_UNFINISHED):
            return ""
        piece = text[len(self._known) :]
        self._window = self._window[self._given :]
        self._known, self._given = self._decode(self._window), len(self._window)
        return self._release(piece)

    def finish(self) -> str:
        """The rest: text held back, and what the bytes of an unfinished character decode to."""
        text = self._release(self._decode(self._window)[len(self._known) :])
        self._window, self._known, self._given = [], "", 0
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found and self._pushed > self._least:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
