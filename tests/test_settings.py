"""The list of settings covers every setting that transformers reads; settings that are not applied are named."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerBase, TokenizersBackend

from specexport.exporter.checkpoints.settings import GENERATION, SETTINGS, TOKENIZER, TOKENIZER_CONFIG
from tests.checkpoints import tokenizer

pytestmark = pytest.mark.exporter

INTERNAL = {
    *("_json_padding", "_json_truncation", "_spm_precompiled_charsmap", "gguf_file", "merges", "merges_file"),
    *("post_processor", "tokenizer", "tokenizer_file", "tokenizer_object", "tokenizer_padding", "vocab", "vocab_file"),
    "tokenizer_truncation",
}
"""What transformers hands from one of its functions to the next, from other files."""


def listed(file: str) -> list[str]:
    return [key for setting in SETTINGS if setting.file == file for key in setting.keys]


def test_each_setting_is_listed_once() -> None:
    pairs = [(setting.file, key) for setting in SETTINGS for key in setting.keys]
    assert len(pairs) == len(set(pairs))


def test_the_list_has_every_setting_of_generation() -> None:
    assert set(vars(GenerationConfig())) == set(listed(GENERATION))


def test_the_list_has_every_setting_of_tokenizers() -> None:
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
