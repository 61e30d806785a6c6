"""Flags that say how engines are compiled, and what became of them: for ``specexport build`` and ``compile``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from specexport.commands.inspect import bytes_text
from specexport.contract.errors import BuildError

if TYPE_CHECKING:
    from specexport.exporter.engines.bundle import CompileReport
    from specexport.exporter.engines.options import EngineOptions


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that say how engines are compiled; ``specexport build`` has them too."""
    group = parser.add_argument_group("engines", "for --backend tensorrt and tensorrt-rtx")
    group.add_argument(
        "--compute",
        choices=("fp32", "fp16", "bf16"),
        help="what activations and the KV cache are (default: fp32 for fp32 weights, else fp16)",
    )
    group.add_argument(
        "--compute-capability",
        metavar="CC[,CC...]",
        help="devices, such as 86,89,120 (default: all from 8.0 on that TensorRT-RTX knows; this one for TensorRT)",
    )
    group.add_argument("--workspace", type=int, metavar="MB", help="most scratch memory a layer may take")
    group.add_argument("--timing-cache", type=Path, metavar="FILE", help="TensorRT: keep what was timed for next time")
    group.add_argument(
        "--strip-weights",
        action="store_true",
        help="put weights in when an engine is loaded; TensorRT-RTX: for one device",
    )
    group.add_argument(
        "--version-compatible", action="store_true", help="TensorRT: let later minor versions run the engines"
    )
    group.add_argument(
        "--hardware-compatible", action="store_true", help="TensorRT: let every device from 8.0 on run the engines"
    )
    group.add_argument(
        "--engine-batch-sizes",
        metavar="B[,B...]",
        help="requests that steps are compiled for, such as 1,4; of the bundle's batch sizes (default: 1)",
    )
    group.add_argument(
        "--plain-profile",
        action="store_true",
        help="also compile for one token at a time, which stores the weights twice; else plain decoding is padded",
    )


_FLAGS = (
    "compute",
    "compute_capability",
    "workspace",
    "timing_cache",
    "strip_weights",
    "version_compatible",
    "hardware_compatible",
    "engine_batch_sizes",
    "plain_profile",
)


def asked_for(arguments: argparse.Namespace) -> str | None:
    """The first of these flags that was given, as it is written; None without any."""
    given = (name for name in _FLAGS if getattr(arguments, name) not in (None, False))
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """The options the flags say."""
    from specexport.exporter.engines.options import EngineOptions, capability

    listed = arguments.compute_capability
    return EngineOptions(
        runtime=arguments.backend,
        compute=arguments.compute,
        capabilities=tuple(map(capability, listed.split(","))) if listed is not None else (),
        workspace=arguments.workspace * 1_000_000 if arguments.workspace is not None else None,
        timing_cache=arguments.timing_cache,
        strip_weights=arguments.strip_weights,
        version_compatible=arguments.version_compatible,
        hardware_compatible=arguments.hardware_compatible,
        batch_sizes=_batch_sizes(arguments.engine_batch_sizes),
        plain=arguments.plain_profile,
    )


def _batch_sizes(listed: str | None) -> tuple[int, ...]:
    parts = [] if listed is None else [part.strip() for part in listed.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BuildError(f"engine_batch_sizes is {listed!r}; expected numbers with commas, such as 1,4")
    return tuple(sorted(set(map(int, parts)))) or (1,)


def render(report: CompileReport) -> Table:
    """What was compiled, an engine a row."""
    table = Table(
        title=f"engines of {report.runtime} {report.version} for {', '.join(report.compute_capabilities)}",
        title_justify="left",
        show_edge=False,
    )
    for name in ("engine", "profiles", "layers", "attention", "size", "time"):
        table.add_column(name, justify="left" if name in ("engine", "attention") else "right")
    for engine in report.engines:
        attention = f"{engine.attentions} fused" if engine.attentions else "none, or spelt out in the graph"
        if engine.decomposed is not None:
            attention = f"{engine.attentions} decomposed: {engine.decomposed}"
        row = (engine.file, str(engine.profiles), str(engine.layers), attention)
        table.add_row(*row, bytes_text(engine.size), f"{engine.seconds:.1f} s")
    return table
