"""Commands that build and train: ``build``, ``compile`` and ``train``."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import TYPE_CHECKING

from specexport.building import exporter, needs_extra, progress_bars, warn_of_settings
from specexport.commands import BundleOptions, Command
from specexport.commands.flags import (
    UsageError,
    add_flags,
    add_method_arguments,
    flag_values,
    from_flags,
    group_of,
    requested_methods,
)
from specexport.commands.inspect import summary
from specexport.contract.engines import ENGINE_RUNTIMES
from specexport.contract.errors import TrainError
from specexport.contract.methods import known, method_type, module_of, part
from specexport.contract.options import dashed, options
from specexport.contract.reading import read_manifest
from specexport.exporter.options import BuildOptions, BuildSettings, CompileOptions, require_effect
from specexport.tables import Table, bytes_text, show
from specexport.training.options import Training

if TYPE_CHECKING:
    from specexport.exporter.engines.bundle import CompileReport

_FIRST = ("target", "output", "overwrite")
_ENGINES = [name for name in CompileOptions.__struct_fields__ if name != "backend"]


def build_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport build``."""
    add_flags(parser, BuildOptions, _FIRST)
    add_method_arguments(parser)
    add_flags(parser, BuildSettings)
    add_flags(parser, BuildOptions, options(BuildOptions).keys() - options(BuildSettings).keys() - set(_FIRST))
    later = "do not compile engines now; run specexport compile on the device later"
    group_of(parser, "device").add_argument("--no-compile", action="store_true", help=later)
    add_flags(parser, CompileOptions, _ENGINES)


def build_command(arguments: argparse.Namespace) -> int:
    """Build a bundle from a target and methods of speculation: a draft, Medusa heads, an MLP speculator, look-ups.

    Examples:
        specexport build --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --precision int8 -o qwen3/
        specexport build --target meta-llama/Llama-3.2-1B --medusa heads/ --ngram --num-speculative-tokens 4,2 -o llama/
    """
    methods = requested_methods(arguments)
    require_effect(flag_values(BuildOptions, arguments), methods)
    build_options = from_flags(BuildOptions, arguments, methods=methods, engines=_engines(arguments))
    module = exporter()
    reports: list[CompileReport] = []
    with progress_bars() as progress:
        module.build(build_options, progress, reports.append)
    output = build_options.output
    manifest = read_manifest(output)
    show(*map(render, reports), *summary(output, manifest))
    warn_of_settings(manifest)
    for role, model in manifest.models.items():
        if role != "target" and model.parameters >= manifest.target.parameters:
            print(
                f"warning: the {manifest.model_names[role]} has {model.parameters:,} parameters and the target "
                f"{manifest.target.parameters:,}; a draft pays if it is several times smaller (were they swapped?)",
                file=sys.stderr,
            )
        before = model.precision.quantized_before
        if before is not None and before.converted_rms_error is not None:
            name, weights = manifest.model_names[role], model.precision.weights
            print(
                f"warning: {before.converted} of the {name}'s {before.format} matrices were rounded again, to "
                f"{'int8' if weights == 'stored' else weights}, as their scales do not fit: error "
                f"{before.converted_rms_error:.2%}",
                file=sys.stderr,
            )
    return 0


def _engines(arguments: argparse.Namespace) -> CompileOptions | None:
    """The options for compiling engines now; None if there are none to compile."""
    chosen = {name: getattr(arguments, name) for name in _ENGINES if hasattr(arguments, name)}
    flag = next(map(dashed, chosen), None)
    backend, later = getattr(arguments, "backend", None), arguments.no_compile
    if backend not in ENGINE_RUNTIMES:
        if flag is not None or later:
            raise UsageError(f"{flag or '--no-compile'} was given without --backend {' or '.join(ENGINE_RUNTIMES)}")
        return None
    if later and flag is not None:
        raise UsageError(f"{flag} was given with --no-compile; give it to specexport compile")
    return None if later else from_flags(CompileOptions, arguments)


def compile_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport compile``."""
    add_flags(parser, BundleOptions, ("bundle",))
    add_flags(parser, CompileOptions)
    add_flags(parser, BundleOptions, ("json",))


def compile_command(arguments: argparse.Namespace) -> int:
    """Add engines to a bundle: its graphs compiled by TensorRT, or rewritten for onnxruntime on a GPU.

    Example:
        specexport compile qwen3/ --backend tensorrt --compute fp16 --engine-batch-sizes 1,4
    """
    command = from_flags(BundleOptions, arguments)
    with needs_extra("compiling", "compile"):
        from specexport.exporter.engines.bundle import compile_bundle
    with progress_bars() as progress:
        report = compile_bundle(command.bundle, from_flags(CompileOptions, arguments), progress)
    command.show(report, render(report))
    return 0


def render(report: CompileReport) -> Table:
    """A table of the compiled engines."""
    table = Table(
        f"engines of {f'{report.runtime} {report.version}'.rstrip()} for "
        f"{', '.join(report.compute_capabilities) or 'any GPU'}",
        ("engine", "profiles", "layers", "attention", "size", "time"),
        "lrrlr",
    )
    for engine in report.engines:
        attention = f"{engine.attentions} fused" if engine.attentions else "none, or spelled out in the graph"
        if engine.decomposed is not None:
            attention = f"{engine.attentions} decomposed: {engine.decomposed}"
        row = (engine.file, str(engine.profiles), str(engine.layers), attention)
        table.add_row(*row, bytes_text(engine.size), f"{engine.seconds:.1f} s")
    return table


def train_flags(parser: argparse.ArgumentParser) -> None:
    """Train Medusa heads, an MLP speculator, an EAGLE-3 or DFlash draft, or a draft model for a target.

    Example:
        specexport train medusa --target Qwen/Qwen3-0.6B --data texts.jsonl -o heads/
    """
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for name in known():
        training: Training | None = getattr(module_of(method_type(name)), "TRAINING", None)
        if training is None:
            continue
        word = training.command
        example = f"specexport train {word} --target Qwen/Qwen3-0.6B --data texts.jsonl -o {word}/{training.example}"

        def flags(command: argparse.ArgumentParser, training: Training = training) -> None:
            add_flags(command, training.options)
            command.add_argument("--json", action="store_true", help="print the record of the training as JSON")

        main = partial(_train, name, training)
        Command(word, flags, main, f"{training.summary}\n\nExample:\n    {example}").add_to(kinds)


def _train(method: str, training: Training, arguments: argparse.Namespace) -> int:
    if sys.version_info < (3, 11):
        raise TrainError(
            f"training needs Python 3.11 or newer; this is {sys.version_info.major}.{sys.version_info.minor}"
        )
    with needs_extra("training", "train"):
        module = part(method_type(method), "train")
    log = partial(print, file=sys.stderr)
    train = getattr(module, f"train_{training.command.replace('-', '_')}")
    record = train(from_flags(training.options, arguments), log)
    if arguments.json:
        print(json.dumps(record))
    else:
        show(*training.report(record))
    return 0
