"""Check a bundle: files, graphs against the original model, speculation against plain decoding."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from specexport.commands.build import Bars, build_progress, exporter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport verify``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--target", metavar="DIR_OR_ID", help="the original target, if it has moved since the build")
    parser.add_argument("--draft", metavar="DIR_OR_ID", help="the original draft, if it has moved since the build")
    parser.add_argument(
        "--medusa", type=Path, metavar="DIR", help="the original Medusa heads, if they have moved since the build"
    )
    parser.add_argument(
        "--mlp-speculator", metavar="DIR_OR_ID", help="the original MLP speculator, if it has moved since the build"
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt to compare on; repeatable")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, help="tokens to generate a prompt")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport verify``; returns 1 if a check failed."""
    exporter()
    from specexport.verify.bundle import verify
    from specexport.verify.report import render

    with build_progress(Console(stderr=True)) as progress:
        report = verify(
            arguments.bundle,
            target=arguments.target,
            draft=arguments.draft,
            medusa=arguments.medusa,
            mlp_speculator=arguments.mlp_speculator,
            prompts=arguments.prompt,
            max_tokens=arguments.max_tokens,
            progress=Bars(progress),
        )
    if arguments.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(render(report))
    return 0 if report.passed else 1
