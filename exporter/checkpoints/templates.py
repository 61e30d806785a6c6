"""The chat templates of a checkpoint, from every file in which transformers looks for some."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from specexport.contract.errors import BuildError
from specexport.contract.manifest import DEFAULT_TEMPLATE, SettingNote, short
from specexport.exporter.checkpoints.stored import read_config

_PROCESSOR = ("processor_config.json", "chat_template.json")
"""Where processors have theirs, the first before the second."""
_NAME = re.compile(r"\w[\w.+-]{0,63}")


class _Named(msgspec.Struct):
    name: str
    template: str


class _Processor(msgspec.Struct):
    """What is read of a processor's files; other keys are left alone."""

    chat_template: str | dict[str, str] | list[_Named] | None = None


def chat_templates(folder: Path, tokenizer: Any) -> dict[str, str]:
    """A checkpoint's templates by name, of which ``default`` is used where none is named.

    They are the tokenizer's (``chat_template.jinja`` and ``additional_chat_templates``, or ``tokenizer_config.json``),
    or its processor's where it has none.

    Args:
        folder: the checkpoint.
        tokenizer: as transformers loaded it.

    Raises:
        BuildError: one is no text, or has a name that is no file's; names the file.
    """
    place, found = folder / "tokenizer_config.json", _by_name(tokenizer.chat_template)
    if not found:
        place, found = _of_processor(folder) or (place, found)
    for name, template in found.items():
        if not isinstance(template, str) or not _NAME.fullmatch(str(name)):
            raise BuildError(
                f"{place}: chat_template {str(name)[:80]!r} is {type(template).__name__}; expected Jinja by a name of "
                "letters and digits"
            )
    return dict(found)


def other_template(folder: Path, used: Mapping[str, str]) -> SettingNote | None:
    """What names the template of a checkpoint's processor, where that is not the one that is used."""
    place, found = _of_processor(folder) or (folder, {})
    if not found or found.get(DEFAULT_TEMPLATE) == used.get(DEFAULT_TEMPLATE):
        return None
    note = "transformers' processors take this template; specexport takes the tokenizer's, as its tokenizers do"
    return SettingNote(file=place.name, key="chat_template", value=short(found.get(DEFAULT_TEMPLATE)), note=note)


def _of_processor(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The templates of the first file of a processor that has some."""
    for path in map(folder.joinpath, _PROCESSOR):
        if path.is_file() and (found := read_config(path, _Processor, "a processor").chat_template):
            return path, _by_name(found)
    return None


def _by_name(found: Any) -> dict[str, Any]:
    if isinstance(found, list):
        return {one.name: one.template for one in found}
    return found if isinstance(found, dict) else {} if found is None else {DEFAULT_TEMPLATE: found}
