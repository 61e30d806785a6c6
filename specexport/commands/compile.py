"""Add engines to a bundle: its graphs compiled by TensorRT, or as onnxruntime runs them on a GPU.

Example:
    specexport compile qwen3/ --backend tensorrt --compute fp16 --engine-batch-sizes 1,4
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import msgspec

from specexport.building import needs_extra, progress_bars
from specexport.commands import BundleCommand
from specexport.commands.inspect import bytes_text
from specexport.exporter.engines.options import CompileOptions
from specexport.flags import add_flags, from_flags
from specexport.tables import Table, show

if TYPE_CHECKING:
    from specexport.exporter.engines.bundle import CompileReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport compile``."""
    add_flags(parser, BundleCommand, ("bundle",))
    add_flags(parser, CompileOptions)
    add_flags(parser, BundleCommand, ("json",))


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport compile``."""
    command = from_flags(BundleCommand, arguments)
    with needs_extra("compiling", "compile"):
        from specexport.exporter.engines.bundle import compile_bundle
    with progress_bars() as progress:
        report = compile_bundle(command.bundle, from_flags(CompileOptions, arguments), progress)
    if command.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        show(render(report))
    return 0


def render(report: CompileReport) -> Table:
    """A table of the compiled engines."""
    table = Table(
        f"engines of {report.runtime} {report.version} for {', '.join(report.compute_capabilities) or 'any GPU'}",
        ("engine", "profiles", "layers", "attention", "size", "time"),
        "lrrlr",
    )
    for engine in report.engines:
        attention = f"{engine.attentions} fused" if engine.attentions else "none, or spelt out in the graph"
        if engine.decomposed is not None:
            attention = f"{engine.attentions} decomposed: {engine.decomposed}"
        row = (engine.file, str(engine.profiles), str(engine.layers), attention)
        table.add_row(*row, bytes_text(engine.size), f"{engine.seconds:.1f} s")
    return table
