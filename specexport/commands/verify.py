"""Check a bundle: files, graphs against the original model, speculation against plain decoding.

Example:
    specexport verify qwen3/ --prompt "Once upon a time" --report verify.html
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specexport import report as page
from specexport.building import exporter, progress_bars
from specexport.commands import add_report
from specexport.commands.draw import about
from specexport.contract.errors import RequestError
from specexport.contract.reading import read_manifest
from specexport.tables import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport verify``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder written by specexport build")
    parser.add_argument(
        "--target", metavar="DIR_OR_ID", help="where the original target is now (default: where it was built from)"
    )
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="METHOD.KEY=DIR",
        help="where a method's checkpoint is now, if it has moved, such as medusa.model=heads/; repeatable",
    )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt to compare on; repeatable (default: five texts)"
    )
    parser.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N", help="tokens to generate a prompt")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_report(parser, "--report")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport verify``; returns 1 if a check failed."""
    sources = {}
    for source in arguments.source:
        key, equals, sources[key] = source.partition("=")
        if not equals:
            raise RequestError(f"--source is {source!r}; expected METHOD.KEY=DIR, such as medusa.model=heads/")
    page.check_path("--report", arguments.report)
    exporter()
    from specexport.verify.bundle import verify
    from specexport.verify.report import numbers, render

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
        show(*render(report))
    if arguments.report is not None:
        parts: list[page.Part] = [*render(report), numbers(report)]
        agreement = {c.name: c.numbers["agreement"] for c in report.checks if "agreement" in c.numbers}
        if agreement:
            label = "share of positions at which the same token is preferred"
            parts.append(page.Figure("Agreement with the models", page.bars(label, {"": agreement}, ("all", 1.0))))
        if report.checks[0].passed:  # the files are intact, so there is a manifest to read
            parts += about(arguments.bundle, read_manifest(arguments.bundle))
        page.write(arguments.report, f"verify: {arguments.bundle}", parts)
    return 0 if report.passed else 1
