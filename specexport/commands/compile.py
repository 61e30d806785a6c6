"""Add engines to a bundle: its graphs compiled by TensorRT, or as onnxruntime runs them on a GPU.

Example:
    specexport compile qwen3/ --backend tensorrt --compute fp16 --engine-batch-sizes 1,4
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from specexport.building import needs_extra, progress_bars
from specexport.commands.inspect import bytes_text
from specexport.contract.engines import ENGINE_RUNTIMES
from specexport.contract.errors import BuildError
from specexport.tables import Table, show

if TYPE_CHECKING:
    from specexport.exporter.engines.bundle import CompileReport
    from specexport.exporter.engines.options import EngineOptions

_FLAGS: dict[str, dict[str, Any]] = {
    "--compute": {
        "choices": ("fp32", "fp16", "bf16"),
        "help": "type of activations and the KV cache (default: fp32 for fp32 weights, else fp16)",
    },
    "--compute-capability": {
        "metavar": "CC[,CC...]",
        "help": "devices to compile for, such as 86,89,120 (default: TensorRT-RTX, all it knows from 8.0 on; TensorRT, "
        "the device of this machine)",
    },
    "--engine-batch-sizes": {
        "metavar": "B[,B...]",
        "help": "batch sizes to compile for, such as 1,4, of the bundle's (default: 1)",
    },
    "--plain-profile": {
        "action": "store_true",
        "help": "also compile for one token at a time; stores the weights twice, but plain decoding is not padded",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport compile``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder written by specexport build")
    parser.add_argument(
        "--backend", choices=ENGINE_RUNTIMES, required=True, help="the library that compiles the engines and runs them"
    )
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport compile``."""
    with needs_extra("compiling", "compile"):
        from specexport.exporter.engines.bundle import compile_bundle
    with progress_bars() as progress:
        report = compile_bundle(arguments.bundle, engine_options(arguments), progress)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        show(render(report))
    return 0


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of compiling engines; ``specexport build`` has them too."""
    group = parser.add_argument_group(
        "engines", "for --backend tensorrt and tensorrt-rtx; --compute for onnxruntime-cuda too"
    )
    for flag, settings in _FLAGS.items():
        group.add_argument(flag, **settings)


def first_engine_flag(arguments: argparse.Namespace) -> str | None:
    """The first flag of :func:`add_engine_arguments` that was given; None if there is none."""
    values = vars(arguments)
    return next((flag for flag in _FLAGS if values[flag[2:].replace("-", "_")] not in (None, False)), None)


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """The options from the flags."""
    from specexport.exporter.engines.options import EngineOptions, capability

    listed = arguments.compute_capability
    return EngineOptions(
        runtime=arguments.backend,
        compute=arguments.compute,
        capabilities=tuple(map(capability, listed.split(","))) if listed is not None else (),
        batch_sizes=_batch_sizes(arguments.engine_batch_sizes),
        plain=arguments.plain_profile,
    )


def _batch_sizes(listed: str | None) -> tuple[int, ...]:
    parts = [] if listed is None else [part.strip() for part in listed.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BuildError(f"engine_batch_sizes is {listed!r}; expected numbers with commas, such as 1,4")
    return tuple(sorted(set(map(int, parts)))) or (1,)


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
