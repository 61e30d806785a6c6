"""One module a command: its summary is the module's docstring, ``add_arguments`` its flags, ``main`` its work."""

from __future__ import annotations

import argparse

from specexport.runtime.widths import EXACTNESS


def add_exactness(parser: argparse.ArgumentParser) -> None:
    """Declares ``--exactness``."""
    parser.add_argument(
        "--exactness",
        choices=EXACTNESS,
        help="exact: greedy text is plain decoding's bit for bit, the default on a CPU; fast: the narrowest steps",
    )
