"""Suggest methods for a target; 'bench' measures those of a bundle.

Example:
    specexport suggest --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --draft Qwen/Qwen3-1.7B
"""

from __future__ import annotations

import argparse
import shlex

from specexport.building import exporter
from specexport.contract.folders import expanded
from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.reading import read_manifest
from specexport.tables import Table, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport suggest``."""
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="bundle, Hugging Face folder or hub id")
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="DIR_OR_ID",
        help="a smaller model to choose from; repeatable (default: none)",
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where the bundle will run")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport suggest``."""
    exporter()
    from specexport.exporter.suggest import suggest

    advice = suggest(arguments.target, arguments.draft, arguments.device)
    title = f"{arguments.target}: {advice.parameters:,} parameters, on a {arguments.device}"
    table = Table(title, ("method", "settings", "why"))
    for one in advice.suggestions:
        table.add_row(one.method, one.settings, one.why)
    show(table)
    if advice.active < advice.parameters:
        print(
            f"a token uses {advice.active:,} of the parameters: a step of several reads more experts than a plain one, "
            "so that speculation gains less than beside a dense model of that size; 'bench' measures it"
        )
    for name, reason in advice.refused.items():
        print(f"not {name}: {reason}")
    flags = [flag for one in advice.suggestions for flag in one.flags]
    target, there = arguments.target, expanded(arguments.target)
    if (there / MANIFEST_NAME).is_file():
        manifest = read_manifest(there)
        built = ", ".join(method.name for method in manifest.methods) or "no method"
        print(f"built for {built}; text is looked up in any case. Another method needs another build of its target:")
        target = manifest.target.source
    words = ["specexport", "build", "--target", target, *flags, "-o", "bundle/"]
    print("\n" + shlex.join(words))
    return 0
