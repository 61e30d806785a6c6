"""Home and temporary folders, atomic replacement of files and folders, and locks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import glob
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from specexport.contract.errors import BuildError, SpecExportError

_HINTS = {
    errno.ENOSPC: "free space there, or write elsewhere",
    errno.EDQUOT: "free space there, or write elsewhere",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or write elsewhere",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "check its permissions, or choose another place",
    errno.EPERM: "check its permissions, or choose another place",
    errno.ENOTDIR: "choose a place whose parents are folders",
    errno.ENOENT: "check the path",
    errno.EEXIST: "choose a place whose parents are folders",
}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def home() -> Path | None:
    """The user's home folder; None if neither ``HOME`` nor the system's user database names one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def expanded(path: str | Path, refusal: type[SpecExportError] = BuildError) -> Path:
    """A path with ``~`` at its start replaced by the home folder.

    Raises:
        BuildError: or ``refusal``: there is no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        why = "as HOME is not set" if Path(path).parts[0] == "~" else "as there is no such user"
        raise refusal(f"{path}: no home folder is known, {why}; give the whole path") from error


def temporary_folder() -> Path:
    """A folder that is removed when Python exits, for caches of users without a home folder."""
    return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="specexport-")


def describe_error(error: OSError, path: Path | None = None) -> str:
    """Describes a system error and its remedy in one line; ``path`` is named if the error names no file."""
    if isinstance(error, shutil.Error):  # a list of files with the reason of each, as text
        *_, place, reason = error.args[0][0]
        code = re.search(r"Errno (\d+)", reason)
        error = OSError(int(code[1]) if code else None, os.strerror(int(code[1])) if code else reason, str(place))
    if error.errno == errno.ENOMEM:  # of any call, so that it names no file
        return "there is not enough memory"
    if error.errno == errno.ENOENT and error.filename is None:  # of tempfile, which lists where it looked
        return f"{error.strerror}; set TMPDIR to a folder that can be written"
    location = str(error.filename or path or "standard output")
    hint = _HINTS.get(error.errno or 0, "resolve that and run it again")
    return f"{location}: {error.strerror or error}; {hint}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the block's errors of writing below ``path`` into one-line errors.

    Raises:
        BuildError: the system refuses to write; names the file, or ``path``.
    """
    try:
        yield
    except (SpecExportError, BrokenPipeError):
        raise
    except OSError as error:
        raise BuildError(describe_error(error, path)) from error
    except Exception as error:
        refused = _refused(error)
        if refused is None:
            raise
        raise BuildError(describe_error(refused, path)) from error


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically and keeps its permissions; a file that is only partly written is removed.

    Raises:
        OSError: it cannot be written; names ``path``.
    """
    path = path.resolve() if path.is_file() else path  # a link keeps pointing to the file
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):  # such as /dev/stdout
        path.write_bytes(content)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content)
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _refused(error: BaseException | None) -> OSError | None:
    """The system's refusal to write behind an exception; None if there is none.

    Libraries in Rust report it only as text, torch as the cause of another error.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS) else None
        if code := re.search(r"\(os error (\d+)\)", str(error)):
            return OSError(int(code[1]), os.strerror(int(code[1])))
        error = error.__context__
    return None


@contextlib.contextmanager
def locked(path: Path, holding: str | None = None) -> Iterator[None]:
    """Holds a lock for the block; it ends with the process, even if that is killed.

    Args:
        holding: what a process does that holds the lock, for the error; None to wait for that process.

    Raises:
        BuildError: another process holds the lock.
    """
    # Imported here: running a bundle needs no lock.
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=-1 if holding is None else 0)
    try:
        lock.acquire()
    except Timeout as error:
        owner = _read(path)
        process = f"process {owner}" if owner.isdecimal() else "another process"
        raise BuildError(f"{process} {holding}; wait for it to end, or choose another folder") from error
    try:
        with contextlib.suppress(OSError):
            path.write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        # Before the release: a waiting process notices that the file is gone, and tries again.
        path.unlink(missing_ok=True)
        lock.release()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")[:20]
    except (OSError, UnicodeDecodeError):
        return ""


def write_lock(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Locks a folder, which need not exist, for the process that writes or changes it."""
    return locked(folder.parent / f".{folder.name}.lock", f"is writing {folder}")


@contextlib.contextmanager
def written_beside(output: Path, *, overwrite: bool = False, resume: bool = False) -> Iterator[Path]:
    """Yields a temporary folder beside ``output`` that takes its place if the block succeeds.

    Leftovers of killed processes are removed first. If the system can exchange two folders atomically, a replaced
    output exists at every moment; otherwise the next call restores it after a crash.

    Args:
        resume: begin with the content that a killed or interrupted block left; a block that fails leaves nothing.

    Raises:
        BuildError: the output exists, another process writes it, or it cannot be written; names the path.
    """
    output = Path(os.path.realpath(output))  # a link keeps pointing to the folder that is replaced
    created = [parent for parent in output.parents if not parent.exists()]
    try:
        with writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            with write_lock(output):
                retired = output.parent / f".{output.name}.old"
                _recover(output, retired)
                folder = output.parent / f".{output.name}.{'unfinished' if resume else f'building-{os.getpid()}'}"
                folder.mkdir(exist_ok=resume)
                resumable = False
                try:
                    yield folder
                    if not output.exists():
                        folder.rename(output)
                    elif not overwrite:
                        raise BuildError(
                            f"{output}: somebody else wrote it meanwhile; choose another folder or pass --overwrite to "
                            "replace it"
                        )
                    elif not _exchange(folder, output):
                        output.rename(retired)
                        folder.rename(output)
                        remove(retired)
                except (KeyboardInterrupt, SystemExit):
                    resumable = resume
                    raise
                finally:
                    if not resumable:
                        remove(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            for parent in created:
                parent.rmdir()
        raise


def _recover(output: Path, retired: Path) -> None:
    """Restores the output that a killed process was replacing, and removes its leftovers; requires the lock."""
    if retired.exists() and not output.exists():
        retired.rename(output)
    remove(retired)
    for stale in output.parent.glob(f".{glob.escape(output.name)}.building-*"):
        remove(stale)


def _exchange(path: Path, other: Path) -> bool:
    """Exchanges the names of two folders atomically; returns False if the system cannot."""
    if sys.platform != "linux":
        return False
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(path), os.fsencode(other)
    return exchange is not None and exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with its content, as far as the system allows."""
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
