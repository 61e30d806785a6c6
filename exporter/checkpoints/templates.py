"""The chat templates of a checkpoint, from every file where transformers looks for them."""

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
"""Files with the templates of processors, in order of precedence."""
_NAME = re.compile(r"\w[\w.+-]{0,63}")


class _Named(msgspec.Struct):
    name: str
    template: str


class _Processor(msgspec.Struct):
    """The fields read from a processor's files; other keys are ignored."""

    chat_template: str | dict[str, str] | list[_Named] | None = None


def chat_templates(folder: Path, tokenizer: Any) -> dict[str, str]:
    """A checkpoint's templates by name; ``default`` is used unless another is named.

    They are the tokenizer's (``chat_template.jinja`` and ``additional_chat_templates``, or ``tokenizer_config.json``),
    or, if it has none, the processor's.

    Args:
        folder: the checkpoint.
        tokenizer: transformers' tokenizer.

    Raises:
        BuildError: a template is not a string, or its name is not a file name; names the file.
    """
    place, templates = folder / "tokenizer_config.json", _by_name(tokenizer.chat_template)
    if not templates:
        place, templates = _of_processor(folder) or (place, templates)
    for name, template in templates.items():
        if not isinstance(template, str) or not _NAME.fullmatch(str(name)):
            raise BuildError(
                f"{place}: chat_template {str(name)[:80]!r} is {type(template).__name__}; expected Jinja by a name of "
                "letters and digits"
            )
    return dict(templates)


def other_template(folder: Path, used: Mapping[str, str]) -> SettingNote | None:
    """The file with the processor's template, if that is not the one used."""
    place, templates = _of_processor(folder) or (folder, {})
    if not templates or templates.get(DEFAULT_TEMPLATE) == used.get(DEFAULT_TEMPLATE):
        return None
    note = "transformers' processors take this template; specexport takes the tokenizer's, as its tokenizers do"
    return SettingNote(file=place.name, key="chat_template", value=short(templates.get(DEFAULT_TEMPLATE)), note=note)


def _of_processor(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The templates of the first of a processor's files that has any."""
    for path in map(folder.joinpath, _PROCESSOR):
        if path.is_file() and (template := read_config(path, _Processor, "a processor").chat_template):
            return path, _by_name(template)
    return None


def _by_name(templates: Any) -> dict[str, Any]:
    if isinstance(templates, list):
        return {entry.name: entry.template for entry in templates}
    return templates if isinstance(templates, dict) else {} if templates is None else {DEFAULT_TEMPLATE: templates}
