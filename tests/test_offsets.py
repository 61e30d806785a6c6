"""Where the tokens of a completion begin: the text from there on begins with the token, whatever the tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specexport.runtime.text import TextStream
from specexport.server.completions import PlacedTokens
from tests.test_text import byte_fallback, byte_level, hard_texts

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
def test_a_text_begins_with_each_token_where_that_begins(
    tokenizer: Tokenizer, prompt: str, output: list[int], skip: bool
) -> None:
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
def test_a_prompts_tokens_make_up_the_prompt(tokenizer: Tokenizer) -> None:
    for prompt in ("one 🙂 two", "Hello  WORLD", " hello", "é", ""):
        pieces = PlacedTokens(tokenizer, True).prompt(prompt, tokenizer.encode(prompt).ids)
        assert "".join(piece for piece, _ in pieces if piece != START) == prompt


def test_a_character_of_several_tokens_has_one_place() -> None:
    tokenizer = TOKENIZERS["byte_fallback, start"]
    pieces = PlacedTokens(tokenizer, True).prompt("h🙂 he", tokenizer.encode("h🙂 he").ids)
    # The tokenizer puts a space before the text, which is not in it.
    character = [("", 1), ("", 1), ("", 1), ("🙂", 1)]
    assert pieces == [(START, 0), ("", 0), ("h", 0), *character, (" ", 2), ("he", 3)]


def test_a_special_token_in_the_text_has_its_place() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.token_to_id(END)
    h = tokenizer.token_to_id("h")
    assert PlacedTokens(tokenizer, False).add([h, end, h]) == [("h", 0), (END, 1), ("h", 6)]
    assert PlacedTokens(tokenizer, True).add([h, end, h]) == [("h", 0), (END, 1), ("h", 1)]
    # A prompt is repeated as it was sent.
    assert PlacedTokens(tokenizer, True).prompt(f"h{END}h", [h, end, h]) == [("h", 0), (END, 1), ("h", 6)]
