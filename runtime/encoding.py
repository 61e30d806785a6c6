"""Tokenizes text without blocking other threads, and bounds how many tokens a text must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

_COMPOSED = 4
"""Most code points that canonical composition combines: the length of the longest full decomposition."""
_SHRINK = {"Prepend": 1, "Lowercase": 1, "ByteLevel": 1, "NFD": 1, "NFKD": 1, "NFC": _COMPOSED, "NFKC": _COMPOSED}
"""Normalizers, and how many times shorter they may make a text; others may remove any amount of it."""
_KEEPING = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts")
"""Pre-tokenizers that remove nothing, unless their ``behavior`` says so."""


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """A text's tokens.

    As a batch of one: ``Tokenizer.encode`` would hold Python's lock until it is done, for seconds with megabytes.
    """
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def characters_per_token(tokenizer: Tokenizer) -> int | None:
    """Most characters of a text that one token can stand for; None if there is no bound.

    There is one if no text is lost: no normalizer, pre-tokenizer or added token swallows text of any length, and
    characters outside the vocabulary become bytes or an unknown token each.
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
    if not _covers_all_text(tokenizer, vocabulary):
        return None
    return shrink * max(map(len, vocabulary))


def _covers_all_text(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Whether every character has tokens."""
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


def _parts(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """The components of a normalizer or pre-tokenizer, as a tokenizer's file describes them."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()), key)


def _flat(part: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if part["type"] == "Sequence":
        for inner in part[key]:
            yield from _flat(inner, key)
    else:
        yield part
