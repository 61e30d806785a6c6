"""Build a bundle from a target and methods to speculate: a draft, Medusa heads, an MLP speculator, look-ups.

Examples:
    specexport build --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --precision int8 -o qwen3/
    specexport build --target meta-llama/Llama-3.2-1B --medusa heads/ --ngram --num-speculative-tokens 4,2 -o llama/
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from specexport.building import exporter, progress_bars, warn_of_settings
from specexport.commands.compile import render
from specexport.commands.inspect import summary
from specexport.contract.engines import ENGINE_RUNTIMES
from specexport.contract.errors import BuildError
from specexport.contract.methods import method_type
from specexport.contract.model import Model
from specexport.contract.options import options
from specexport.contract.reading import read_manifest
from specexport.exporter.engines.options import CompileOptions
from specexport.exporter.options import BuildOptions, BuildSettings
from specexport.flags import (
    add_flags,
    add_method_arguments,
    asked_methods,
    check_flags,
    flag_values,
    from_flags,
    group_of,
)
from specexport.tables import show

if TYPE_CHECKING:
    from specexport.exporter.engines.bundle import CompileReport

_FIRST = ("target", "output", "overwrite")
_ENGINES = [name for name in CompileOptions.__struct_fields__ if name != "backend"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport build``."""
    add_flags(parser, BuildOptions, _FIRST)
    add_method_arguments(parser)
    add_flags(parser, BuildSettings)
    add_flags(parser, BuildOptions, options(BuildOptions).keys() - options(BuildSettings).keys() - set(_FIRST))
    later = "do not compile engines now; run specexport compile on the device later"
    group_of(parser, "device").add_argument("--no-compile", action="store_true", help=later)
    add_flags(parser, CompileOptions, _ENGINES)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport build``."""
    methods = asked_methods(arguments)
    if hasattr(arguments, "draft_precision") and not any(
        method_type(method.name).stores_weights() for method in methods
    ):
        raise BuildError("--draft-precision was given without a draft, heads or a speculator to apply it to")
    check_flags(BuildOptions, flag_values(BuildOptions, arguments))
    module = exporter()
    build_options = from_flags(BuildOptions, arguments, methods=methods, engines=_engines(arguments))
    reports: list[CompileReport] = []
    with progress_bars() as progress:
        module.build(build_options, progress, reports.append)
    output = build_options.output
    manifest = read_manifest(output)
    show(*map(render, reports), *summary(output, manifest))
    warn_of_settings(manifest)
    for role, model in manifest.models.items():
        before = model.precision.quantized_before
        if before is not None and before.converted_rms_error is not None:
            print(
                f"warning: {before.converted} of the {role}'s {before.format} matrices were rounded again, to "
                f"{_converted_to(model)}, as their scales do not fit: error {before.converted_rms_error:.2%}",
                file=sys.stderr,
            )
    return 0


def _converted_to(model: Model) -> str:
    """The precision of matrices that were rounded again."""
    return "int8" if model.precision.weights == "stored" else model.precision.weights


def _engines(arguments: argparse.Namespace) -> CompileOptions | None:
    """Options for compiling engines now; None if there are none to compile."""
    chosen = {name: getattr(arguments, name) for name in _ENGINES if hasattr(arguments, name)}
    flag = next((f"--{name.replace('_', '-')}" for name in chosen), None)
    backend, later = getattr(arguments, "backend", None), arguments.no_compile
    if backend not in ENGINE_RUNTIMES:
        if flag is not None or later:
            raise BuildError(f"{flag or '--no-compile'} was given without --backend {' or '.join(ENGINE_RUNTIMES)}")
        return None
    if later and flag is not None:
        raise BuildError(f"{flag} was given with --no-compile; give it to specexport compile")
    return None if later else from_flags(CompileOptions, arguments)
