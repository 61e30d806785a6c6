"""Tokens into text: what is given out as tokens come, put together, is the text of all of them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specexport.runtime.text import TextStream, token_bytes

HARD = "é日本語😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200f\ufffd\n"


def byte_level() -> Tokenizer:
    """GPT-2's way: every byte is a token of its own, or part of a longer one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "he", "ll", "Ġw", "Ã©", "ðŁ", "ðŁĺ", "Ģ!"]
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ģ", "!")]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's way: tokens hold characters, bytes stand in for characters it does not know."""
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "!", "é", "▁w", "he", "ll"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "w"), ("h", "e"), ("l", "l")]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
hard_texts = st.text(st.one_of(st.sampled_from(HARD + "hello world!"), st.characters(codec="utf-8")), max_size=30)


def streamed(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """What each token gives out, then the rest; and whether a stop text ended it."""
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream.stopped


# --- characters that span tokens --------------------------------------------------------------------------------------


@every_tokenizer
@given(hard_texts)
def test_pieces_make_up_the_text(tokenizer, text):
    tokens = tokenizer.encode(text).ids
    pieces, stopped = streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert tokenizer is not TOKENIZERS["byte_level"] or "".join(pieces) == text
    assert not stopped


@every_tokenizer
def test_bytes_of_tokens_make_up_a_character(tokenizer):
    tokens = tokenizer.encode("日😀", add_special_tokens=False).ids
    pieces = [token_bytes(tokenizer, token) for token in tokens]
    assert b"".join(piece for piece in pieces if piece is not None) == "日😀".encode()  # ▁ is no bytes


@every_tokenizer
@given(st.text("abc", max_size=30), st.sampled_from(["a", "bc", "cab"]))
def test_stop_texts_count_behind_a_text(tokenizer, text, after):
    tokens = tokenizer.encode(text).ids
    stream = TextStream(tokenizer, ["ab"], stop_after=after)
    pieces = [stream.push(token) for token in tokens if not stream.stopped]
    before, found, rest = tokenizer.decode(tokens).partition(after)
    assert "".join([*pieces, stream.finish()]) == before + found + rest.partition("ab")[0]
    assert stream.stopped == ("ab" in rest)


class Counting:
    """A tokenizer that records the most tokens it had to decode at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.most = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        self.most = max(self.most, len(tokens))
        return str(self._tokenizer.decode(tokens, **options))


@pytest.mark.parametrize("run", ["<bytes>", "<end>"])
@every_tokenizer
def test_a_long_run_without_characters_costs_as_much_a_token_as_a_short_one(tokenizer, run):
    empty = tokenizer.token_to_id("<end>" if run == "<end>" else "<0xA0>" if "<0xA0>" in tokenizer.get_vocab() else "ł")
    tokens = [*tokenizer.encode("hello").ids, *[empty] * 1000, *tokenizer.encode("hello").ids]
    counting = Counting(tokenizer)
    stream = TextStream(counting, ["lo!"])
    pieces = [*map(stream.push, tokens), stream.finish()]
    assert counting.most < 50
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert max(map(len, pieces)) < 50


@every_tokenizer
@given(hard_texts, st.integers(0, 60))
def test_a_text_cut_in_the_middle_of_a_character_keeps_what_was_whole(tokenizer, text, length):
    tokens = tokenizer.encode(text).ids
    everything = tokenizer.decode(tokens)
    beginnings = [tokenizer.decode(tokens[:count]) for count in range(min(length, len(tokens)) + 1)]
    whole = max((beginning for beginning in beginnings if everything.startswith(beginning)), key=len)
    given_out = "".join(streamed(tokenizer, tokens[:length])[0])
    assert given_out.startswith(whole)
    assert everything.startswith(given_out.rstrip("\ufffd"))


@every_tokenizer
def test_text_is_released_once_a_character_is_complete(tokenizer):
    tokens = tokenizer.encode("😀").ids
    assert len(tokens) > 1
    pieces, _ = streamed(tokenizer, tokens)
    assert [piece for piece in pieces if piece] == ["😀"]
    assert pieces.index("😀") == len(tokens) - 1


@every_tokenizer
def test_text_comes_as_soon_as_it_is_known(tokenizer):
    tokens = tokenizer.encode("hello world!").ids
    pieces, _ = streamed(tokenizer, tokens)
    for count in range(1, len(tokens) + 1):
        assert "".join(pieces[:count]) == tokenizer.decode(tokens[:count])
    assert pieces[-1] == ""


def test_a_token_may_end_one_character_and_hold_the_next():
    tokenizer = TOKENIZERS["byte_level"]
    tokens = [tokenizer.token_to_id(piece) for piece in ("ðŁĺ", "Ģ!", "he")]
    assert streamed(tokenizer, tokens)[0] == ["", "😀!", "he", ""]


@given(st.lists(st.integers(0, 263), max_size=40))
def test_any_byte_level_tokens_read_as_they_decode(tokens):
    tokenizer = TOKENIZERS["byte_level"]
    pieces, _ = streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)


@given(st.lists(st.integers(0, 270), max_size=40))
def test_stray_bytes_do_not_end_the_stream(tokens):
    """One more stray byte changes how those before it decode, which may have been given out; the text goes on."""
    tokenizer = TOKENIZERS["byte_fallback"]
    end = tokenizer.encode(" hello").ids
    pieces, _ = streamed(tokenizer, [*tokens, *end, *end])
    assert "".join(pieces).endswith("hello hello")


@every_tokenizer
def test_special_tokens_have_no_text(tokenizer):
    end = tokenizer.token_to_id("<end>")
    tokens = tokenizer.encode("hello world!").ids
    pieces, _ = streamed(tokenizer, [end, *tokens[:4], end, end, *tokens[4:], end])
    assert "".join(pieces) == "hello world!"


# --- stop texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello world!", ["wor"], "hello "),
        ("hello world!", ["hello world!"], ""),
        ("hello world!", ["!"], "hello world"),
        ("hello world!", ["h"], ""),
        ("hello world!", ["lo w", "o"], "hell"),
        ("ho ho hoho!", ["hoho"], "ho ho "),
        ("hhhello", ["hhello"], "h"),
        ("hello 😀 world", ["😀"], "hello "),
        ("hello 😀 world", ["o 😀 w"], "hell"),
        ("hé hé", [" hé"], "hé"),
    ],
)
@every_tokenizer
def test_text_ends_before_a_stop_text(tokenizer, text, stop, expected):
    pieces, stopped = streamed(tokenizer, tokenizer.encode(text).ids, stop)
    assert stopped
    assert "".join(pieces) == expected


@every_tokenizer
def test_partial_stop_texts_are_kept(tokenizer):
    words, special = tokenizer.encode("hello hell").ids, [tokenizer.token_to_id("<end>")]
    with_special = [*tokenizer.encode("hello").ids, *special, *map(tokenizer.token_to_id, "oho")]
    for tokens, text, stops in (
        (words, "hello hell", ("hello!", "hello hello", "llo w")),
        (with_special, "hellooho", ("lo<end>h", "<end><end>", "o<end>lo", "hello<end>!")),
    ):
        for stop in stops:
            pieces, stopped = streamed(tokenizer, tokens, [stop])
            assert (stopped, "".join(pieces)) == (False, text)


def test_text_that_may_begin_a_stop_text_waits_until_it_is_clear():
    tokenizer = TOKENIZERS["byte_level"]
    pieces, _ = streamed(tokenizer, [tokenizer.token_to_id(piece) for piece in "world"], ["rod"])
    assert pieces == ["w", "o", "", "rl", "d", ""]


def test_a_stop_text_may_end_with_a_character_that_is_finished_only_at_the_end():
    tokenizer = TOKENIZERS["byte_level"]
    tokens = tokenizer.encode("he").ids + tokenizer.encode("\ufffd").ids
    pieces, stopped = streamed(tokenizer, tokens, ["\ufffd"])
    assert stopped
    assert "".join(pieces) == "he"


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_texts_are_found_wherever_tokens_end(tokens, stop):
    """Against a search over the whole text so far after each token."""
    vocabulary = {text: index for index, text in enumerate(sorted({*tokens, "a", "b"}))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    text, expected = "", None
    for token in tokens:
        text += token
        stops = [text.find(stop_text) for stop_text in stop if stop_text in text]
        if stops:
            expected = text[: min(stops)]
            break
    pieces, stopped = streamed(tokenizer, [vocabulary[token] for token in tokens], stop)
    assert stopped == (expected is not None)
    assert "".join(pieces) == (text if expected is None else expected)


# --- special tokens in stop texts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["<end>"], "hello "),
        (["lo <end>"], "hel"),
        (["<end>world"], "hello "),
        (["lo <end>wor"], "hel"),
        (["nothing", "o <end>w"], "hell"),
        (["world", "<end>d"], "hello "),
    ],
)
@every_tokenizer
def test_a_stop_text_may_hold_a_special_token(tokenizer, stop, expected, skip):
    end = tokenizer.token_to_id("<end>")
    tokens = [*tokenizer.encode("hello").ids, tokenizer.token_to_id("Ġ" if tokenizer.token_to_id("Ġ") else "▁"), end]
    stream = TextStream(tokenizer, stop, skip_special_tokens=skip)
    pieces = []
    for token in (*tokens, *(tokenizer.token_to_id(letter) for letter in "world!")):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    assert stream.stopped
    text = "".join([*pieces, stream.finish()])
    assert text == (expected if skip or stop != ["world", "<end>d"] else "hello <end>")


@every_tokenizer
def test_a_stop_text_is_found_across_a_special_token_that_has_no_text(tokenizer):
    end = tokenizer.token_to_id("<end>")
    tokens = [*tokenizer.encode("hel").ids, end, *map(tokenizer.token_to_id, "low")]
    for stop in (["llo"], ["llo", "<end>x"], ["x<end>", "llo"]):
        pieces, stopped = streamed(tokenizer, tokens, stop)
        assert stopped
        assert "".join(pieces) == "he"


@every_tokenizer
def test_the_token_that_ends_an_output_may_complete_a_stop_text(tokenizer):
    end = tokenizer.token_to_id("<end>")
    for skip in (True, False):
        for stop, expected in ((["lo<end>"], "hel"), (["<end>"], "hello"), (["x<end>"], "hello")):
            stream = TextStream(tokenizer, stop, skip_special_tokens=skip)
            text = "".join([*map(stream.push, tokenizer.encode("hello").ids), stream.end(end), stream.finish()])
            assert text == expected
            assert stream.stopped == (stop[0] != "x<end>")


@pytest.mark.parametrize(
    ("before", "text"),
    [("hello", " world"), ("hello ", " world"), ("hello<end>", " world"), ("", "world"), ("<end>", "world")],
)
def test_the_space_between_prompt_and_output_is_kept(before, text):
    """Sentencepiece's decoders drop one at the beginning of what they decode."""
    tokenizer = TOKENIZERS["byte_fallback"]
    stream = TextStream(tokenizer, before=tokenizer.encode(before).ids)
    tokens = tokenizer.encode("world").ids  # with the space that the tokenizer puts before texts
    assert "".join([*map(stream.push, tokens), stream.finish()]) == text
