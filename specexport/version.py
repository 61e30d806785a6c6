"""Which code this is: the version, and the commit where it is known."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit this was built from; in a clone that which is checked out, with ``-dirty`` if files have changed.

    None where neither is known, such as in files that were copied out of a clone.
    """
    here = Path(__file__).parent
    built = here / "commit.txt"  # setup.py writes it into what it builds
    if built.is_file():
        return built.read_text(encoding="utf-8").strip()
    if not (here.parent / ".git").exists():
        return None
    words = ("git", "-C", str(here.parent), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or another user's clone
        return None


def described() -> str:
    """The version, with the commit in brackets where it is known."""
    from specexport import __version__  # here, as setup.py runs this file where specexport cannot be imported

    found = commit()
    return __version__ if found is None else f"{__version__} ({found})"
