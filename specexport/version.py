"""The version and the commit of this installation."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit that a wheel was built from or a clone has checked out, with ``-dirty`` if files have changed.

    None if it is unknown, for instance in a copy of the files.
    """
    here = Path(__file__).parent
    built = here / "commit.txt"  # setup.py writes it into wheels
    if built.is_file():
        return built.read_text(encoding="utf-8").strip()
    if not (here.parent / ".git").exists():
        return None
    words = ("git", "-C", str(here.parent), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or another user's clone
        return None


def full_version() -> str:
    """The version, with the commit in brackets if it is known."""
    from specexport import __version__  # setup.py runs this file before specexport can be imported

    revision = commit()
    return __version__ if revision is None else f"{__version__} ({revision})"
