"""Suggest methods for a model, or a bundle's target; 'bench' measures those of a bundle.

Examples:
    specexport suggest Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --draft Qwen/Qwen3-1.7B
    specexport suggest qwen3/
"""

from __future__ import annotations

import argparse
import shlex
from typing import Annotated, Literal

from specexport.building import needs_extra
from specexport.commands import add_target
from specexport.contract.folders import expanded
from specexport.contract.manifest import MANIFEST_NAME, Manifest
from specexport.contract.methods import method_name, text_methods
from specexport.contract.options import Options, option
from specexport.contract.reading import read_manifest
from specexport.flags import add_flags, from_flags
from specexport.tables import Table, show


class _SuggestCommand(Options, frozen=True, kw_only=True):
    """Options of ``specexport suggest``.

    Attributes:
        draft: a smaller model to choose from (default: none).
        device: where the bundle will run.
    """

    draft: Annotated[tuple[str, ...], option("DIR_OR_ID", repeat=True)] = ()
    device: Literal["cpu", "gpu"] = "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport suggest``."""
    add_target(parser, "bundle, Hugging Face folder or hub id")
    add_flags(parser, _SuggestCommand)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport suggest``."""
    command = from_flags(_SuggestCommand, arguments)
    target = arguments.target or arguments.model
    with needs_extra(f"{target}: reading this model", "export"):
        from specexport.exporter.suggest import suggest

        advice = suggest(target, command.draft, command.device)
    folder = expanded(target)
    manifest = read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None
    table = Table(
        f"{target}: {advice.parameters:,} parameters, on a {command.device}",
        ("method", *([] if manifest is None else ["in this bundle"]), "settings", "why"),
    )
    for suggestion in advice.suggestions:
        state = [] if manifest is None else [_state(manifest, suggestion.method)]
        table.add_row(suggestion.method, *state, suggestion.settings, suggestion.why)
    show(table)
    if advice.active < advice.parameters:
        print(
            f"a token uses {advice.active:,} of the parameters: a step of several reads more experts than a plain one, "
            "so that speculation gains less than beside a dense model of that size; 'bench' measures it"
        )
    for name, reason in advice.refused.items():
        print(f"not {name}: {reason}")
    flags = [flag for suggestion in advice.suggestions for flag in suggestion.flags]
    if manifest is None:
        print("\n" + _build(target, flags))
        return 0
    built = ", ".join(method.name for method in manifest.methods) or "no method"
    print(f"\nbuilt for {built}; text is looked up in any case. What pays on this machine:")
    print(shlex.join(["specexport", "bench", target, "--methods", "all"]))
    stored = manifest.target.precision.weights
    flags += [] if stored == "fp32" else ["--precision", stored]
    print("\nanother method needs another build of its target, for instance:\n" + _build(manifest.target.source, flags))
    return 0


def _state(manifest: Manifest, name: str) -> str:
    if any(method.name == name for method in manifest.methods):
        return "built"
    return "always" if any(method_name(kind) == name for kind in text_methods()) else "not built"


def _build(target: str, flags: list[str]) -> str:
    return shlex.join(["specexport", "build", "--target", target, *flags, "-o", "bundle/"])
