"""Names of checkpoint files, and readers of JSON files. Imports nothing heavy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from specexport.contract.errors import UNREADABLE, BuildError, explained
from specexport.contract.folders import describe_error

CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""The configuration of a peft adapter, alone or beside its model."""
_MAX_FILE, _MAX_CONFIG = 64 << 20, 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escape of a surrogate: an unpaired one, or the first of a pair."""
_MAX_COUNT, _MAX_SIZE, _MAX_INT = 4096, 1 << 24, 1 << 53
_COUNT_FIELDS = re.compile(r"(^|_)(layers?|experts?|heads?|blocks?|stages?)($|_)")
_SIZE_FIELDS = re.compile(r"size|dim|vocab|position|embd|inner|ctx")
_Config = TypeVar("_Config")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= _MAX_FILE else b""
    except OSError as error:
        raise BuildError(describe_error(error, path)) from error
    if size > _MAX_FILE:
        raise BuildError(f"{path}: {size} bytes; expected at most {_MAX_FILE}")
    try:
        document = json.loads(content)  # not msgspec, as Python's json writes Infinity
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BuildError(f"{path}: holds {type(document).__name__}; expected an object")
    if _ESCAPED_SURROGATE.search(content) or not content.isascii():
        for key, value in document.items():
            if surrogate := _SURROGATE.search(json.dumps([key, value], ensure_ascii=False)):
                raise BuildError(f"{path}: {ascii(key)[1:-1]} has U+{ord(surrogate[0]):04X}, half of a character")
    return document


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor in an index of safetensors."""
    placed = read_object(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise BuildError(f"{index}: weight_map is not an object that maps tensors to files; fetch the checkpoint again")
    return placed


def read_config(path: Path, kind: type[_Config], subject: str) -> _Config:
    """Reads the fields of ``kind`` from a ``config.json``; other fields are ignored.

    Args:
        subject: the model that the file describes, for error messages.
    """
    if path.stat().st_size > _MAX_CONFIG:
        raise BuildError(f"{path}: {path.stat().st_size} bytes; expected at most {_MAX_CONFIG}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNREADABLE as error:
        raise BuildError(f"{path}: not a configuration of {subject}: {explained(error)}") from error


def require_trained_for(path: Path, what: str, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Refuses a draft of another target; ``sizes`` has the draft's number and the target's, by the field's name."""
    for field, (value, expected) in sizes.items():
        if value != expected:
            raise BuildError(
                f"{path}: {field} is {value}, and the target's is {expected}; this {what} was trained for another model"
            )


def require_sane(path: Path, document: dict[str, Any]) -> None:
    """Refuses absurdly large numbers in a configuration, before its model is created."""
    for name, value in _integers(document):
        limit = _MAX_SIZE if _SIZE_FIELDS.search(name) else _MAX_COUNT if _COUNT_FIELDS.search(name) else _MAX_INT
        if abs(value) > limit:
            raise BuildError(f"{path}: {name} is {str(value)[:20]}; expected at most {limit}")


def _integers(document: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """All integers, with the names of their fields."""
    pending: list[tuple[str, Any]] = list(document.items())
    while pending:  # no recursion, as JSON may be nested deeply
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += ((name, element) for element in value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
            yield name, int(value)
