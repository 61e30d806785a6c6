"""The handling of every setting that transformers reads, besides a model's configuration and weights.

A setting is honoured, refused, or named in a warning by ``build`` and ``inspect`` if it changes transformers' text but
not ours; others have no effect on texts. ``texts/settings.txt`` has a row for each: handling, keys, note, and the
values besides null that change nothing. ``python -m scripts.docs`` writes the table in docs/settings.md from it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from specexport.contract.errors import BuildError
from specexport.contract.manifest import SettingNote, short
from specexport.exporter.checkpoints.documents import CONFIG, GENERATION, read_object

Handling = Literal["honoured", "refused", "named", "no effect"]
Documents = Mapping[str, Mapping[str, Any]]
"""The JSON files of a checkpoint's folder by name; missing files, and those without an object, are empty."""

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_CLEAN_UP = "clean_up_tokenization_spaces"
_CLEAN_UP_BPE = f"{_CLEAN_UP}_for_bpe_even_though_it_will_corrupt_output"


class Setting(NamedTuple):
    """Settings of a file with the same handling.

    Attributes:
        keys: top-level keys; for a text file, a description.
        note: the effect here, or in transformers.
        neutral: values besides null that change nothing.
    """

    file: str
    keys: tuple[str, ...]
    handling: Handling
    note: str
    neutral: tuple[Any, ...]


def _settings() -> Iterator[Setting]:
    text, file = resources.files("specexport.exporter").joinpath("texts/settings.txt").read_text(encoding="utf-8"), ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            file = line.strip("[]")
        else:
            handling, keys, note, *values = line.split(" | ")
            neutral = tuple(map(json.loads, values))
            yield Setting(file, tuple(keys.split(", ")), cast(Handling, handling), note, neutral)


SETTINGS = tuple(_settings())


def _cleans_up(value: Any, documents: Documents) -> bool:
    """Whether transformers removes spaces from decoded text; for BPE tokenizers two settings must ask for it."""
    model = documents[TOKENIZER].get("model")
    bpe = isinstance(model, dict) and model.get("type") == "BPE"
    return bool(value) and (not bpe or bool(documents[TOKENIZER_CONFIG].get(_CLEAN_UP_BPE)))


def read_documents(folder: Path) -> Documents:
    """Reads the JSON files with a checkpoint's settings."""
    documents: dict[str, Mapping[str, Any]] = {}
    for name in dict.fromkeys(setting.file for setting in SETTINGS):
        documents[name] = {}
        if name.endswith(".json") and (folder / name).is_file():
            with contextlib.suppress(BuildError):  # the code that needs the file reports its faults
                documents[name] = read_object(folder / name)
    return documents


def setting_notes(folder: Path, end: int | None, ends: Collection[int]) -> tuple[SettingNote, ...]:
    """Warnings about settings of a checkpoint that change transformers' text but not ours, or the other way round.

    ``end`` is the end token of the tokenizer; ``ends`` are the end tokens of the model's configurations.
    """
    documents = read_documents(folder)
    notes = []
    generation = GENERATION if (folder / GENERATION).is_file() else CONFIG
    for setting in SETTINGS:
        if setting.handling != "named":
            continue
        file = generation if setting.file == GENERATION else setting.file
        for key in setting.keys:
            value = documents[file].get(key)
            if value is None or value in setting.neutral:
                continue
            if key not in (_CLEAN_UP, _CLEAN_UP_BPE) or _cleans_up(value, documents):
                note = f"{setting.note}; specexport does not"
                notes.append(SettingNote(file=file, key=key, value=short(value), note=note))
    if end is not None and end not in ends:
        others = f"{', '.join(map(str, ends))} alone" if ends else "no token"
        note = f"it ends texts here; transformers' generate stops at {others} (eos_token_id of {generation})"
        token = documents[TOKENIZER_CONFIG].get("eos_token")
        value = token.get("content") if isinstance(token, dict) else token
        notes.append(SettingNote(file=TOKENIZER_CONFIG, key="eos_token", value=short(value or end), note=note))
    return tuple(notes)
