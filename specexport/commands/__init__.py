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


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Declares ``--no-calibrate``."""
    parser.add_argument(
        "--no-calibrate",
        action="store_false",
        dest="calibrate",
        help="speculate as the bundle says, whatever steps cost on this machine; otherwise that is measured once, in a "
        "few seconds, and each step drafts as many tokens as pay",
    )
