"""Text into tokens where others run beside it: without holding Python's lock, and not at all where it cannot fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

_COMPOSED = 4
"""Most code points that canonical composition makes one of: the longest full canonical decomposition there is."""
_SHRINK = {"Prepend": 1, "Lowercase": 1, "ByteLevel": 1, "NFD": 1, "NFKD": 1, "NFC": _COMPOSED, "NFKC": _COMPOSED}
"""Normalizers that keep text at least this many times shorter than it was; others may remove any amount of it."""
_KEEPING = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts")
"""Pre-tokenizers that remove nothing, unless their ``behavior`` is to."""


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """A text's tokens.

    As a batch of one: ``Tokenizer.encode`` would hold Python's lock until it is done, for seconds with megabytes.
    """
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def characters_per_token(tokenizer: Tokenizer) -> int | None:
    """Most characters of a text that one token of it can stand for; None where there is no such number.

    There is one if nothing of a text is lost on the way: no normalizer, pre-tokenizer or added token swallows text of
    any length, and what the vocabulary lacks is said byte by byte or one unknown token a character.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.truncation is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    shrink = 1
    for part in _parts(tokenizer.normalizer, "normalizers"):
        if part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"]) < len(pattern):
                return None
        elif part["type"] in _SHRINK:
            shrink *= _SHRINK[part["type"]]
        else:
            return None
    for part in _parts(tokenizer.pre_tokenizer, "pretokenizers"):
        if part["type"] not in _KEEPING or part.get("behavior") == "Removed":
            return None
    vocabulary = tokenizer.get_vocab()
    if not _says_everything(tokenizer, vocabulary):
        return None
    return shrink * max(map(len, vocabulary))


def _says_everything(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Whether there are tokens for every character."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    if model.unk_token in vocabulary and not model.fuse_unk:
        return True
    parts = (*_parts(tokenizer.normalizer, "normalizers"), *_parts(tokenizer.pre_tokenizer, "pretokenizers"))
    bytewise = any(part["type"] == "ByteLevel" for part in parts)
    return bytewise and all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())


def _parts(component: Any, of_several: str) -> Iterator[dict[str, Any]]:
    """What a normalizer or pre-tokenizer consists of, as a tokenizer's file says it."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()), of_several)


def _flat(part: dict[str, Any], of_several: str) -> Iterator[dict[str, Any]]:
    if part["type"] == "Sequence":
        for one in part[of_several]:
            yield from _flat(one, of_several)
    else:
        yield part
