"""JSON files of checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from specexport.contract.errors import BuildError

_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half a character, or the first half of a whole one, as an escape."""
_MOST = 64 << 20


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        BuildError: the file cannot be read, is larger than 64 MiB, is not JSON or not an object, or has half of a
            character, which is no UTF-8.
    """
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= _MOST else b""
    except OSError as error:
        raise BuildError(f"{path}: cannot be read: {error.strerror}") from error
    if size > _MOST:
        raise BuildError(f"{path}: {size} bytes; expected at most {_MOST}")
    try:
        document = json.loads(content)  # not msgspec, as Python's json writes Infinity
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BuildError(f"{path}: holds {type(document).__name__}; expected an object")
    if _ESCAPED.search(content) or not content.isascii():
        for key, value in document.items():
            if half := _HALF.search(json.dumps([key, value], ensure_ascii=False)):
                raise BuildError(f"{path}: {ascii(key)[1:-1]} has U+{ord(half[0]):04X}, half of a character")
    return document
