"""Run ``python -m benchmarks.gpu`` on a machine with a GPU, from any folder, with or without an installation."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def describe_package(folder: Path) -> None:
    """Writes the entry points of methods and backends into a folder, like an installation."""
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    info = folder / "specexport-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specexport\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in ways.items()) for group, ways in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    sys.path.append(str(folder))


import specexport  # noqa: E402

specexport.__path__.append(str(ROOT))  # specexport.runtime and the other packages, if nothing is installed

from benchmarks.gpu.__main__ import main  # noqa: E402

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as described:
        try:
            importlib.metadata.distribution("specexport")
        except importlib.metadata.PackageNotFoundError:
            describe_package(Path(described))
        sys.exit(main())
