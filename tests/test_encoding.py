"""How many characters a token can stand for: a bound that is never wrong, or none."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from specexport.runtime.text import characters_per_token, encode_text

BYTES = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def bytewise(*merged: str) -> Tokenizer:
    """Byte-level BPE whose longer tokens are these texts, each merged letter by letter."""
    vocabulary, merges = dict(BYTES), []
    for word in merged:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    built = Tokenizer(models.BPE(vocabulary, merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return built


def fallback() -> Tokenizer:
    """As of Llama 2 and Gemma: spaces are visible, and what is not known is said in bytes."""
    vocabulary = {**FALLBACK, "▁": 256, "a": 257, "▁a": 258, "▁aa": 259}
    merges = [("▁", "a"), ("▁a", "a")]
    built = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="a"))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return built


def composing() -> Tokenizer:
    """As of Qwen: four characters may become one before they are read."""
    built = bytewise("aaaa", "Ġaa")
    built.normalizer = normalizers.NFC()
    built.add_special_tokens(["<|end|>"])
    return built


def unknown(fused: bool) -> Tokenizer:
    return Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=fused))


BOUNDED = {"bytes": bytewise("aaaa", "Ġaa"), "fallback": fallback(), "composing": composing(), "unk": unknown(False)}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(name: str) -> None:
    tokenizer = BOUNDED[name]
    most = characters_per_token(tokenizer)
    assert most is not None
    pieces = st.sampled_from(
        ["a", "aaaa", " ", "  \n", "é", "e\u0301", "\u1f82", "<|end|>", "\x00", "\U0001f600", "각"]
    )

    @given(st.lists(pieces | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join))
    def holds(text: str) -> None:
        for form in (text, normalizers.NFD().normalize_str(text)):
            assert len(form) <= most * len(encode_text(tokenizer, form, add_special_tokens=False))

    holds()


def test_the_bound_is_that_of_the_longest_token() -> None:
    assert characters_per_token(bytewise("abcdefgh")) == 8
    assert characters_per_token(composing()) == 4 * len("<|end|>")


def swallowing() -> dict[str, Tokenizer]:
    """Tokenizers that make one token, or none, of a text of any length."""
    built = {name: bytewise("aa") for name in ("strip", "spaces", "removed", "lstrip", "truncated")}
    built["strip"].normalizer = normalizers.Strip()
    built["spaces"].normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" +"), " ")])
    built["removed"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built["lstrip"].add_special_tokens([AddedToken("<m>", lstrip=True)])
    built["truncated"].enable_truncation(1)
    built["fused"] = unknown(True)
    built["dropped"] = Tokenizer(models.BPE({"a": 0}, []))
    built["words"] = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return built


@pytest.mark.parametrize("name", swallowing())
def test_no_bound_if_tokens_remove_text(name: str) -> None:
    tokenizer = swallowing()[name]
    assert characters_per_token(tokenizer) is None
    text = " " * 1000 + ("<m>" if name == "lstrip" else "")
    assert len(encode_text(tokenizer, text)) <= 1


def test_others_run_while_a_long_text_is_read() -> None:
    """Counted is how often another thread comes to its turn, which it never does while Python's lock is held."""
    tokenizer, done, turns = bytewise("aaaa"), threading.Event(), 0
    reader = threading.Thread(target=lambda: (encode_text(tokenizer, "one two " * 200_000), done.set()))
    reader.start()
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    reader.join(60)
    assert turns > 50


def test_tokens_are_those_of_the_library() -> None:
    for tokenizer in BOUNDED.values():
        assert encode_text(tokenizer, "a aaaa é\n") == tokenizer.encode("a aaaa é\n").ids
