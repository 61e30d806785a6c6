"""Types of what fixtures of ``conftest.py`` give."""

from collections.abc import Callable
from pathlib import Path

from specexport.runtime import Engine

Bundles = Callable[[str], Path]
"""Gives a bundle's folder by its name."""
Engines = Callable[[str], Engine]
"""Gives a loaded bundle by its name."""
