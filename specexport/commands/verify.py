"""Check a bundle: files, graphs against the original model, speculation against plain decoding."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from specexport.building import exporter, progress_bars
from specexport.contract.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport verify``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--target", metavar="DIR_OR_ID", help="the original target, if it has moved since the build")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="METHOD.KEY=DIR",
        help="where a method's checkpoint is now, if it has moved, such as medusa.model=heads/; repeatable",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt to compare on; repeatable")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, help="tokens to generate a prompt")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport verify``; returns 1 if a check failed."""
    sources = {}
    for given in arguments.source:
        key, equals, sources[key] = given.partition("=")
        if not equals:
            raise RequestError(f"--source is {given!r}; expected METHOD.KEY=DIR, such as medusa.model=heads/")
    exporter()
    from specexport.verify.bundle import verify
    from specexport.verify.report import render

    with progress_bars() as progress:
        report = verify(
            arguments.bundle,
            target=arguments.target,
            sources=sources,
            prompts=arguments.prompt,
            max_tokens=arguments.max_tokens,
            progress=progress,
        )
    if arguments.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(render(report))
    return 0 if report.passed else 1
