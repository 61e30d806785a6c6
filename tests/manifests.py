"""Changing a bundle's manifest to what no build would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specexport.contract.manifest import MANIFEST_NAME

Document = dict[str, Any]


def rewritten(folder: Path, change: Callable[[Document], object]) -> None:
    """Changes the manifest's JSON."""
    path = folder / MANIFEST_NAME
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
