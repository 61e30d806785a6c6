"""Decodes output tokens as they come, encodes text without blocking other threads, and compares texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
_CHARACTER = 4
"""Most bytes, and so most tokens, of a character in UTF-8."""
_HELD = 16
"""Most tokens without text: more of them are malformed output rather than an unfinished character."""
_BEFORE = 8
"""Number of the prompt's last tokens that are looked at."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""The name of a token that stands for a byte, in SentencePiece's vocabularies."""
_PRINTED = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + at): byte for at, byte in enumerate(sorted({*range(256)}.difference(_PRINTED)))
}
"""The byte of each letter in the names of byte-level tokens, as in GPT-2."""
_SPECIAL_TOKENS: WeakKeyDictionary[Tokenizer, Mapping[int, str]] = WeakKeyDictionary()


class TextStream:
    """Decodes tokens as they come.

    A character is released when it is complete, and the beginning of a possible stop text when it turns out not to be
    one.

    Args:
        stop_after: stop texts count only behind this text.
        before: tokens that the output follows: some decoders drop a space at the beginning of what they decode.
        min_tokens: number of tokens before the first that may complete a stop text.
        skip_special_tokens: leave special tokens out of the text.

    Attributes:
        stopped: whether the output has completed a stop text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        stop_after: str = "",
        before: Sequence[int] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._stop_after, self._passed = stop_after, ""
        self._min_tokens, self._skip = min_tokens, skip_special_tokens
        # Special tokens that are left out of the text; stop texts that contain them are found nevertheless.
        self._hidden = special_tokens(tokenizer) if skip_special_tokens else {}
        self._pushed = 0
        # The last decoded tokens, then tokens without text so far: a token's text may depend on the tokens before it.
        # (The library's DecodeStream fails if a token changes the text of earlier tokens.)
        self._window: list[int] = []
        self._decoded = ""
        self._decoded_count = 0
        self._pending = _PendingText()
        self.stopped = False
        last = [token for token in before[-_BEFORE:] if token >= 0 and token not in self._hidden]
        for start in reversed(range(len(last))):
            text = self._decode(last[start:])
            if text and not text.endswith(_UNFINISHED):
                self._window, self._decoded, self._decoded_count = last[start:], text, len(last) - start
                break

    def push(self, token: int) -> str:
        """Adds a token; returns the text that it releases."""
        self._pushed += 1
        if token in self._hidden:
            return self._release("", self._hidden_text(token))
        self._window.append(token)
        text = self._decode(self._window)
        if len(text) > len(self._decoded) and not text.endswith(_UNFINISHED):
            piece = text[len(self._decoded) :]
            self._window = self._window[self._decoded_count :]
            self._decoded, self._decoded_count = self._decode(self._window), len(self._window)
        elif len(self._window) > self._decoded_count + _HELD:
            # These bytes are no character, but the last ones may become one. The first ones stay too, as a decoder may
            # replace all bytes in a row if any of them is wrong.
            piece = text.removesuffix(_UNFINISHED)[len(self._decoded) :]
            self._window = self._window[: self._decoded_count + _CHARACTER] + self._window[-_CHARACTER:]
            self._decoded = self._decode(self._window).removesuffix(_UNFINISHED)
        else:
            return ""
        return self._release(piece)

    def end(self, token: int) -> str:
        """Adds the token that ends the output, which has no text but may complete a stop text."""
        self._pushed += 1
        return self._release(self._flush(), self._hidden_text(token))

    def finish(self) -> str:
        """Returns the remaining text: pending text, and the decoded bytes of an unfinished character."""
        text = self._release(self._flush())
        if not self.stopped:
            text += self._pending.take(len(self._pending))
        return text

    def _hidden_text(self, token: int) -> str:
        """A special token's text, if a stop text contains it."""
        text = special_tokens(self._tokenizer).get(token, "")
        return text if any(text in stop for stop in self._stop) else ""

    def _flush(self) -> str:
        """Empties the window; returns its text that is not released yet."""
        text = self._decode(self._window)[len(self._decoded) :]
        self._window, self._decoded, self._decoded_count = [], "", 0
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text

    def _release(self, piece: str, hidden: str = "") -> str:
        """Adds a piece, and perhaps the text of a hidden special token; returns the text that can be released."""
        pending, free = self._pending, ""
        if self._stop_after:
            self._passed += piece
            before, found, rest = self._passed.partition(self._stop_after)
            if not found:
                self._passed = before[-len(self._stop_after) :]
                return piece
            self._stop_after = ""
            free, piece = piece[: len(piece) - len(rest)], rest
        pending.add(piece, hidden)
        stops = [at for at in map(pending.find, self._stop) if at >= 0]
        if stops and self._pushed > self._min_tokens:
            self.stopped = True
            text = pending.take(min(stops))
            self._pending = _PendingText()
            return free + text
        return free + pending.take(min((pending.beginning(stop) for stop in self._stop), default=len(pending)))


def special_tokens(tokenizer: Tokenizer) -> Mapping[int, str]:
    """The texts of a tokenizer's special tokens, cached, as a query for thousands takes milliseconds."""
    if tokenizer not in _SPECIAL_TOKENS:
        added = tokenizer.get_added_tokens_decoder().items()
        _SPECIAL_TOKENS[tokenizer] = {token: entry.content for token, entry in added if entry.special}
    return _SPECIAL_TOKENS[tokenizer]


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """The bytes of a token whose name spells them, as it may hold a part of a character; None for other names."""
    name = tokenizer.id_to_token(token) or ""
    if match := _BYTE_TOKEN.fullmatch(name):
        return bytes.fromhex(match[1])
    return bytes(_BYTES[letter] for letter in name) if _BYTES.keys() >= {*name} else None


class _PendingText:
    """Text that is held back. Stop texts are found in it with and without hidden special tokens."""

    def __init__(self) -> None:
        self._whole = ""
        self._visible: list[int] = []
        """Indices of the visible characters."""

    def __len__(self) -> int:
        return len(self._whole)

    def add(self, text: str, hidden: str) -> None:
        """Appends text, then hidden text."""
        self._visible += range(len(self._whole), len(self._whole) + len(text))
        self._whole += text + hidden

    def find(self, stop: str) -> int:
        """The index where a stop text starts; -1 if it is absent."""
        return min((places[at] for text, places in self._readings() if (at := text.find(stop)) >= 0), default=-1)

    def beginning(self, stop: str) -> int:
        """The index where an incomplete stop text may start; the text's end if there is none."""
        begun = ((places, overlap(text, stop)) for text, places in self._readings())
        return min((places[-length] for places, length in begun if length), default=len(self._whole))

    def take(self, end: int) -> str:
        """Removes the text up to ``end``; returns its visible part."""
        text = "".join(self._whole[at] for at in self._visible if at < end)
        self._visible = [at - end for at in self._visible if at >= end]
        self._whole = self._whole[end:]
        return text

    def _readings(self) -> Iterator[tuple[str, Sequence[int]]]:
        """The whole text and, if it differs, the visible text, each with its characters' indices in the whole."""
        yield self._whole, range(len(self._whole))
        if len(self._visible) < len(self._whole):
            yield "".join(self._whole[at] for at in self._visible), self._visible


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def decoder_fault(tokenizer: Tokenizer) -> str | None:
    """Why a tokenizer cannot decode every text; None if it can."""
    if tokenizer.decoder is None:
        return None
    stated = json.loads(tokenizer.decoder.__getstate__())
    strips = (part for part in stated.get("decoders", [stated]) if part["type"] == "Strip" and part["stop"])
    if (strip := next(strips, None)) is None:
        return None
    return f"its decoder strips the end of texts (Strip, stop={strip['stop']}), which fails for empty tokens; set 0"


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Encodes a text, as a batch of one: ``Tokenizer.encode`` would hold Python's lock, for seconds with megabytes."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two texts share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the usual case
        return length
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
