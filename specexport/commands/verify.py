"""Check a bundle: files, graphs against the original model, speculation against plain decoding.

Example:
    specexport verify qwen3/ --prompt "Once upon a time" --report verify.html
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from specexport import report as page
from specexport.building import exporter, progress_bars
from specexport.commands import BundleCommand
from specexport.commands.draw import about
from specexport.contract.errors import RequestError
from specexport.contract.options import option
from specexport.contract.reading import read_manifest
from specexport.tables import show


class Command(BundleCommand, frozen=True, kw_only=True):
    """Options of ``specexport verify``.

    Attributes:
        target: where the original target is now (default: where it was built from).
        source: where a method's checkpoint is now, if it has moved, such as medusa.model=heads/.
        prompt: a prompt to compare on (default: five texts).
        max_tokens: tokens to generate a prompt.
        report: also write a page with these tables and charts, which opens offline (default: none).
    """

    target: Annotated[str | None, option("DIR_OR_ID")] = None
    source: Annotated[tuple[str, ...], option("METHOD.KEY=DIR", repeat=True)] = ()
    prompt: Annotated[tuple[str, ...], option("TEXT", repeat=True)] = ()
    max_tokens: Annotated[int, option("N", short="-n", ge=1)] = 64
    report: Annotated[Path | None, option("FILE.html")] = None


def main(command: Command) -> int:
    """Runs ``specexport verify``; returns 1 if a check failed."""
    sources = {}
    for source in command.source:
        key, equals, sources[key] = source.partition("=")
        if not equals:
            raise RequestError(f"--source is {source!r}; expected METHOD.KEY=DIR, such as medusa.model=heads/")
    page.check_path("--report", command.report)
    exporter()
    from specexport.verify.bundle import numbers, render, verify

    with progress_bars() as progress:
        report = verify(
            command.bundle,
            target=command.target,
            sources=sources,
            prompts=command.prompt or None,
            max_tokens=command.max_tokens,
            progress=progress,
        )
    if command.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(*render(report))
    if command.report is not None:
        parts: list[page.Part] = [*render(report), numbers(report)]
        agreement = {c.name: c.numbers["agreement"] for c in report.checks if "agreement" in c.numbers}
        if agreement:
            label = "share of positions at which the same token is preferred"
            parts.append(page.Figure("Agreement with the models", page.bars(label, {"": agreement}, ("all", 1.0))))
        if report.checks[0].passed:  # the files are intact, so there is a manifest to read
            parts += about(command.bundle, read_manifest(command.bundle))
        page.write(command.report, f"verify: {command.bundle}", parts)
    return 0 if report.passed else 1
