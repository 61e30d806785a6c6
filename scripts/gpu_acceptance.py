"""Check and measure on a machine with a GPU: ``python -m benchmarks.gpu``, from any folder, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import specexport  # noqa: E402

specexport.__path__.append(
    str(ROOT)
)  # the location of specexport.runtime and the other packages if nothing is installed

from benchmarks.gpu.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
