"""The version, and the commit if it is known."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit this was built from; in a clone the one that is checked out, with ``-dirty`` if files have changed.

    None if neither is known, as in files that were copied from a clone.
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
    from specexport import __version__  # here, as setup.py runs this file when specexport cannot be imported

    revision = commit()
    return __version__ if revision is None else f"{__version__} ({revision})"
