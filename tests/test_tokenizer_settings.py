"""What a tokenizer's files say: texts become the tokens that they become in transformers, and end where they should."""

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TokenizersBackend,
)

from specexport.cli import main
from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.settings import GENERATION, SETTINGS, TOKENIZER, TOKENIZER_CONFIG, setting_notes
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, other_tokens
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from specexport.runtime.speculative import PLAIN
from tests.checkpoints import EOS, VOCAB, make_checkpoint, tokenizer

pytestmark = pytest.mark.exporter

END = "<|im_end|>"
TEXT = "what is the first word of all the words that there are and what is the last one of them all " * 3
Built = tuple[Path, Path, Path, str]


def change(path: Path, **values: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document | values), encoding="utf-8")


def save_with_cuts(known: PreTrainedTokenizerFast, folder: Path, **config: Any) -> None:
    """Saves a tokenizer as one that was in use: with a truncation and a padding in its tokenizer.json."""
    copy = Tokenizer.from_str(known.backend_tokenizer.to_str())
    copy.enable_truncation(16)
    copy.enable_padding(length=96, pad_id=2, pad_token="<pad>")
    known.save_pretrained(folder)
    copy.save(str(folder / "tokenizer.json"))
    change(folder / "tokenizer_config.json", **config)


def bytewise() -> PreTrainedTokenizerFast:
    """Bytes alone, each by another number than in the target's tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    built = Tokenizer(models.BPE({letter: 10 + at for at, letter in enumerate(alphabet)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A target whose files say all that used to be lost, its draft with another tokenizer, their bundle, and what
    the build warned of.
    """
    root = tmp_path_factory.mktemp("settings")
    small: dict[str, Any] = {"num_hidden_layers": 1, "calm": True}
    target = make_checkpoint(root / "target", "llama", vocab_size=VOCAB + 8, **small)
    draft = make_checkpoint(root / "draft", "llama", **small)
    known = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer().backend_tokenizer.to_str()),
        bos_token="<s>",
        eos_token=END,
        pad_token="<pad>",
    )
    save_with_cuts(known, target, split_special_tokens=True)
    save_with_cuts(bytewise(), draft)
    change(target / "generation_config.json", num_beams=4, max_time=3.5, temperature=0.5, repetition_penalty=1.0)
    output = root / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        texts: list[str] = []
        patch.setattr("sys.stderr.write", texts.append)
        words = ["build", "--target", str(target), "--universal-draft", str(draft), "--precision", "fp32"]
        assert main([*words, "--max-seq-len", "256", "--max-batch-size", "1", "-o", str(output)]) == 0
    return target, draft, output, "".join(texts)


@pytest.fixture(scope="module")
def engine(built: Built) -> Iterator[Engine]:
    with Engine.load(built[2], threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("text", [TEXT, "a</s>b", f"a{END}b<pad>", "<s>"])
def test_prompts_are_transformers(text, built, engine):
    known = AutoTokenizer.from_pretrained(built[0])
    assert engine.encode(text) == known(text).input_ids
    assert engine.tokenizer.encode_batch_fast([text])[0].ids == known(text).input_ids


def test_special_tokens_are_split(engine):
    assert len(engine.encode("a</s>b")) == 6
    assert EOS not in engine.encode("a</s>b")


def test_the_drafts_tokenizer_neither_cuts_nor_pads(built, engine):
    _, draft, output, _ = built
    bundle = Bundle.open(output)
    (method,) = bundle.manifest.methods
    assert not method.split_special_tokens
    expected_own = bundle.tokenizer(method.tokenizer, split_special_tokens=method.split_special_tokens)
    assert expected_own.encode(TEXT).ids == AutoTokenizer.from_pretrained(draft)(TEXT).input_ids
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    text = TEXT[:100]
    fast = engine.generate(text, params)
    assert fast.token_ids == engine.generate(text, params, PLAIN).token_ids
    assert fast.stats.drafted > 0


def test_bundles_of_before_neither_cut_nor_pad(built, tmp_path):
    known = Tokenizer.from_file(str(built[0] / "tokenizer.json"))
    assert known.truncation is not None and known.padding is not None
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    known.save(str(folder / "tokenizer.json"))
    loaded = Bundle(tmp_path, Bundle.open(built[2]).manifest).tokenizer()
    assert loaded.truncation is None and loaded.padding is None


# --- the token that ends a text ---------------------------------------------------------------------------------------


def test_the_tokenizers_own_end_token_ends_texts(engine):
    end = engine.tokenizer.token_to_id(END)
    assert engine.manifest.tokenizer.eos_token_ids == (EOS, end)
    params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={end: 100.0})
    completion = engine.generate("one", params)
    assert (completion.token_ids, completion.text, completion.finish_reason) == ((end,), "", "stop")


@pytest.mark.parametrize("named", [[1], []])
def test_it_is_named_where_transformers_does_not_stop_there(named, built):
    notes = [note for note in setting_notes(built[0], 320, named) if note.key == "eos_token"]
    assert len(notes) == 1
    assert f'tokenizer_config.json: eos_token is "{END}"' in str(notes[0])
    assert ("1 alone" if named else "no token") in str(notes[0])
    assert not [note for note in setting_notes(built[0], 320, [1, 320]) if note.key == "eos_token"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not JSON: "),
        ("tokenizer.json", "[]", r"tokenizer\.json: holds list; expected an object"),
        ("special_tokens_map.json", "5", r"special_tokens_map\.json: holds int; expected an object"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "could not be loaded: no 'template'"),
    ],
)
def test_broken_tokenizer_files_are_named(built, tmp_path, file, content, message):
    folder = shutil.copytree(built[0], tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(BuildError, match=message):
        load_tokenizer(folder)


def test_a_decoder_that_fails_for_some_texts_is_refused(built, tmp_path):
    """As the library panics where a token is empty once its end is stripped."""
    folder = shutil.copytree(built[0], tmp_path / "model")
    stated = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    for decoder in (strip, {"type": "Sequence", "decoders": [{"type": "Fuse"}, strip]}):
        change(folder / "tokenizer.json", decoder=decoder)
        with pytest.raises(BuildError, match=r"strips the end of texts \(Strip, stop=1\).*set 0 in tokenizer.json"):
            load_tokenizer(folder)
    change(folder / "tokenizer.json", decoder=stated["decoder"])
    load_tokenizer(folder)


# --- what is named ----------------------------------------------------------------------------------------------------


def test_build_and_inspect_name_ignored_settings(built, cli):
    *_, output, warned = built
    shown = cli("inspect", output).words
    for text in (
        "generation_config.json: num_beams is 4: transformers searches with beams; specexport does not",
        "generation_config.json: max_time is 3.5",
        f'tokenizer_config.json: eos_token is "{END}": it ends texts here',
    ):
        assert f"warning: {text}" in warned
        assert text in shown
    assert "repetition_penalty" not in warned and "temperature" not in warned


def test_spaces_that_transformers_takes_out_are_named(tmp_path):
    key = "clean_up_tokenization_spaces"
    for kind, named in (("WordPiece", 1), ("BPE", 0)):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": kind}}), encoding="utf-8")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: True}), encoding="utf-8")
        assert [note.key for note in setting_notes(tmp_path, None, ())] == [key] * named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: False}), encoding="utf-8")
    assert setting_notes(tmp_path, None, ()) == ()


def test_texts_that_transformers_reads_otherwise_than_the_file_are_named(tmp_path):
    """As of LlamaTokenizer, whose class prepends spaces whatever tokenizer.json says."""
    stated = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    stated.enable_padding(length=96)
    stated.save(str(tmp_path / "tokenizer.json"))
    used = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    assert other_tokens(tmp_path, used) is None
    used.normalizer = normalizers.Lowercase()
    assert "transformers" in str(other_tokens(tmp_path, used))


def test_older_configurations_are_looked_at_too(tmp_path):
    (tmp_path / "config.json").write_text('{"num_beams": 4, "num_return_sequences": 1}', encoding="utf-8")
    assert [(note.file, note.key) for note in setting_notes(tmp_path, None, ())] == [("config.json", "num_beams")]
    (tmp_path / "generation_config.json").write_text("{}", encoding="utf-8")
    assert setting_notes(tmp_path, None, ()) == ()


def test_a_loaded_tokenizer_neither_cuts_nor_pads(built):
    loaded = load_tokenizer(built[1]).tokenizer
    assert loaded.truncation is None and loaded.padding is None


# --- the list of settings ---------------------------------------------------------------------------------------------


INTERNAL = {
    *("_json_padding", "_json_truncation", "_spm_precompiled_charsmap", "gguf_file", "merges", "merges_file"),
    *("post_processor", "tokenizer", "tokenizer_file", "tokenizer_object", "tokenizer_padding", "vocab", "vocab_file"),
    "tokenizer_truncation",
}
"""What transformers hands from one of its functions to the next, from other files."""


def listed(file: str) -> list[str]:
    return [key for setting in SETTINGS if setting.file == file for key in setting.keys]


def test_each_setting_is_listed_once():
    pairs = [(setting.file, key) for setting in SETTINGS for key in setting.keys]
    assert len(pairs) == len(set(pairs))


def test_the_list_has_every_setting_of_generation():
    assert set(vars(GenerationConfig())) == set(listed(GENERATION))


def test_the_list_has_every_setting_of_tokenizers():
    assert set(json.loads(tokenizer().backend_tokenizer.to_str())) == set(listed(TOKENIZER))
    read = set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
    for function in (
        PreTrainedTokenizerBase.__init__,
        PreTrainedTokenizerBase._from_pretrained,
        TokenizersBackend.__init__,
        TokenizersBackend.convert_to_native_format,
    ):
        source = inspect.getsource(function)
        read |= set(re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', source))
        read |= set(re.findall(r'"(\w+)" in (?:init_)?kwargs', source))
    assert read - INTERNAL <= set(listed(TOKENIZER_CONFIG))
