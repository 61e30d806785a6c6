"""Texts into tokens: long ones are refused early, and other threads run meanwhile."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from specexport.contract.errors import ContextLengthError
from specexport.frontend import Frontend
from specexport.runtime.text import encode_text

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


def frontend(tokenizer: Tokenizer) -> Frontend:
    return Frontend(SimpleNamespace(tokenizer=tokenizer, max_model_len=8), "model")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BOUNDED)
def test_of_a_text_that_is_too_long_the_beginning_alone_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(
        "specexport.frontend.encode_text",
        lambda tokenizer, text, **options: read.append(len(text)) or encode_text(tokenizer, text, **options),
    )
    with pytest.raises(ContextLengthError, match="holds 8 tokens, and its first 128 characters are"):
        frontend(BOUNDED[name]).encode("a b " * 25_000)
    assert read == [127]


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
def test_a_text_of_which_little_remains_is_read_at_any_length(name: str) -> None:
    tokenizer = swallowing()[name]
    text = " " * 1000 + ("<m>" if name == "lstrip" else "")
    assert len(frontend(tokenizer).encode(text)) <= 1
    if name in ("strip", "spaces", "removed"):
        with pytest.raises(ContextLengthError, match="its first 2048 characters are"):
            frontend(tokenizer).encode(text + "a b " * 1000)


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
