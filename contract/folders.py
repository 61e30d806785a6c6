"""Folders that appear only when they are whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_beside(output: Path, *, resume: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``output`` that takes its name if the block succeeds.

    Args:
        output: the folder to be.
        resume: give out what a block that was killed or interrupted left, with its content; only one process at a time
            may do that. A block that fails leaves nothing.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    if resume:
        folder = output.parent / f".{output.name}.unfinished"
    else:
        for stale in output.parent.glob(f".{output.name}.building-*"):
            if not _alive(stale.name.rpartition("-")[2]):
                shutil.rmtree(stale, ignore_errors=True)
        folder = output.parent / f".{output.name}.building-{os.getpid()}"
    folder.mkdir(exist_ok=resume)
    interrupted = False
    try:
        yield folder
        if output.exists():
            retired = Path(tempfile.mkdtemp(prefix=f".{output.name}.old-", dir=output.parent))
            output.rename(retired / output.name)
            folder.rename(output)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            folder.rename(output)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        if not (resume and interrupted):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
