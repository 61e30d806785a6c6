"""Texts into tokens, long ones refused early, and where in a text the tokens of a completion begin."""

import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specexport import frontend as frontends
from specexport.contract.errors import ContextLengthError
from specexport.frontend import Frontend
from specexport.runtime.text import TextStream, encode_text
from specexport.server.completions import PlacedTokens
from tests.test_text import byte_fallback, byte_level, hard_texts

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
def test_of_a_text_that_is_too_long_the_beginning_alone_is_read(name, spy):
    read = spy(frontends, "encode_text", lambda tokenizer, text, **_: len(text))
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
def test_a_text_of_which_little_remains_is_read_at_any_length(name):
    tokenizer = swallowing()[name]
    text = " " * 1000 + ("<m>" if name == "lstrip" else "")
    assert len(frontend(tokenizer).encode(text)) <= 1
    if name in ("strip", "spaces", "removed"):
        with pytest.raises(ContextLengthError, match="its first 2048 characters are"):
            frontend(tokenizer).encode(text + "a b " * 1000)


def test_others_run_while_a_long_text_is_read():
    """Counted is how often another thread comes to its turn, which it never does while Python's lock is held."""
    tokenizer, done, turns = bytewise("aaaa"), threading.Event(), 0
    reader = threading.Thread(target=lambda: (encode_text(tokenizer, "one two " * 200_000), done.set()))
    reader.start()
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    reader.join(60)
    assert turns > 50


def test_tokens_are_those_of_the_library():
    for tokenizer in BOUNDED.values():
        assert encode_text(tokenizer, "a aaaa é\n") == tokenizer.encode("a aaaa é\n").ids


# --- where tokens begin -----------------------------------------------------------------------------------------------


START, END = "<start>", "<end>"


def with_start(tokenizer: Tokenizer) -> Tokenizer:
    """With a start token, as Llama's have."""
    tokenizer.add_special_tokens([AddedToken(START, special=True)])
    pair = (START, tokenizer.token_to_id(START))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[pair])
    return tokenizer


def lowercase() -> Tokenizer:
    """One that changes texts: they cannot be told from its tokens, and it has no decoder."""
    vocab = {letter: at for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}
    built = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    built.normalizer = normalizers.Lowercase()
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    built.decoder = decoders.Fuse()
    return with_start(built)


def trimming() -> Tokenizer:
    """GPT-2's and Qwen's: the encoding's offsets leave spaces out."""
    built = byte_level()
    built.post_processor = processors.ByteLevel(trim_offsets=True)
    return built


TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_level, start": with_start(byte_level()),
    "byte_level, trimmed": trimming(),
    "byte_fallback": byte_fallback(),
    "byte_fallback, start": with_start(byte_fallback()),
    "lowercase": lowercase(),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
tokens_of_any_kind = st.lists(st.integers(0, 260), max_size=30)


def spoken(tokenizer: Tokenizer, before: list[int], tokens: list[int], skip: bool) -> str:
    """The text of an output, as an engine gives it out."""
    stream = TextStream(tokenizer, before=before, skip_special_tokens=skip)
    return "".join([*map(stream.push, tokens), stream.finish()])


@every_tokenizer
@given(hard_texts, tokens_of_any_kind, st.booleans())
def test_a_text_begins_with_each_token_where_that_begins(tokenizer, prompt, output, skip):
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    output = [token % known for token in output]
    tokens = tokenizer.encode(prompt).ids
    text = prompt + spoken(tokenizer, tokens, output, skip)
    placed = PlacedTokens(tokenizer, skip)
    pieces = [*placed.prompt(prompt, tokens), *placed.add(output)]
    assert len(pieces) == len(tokens) + len(output)
    for token, (piece, at) in zip([*tokens, *output], pieces, strict=True):
        hidden = piece in (START, END) and (skip or token == tokens[0])
        assert hidden or text[at:].startswith(piece)
    assert [at for _, at in pieces] == sorted(at for _, at in pieces)


@every_tokenizer
def test_a_prompts_tokens_make_up_the_prompt(tokenizer):
    for prompt in ("one 🙂 two", "Hello  WORLD", " hello", "é", ""):
        pieces = PlacedTokens(tokenizer, True).prompt(prompt, tokenizer.encode(prompt).ids)
        assert "".join(piece for piece, _ in pieces if piece != START) == prompt


def test_a_character_of_several_tokens_has_one_place():
    tokenizer = TOKENIZERS["byte_fallback, start"]
    pieces = PlacedTokens(tokenizer, True).prompt("h🙂 he", tokenizer.encode("h🙂 he").ids)
    # The tokenizer puts a space before the text, which is not in it.
    character = [("", 1), ("", 1), ("", 1), ("🙂", 1)]
    assert pieces == [(START, 0), ("", 0), ("h", 0), *character, (" ", 2), ("he", 3)]


def test_a_special_token_in_the_text_has_its_place():
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.token_to_id(END)
    h = tokenizer.token_to_id("h")
    assert PlacedTokens(tokenizer, False).add([h, end, h]) == [("h", 0), (END, 1), ("h", 6)]
    assert PlacedTokens(tokenizer, True).add([h, end, h]) == [("h", 0), (END, 1), ("h", 1)]
    # A prompt is repeated as it was sent.
    assert PlacedTokens(tokenizer, True).prompt(f"h{END}h", [h, end, h]) == [("h", 0), (END, 1), ("h", 6)]
