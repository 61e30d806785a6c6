"""Writes the commit into what is built, and an sdist that is the same each time; all else is in pyproject.toml."""

from __future__ import annotations

import gzip
import os
import runpy
import tarfile
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_COMMIT = runpy.run_path(str(Path(__file__).parent / "specexport" / "version.py"))["commit"]()


def _write_commit(root: str) -> None:
    if _COMMIT is not None:
        (Path(root) / "specexport" / "commit.txt").write_text(f"{_COMMIT}\n", encoding="utf-8")


class _BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            _write_commit(self.build_lib)


class _Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _write_commit(base_dir)

    def make_archive(self, base_name: str, format: str, root_dir: Any = None, base_dir: Any = None, **_: Any) -> str:
        """A .tar.gz in which times are SOURCE_DATE_EPOCH's, and neither owners nor the umask show."""
        assert format == "gztar", f"format is {format!r}; expected gztar"
        time = int(os.environ.get("SOURCE_DATE_EPOCH", 0)) or None

        def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.mtime = time or int(entry.mtime)
            return entry

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,  # noqa: PTH123
            gzip.GzipFile("", "wb", fileobj=file, mtime=time) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(Path(root_dir or ".") / base_dir, base_dir, filter=plain)  # in the order of names
        return path


setup(cmdclass={"build_py": _BuildPy, "sdist": _Sdist})
