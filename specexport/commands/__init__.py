"""One module a command: its summary is the module's docstring, ``add_arguments`` its flags, ``main`` its work."""

from __future__ import annotations

import argparse
from pathlib import Path

from specexport.contract.engines import BACKENDS
from specexport.runtime.opening import DEFAULT_UTILIZATION


def add_report(parser: argparse._ActionsContainer, flag: str) -> None:
    """Declares ``--plot`` or ``--report``."""
    parser.add_argument(
        flag,
        type=Path,
        metavar="FILE.html",
        help="also write a page with these tables and charts, which opens offline (default: none)",
    )


def add_threads(parser: argparse._ActionsContainer) -> None:
    """Declares ``--threads``."""
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")


def add_machine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares what a bundle runs on, in a group of its own, which is returned."""
    group = parser.add_argument_group("the machine")
    add_threads(group)
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        metavar="NAME",
        help=f"what runs the bundle: {', '.join(BACKENDS)} (default: what it was built for)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=DEFAULT_UTILIZATION,
        metavar="SHARE",
        help="share of a GPU's memory that may be in use, including other programs'; has no effect on a CPU",
    )
    return group


def add_calibrate(parser: argparse._ActionsContainer) -> None:
    """Declares ``--no-calibrate``."""
    parser.add_argument(
        "--no-calibrate",
        action="store_false",
        dest="calibrate",
        help="draft the bundle's default number of tokens; otherwise the cost of steps is measured once on this "
        "machine, in a few seconds, and each step drafts as many tokens as pay",
    )
