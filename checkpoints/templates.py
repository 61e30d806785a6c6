"""The chat templates of a checkpoint, from every file in which transformers looks for some."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from specexport.checkpoints.stored import read_config
from specexport.contract.errors import BuildError
from specexport.contract.manifest import DEFAULT_TEMPLATE

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
    place, found = folder / "tokenizer_config.json", tokenizer.chat_template
    for name in _PROCESSOR:
        if not found and (folder / name).is_file():
            place, found = folder / name, read_config(folder / name, _Processor, "a processor").chat_template
    if isinstance(found, list):
        found = {one.name: one.template for one in found}
    if not isinstance(found, dict):
        found = {} if found is None else {DEFAULT_TEMPLATE: found}
    for name, template in found.items():
        if not isinstance(template, str) or not _NAME.fullmatch(str(name)):
            raise BuildError(
                f"{place}: chat_template {str(name)[:80]!r} is {type(template).__name__}; expected Jinja by a name of "
                "letters and digits"
            )
    return dict(found)
