"""Checks and measures bundles on a machine with a GPU: ``python -m benchmarks.gpu``, from any folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
