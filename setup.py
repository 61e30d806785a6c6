"""Build: compiles the kernels, records the commit, and makes reproducible sdists; see pyproject.toml."""

from __future__ import annotations

import gzip
import os
import runpy
import tarfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

_COMMIT = runpy.run_path(str(Path(__file__).parent / "specexport" / "version.py"))["commit"]()
_KERNELS = runpy.run_path(str(Path(__file__).parent / "specexport" / "kernels" / "build.py"))


def _write_commit(root: str) -> None:
    if _COMMIT is not None:
        (Path(root) / "specexport" / "commit.txt").write_text(f"{_COMMIT}\n", encoding="utf-8")


class _BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            _write_commit(self.build_lib)


class _BuildExt(build_ext):
    """Compiles the kernels' library, which contains no Python; without it onnxruntime's kernels run."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], _KERNELS["NAME"]))

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.unlink(missing_ok=True)  # left by an earlier build
        try:
            _KERNELS["build"](library, Path("build", "kernels"))
        except _KERNELS["CompilerError"] as error:
            raise CompileError(str(error)) from error  # a warning, as the extension is optional


class _Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Tags wheels: any Python 3 on this platform; without the library, any platform."""
        self.root_is_pure = not Path(self.bdist_dir, "specexport", "kernels", _KERNELS["NAME"]).exists()
        return "py3", "none", super().get_tag()[2]


class _Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _write_commit(base_dir)

    def make_archive(self, base_name: str, format: str, root_dir: Any = None, base_dir: Any = None, **_: Any) -> str:
        """Writes a .tar.gz with SOURCE_DATE_EPOCH as all times, and without owners or the umask's effect."""
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
            archive.add(Path(root_dir or ".") / base_dir, base_dir, filter=plain)  # sorted by name
        return path


setup(
    cmdclass={"build_py": _BuildPy, "build_ext": _BuildExt, "bdist_wheel": _Wheel, "sdist": _Sdist},
    ext_modules=[Extension("specexport.kernels.library", [], optional=True)],
)
