"""Build a bundle from a target and methods to speculate: a draft, Medusa heads, an MLP speculator, look-ups.

Examples:
    specexport build --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --precision int8 -o qwen3/
    specexport build --target meta-llama/Llama-3.2-1B --medusa heads/ --ngram --num-speculative-tokens 4,2 -o llama/
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specexport.building import exporter, progress_bars, warn_of_settings
from specexport.commands.compile import add_engine_arguments, engine_options, first_engine_flag, render
from specexport.commands.inspect import summary
from specexport.contract.engines import BACKENDS, ENGINE_RUNTIMES
from specexport.contract.errors import BuildError
from specexport.contract.methods import method_type
from specexport.contract.model import Model
from specexport.contract.reading import read_manifest
from specexport.method_flags import add_method_arguments, asked_methods
from specexport.tables import show

if TYPE_CHECKING:
    from specexport.exporter.engines.bundle import CompileReport
    from specexport.exporter.engines.options import EngineOptions

_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4", "fp8", "stored")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport build``."""
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="Hugging Face folder or hub id")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")
    methods = add_method_arguments(parser)
    methods.add_argument(
        "--posterior-threshold", type=float, default=0.09, metavar="E", help="epsilon of typical acceptance"
    )
    methods.add_argument("--posterior-alpha", type=float, default=0.3, metavar="A", help="alpha of typical acceptance")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--max-seq-len",
        type=int,
        metavar="S",
        help="tokens of the longest prompt and its output (default: the model's, at most 2048)",
    )
    sizes.add_argument("--max-batch-size", type=int, default=8, metavar="B", help="most concurrent requests")
    sizes.add_argument(
        "--inputs-embeds",
        action="store_true",
        help="let prompts hold embeddings instead of tokens, such as those of an audio or image encoder",
    )
    weights = parser.add_argument_group("weights")
    weights.add_argument(
        "--precision",
        choices=_PRECISIONS,
        help="how matrices are stored; stored: each as the checkpoint has it; fp8 pays only on GPUs of compute "
        "capability 8.9 or higher (default: fp32, or as the checkpoint is quantized)",
    )
    weights.add_argument(
        "--draft-precision",
        choices=_PRECISIONS,
        help="the same for the draft, Medusa heads or the speculator (default: int8, or int4 where the target is)",
    )
    weights.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="weights that share a scale in int8 and int4 (default: 32, which is also the most in int4 drafts)",
    )
    weights.add_argument(
        "--calibration-data",
        type=Path,
        metavar="FILE",
        help="text that int4 is rounded for, or JSON lines with text or messages (default: a text that ships)",
    )
    device = parser.add_argument_group("device")
    device.add_argument(
        "--backend",
        choices=BACKENDS,
        default="onnxruntime",
        help="what will run the bundle; all but onnxruntime run whole steps on a GPU",
    )
    device.add_argument(
        "--lowering",
        choices=("native", "portable"),
        default="native",
        help="portable: operators up to opset 20 only, for TensorRT 10.3 (JetPack 6) and Python 3.10; not for int4",
    )
    device.add_argument(
        "-tp",
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="processes of one host that share the target; on GPUs each has one of its own",
    )
    device.add_argument(
        "--no-compile",
        action="store_true",
        help="do not compile engines now; run specexport compile on the device later",
    )
    add_engine_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport build``."""
    methods = asked_methods(arguments)
    if arguments.draft_precision is not None and not any(
        method_type(method.name).stores_weights() for method in methods
    ):
        raise BuildError("--draft-precision was given without a draft, heads or a speculator to apply it to")
    module = exporter()
    options = module.BuildOptions(
        target=arguments.target,
        output=arguments.output,
        methods=methods,
        tensor_parallel=arguments.tensor_parallel,
        inputs_embeds=arguments.inputs_embeds,
        max_seq_len=arguments.max_seq_len,
        max_batch_size=arguments.max_batch_size,
        precision=arguments.precision,
        draft_precision=arguments.draft_precision,
        block_size=arguments.block_size,
        calibration_data=arguments.calibration_data,
        lowering=arguments.lowering,
        posterior_threshold=arguments.posterior_threshold,
        posterior_alpha=arguments.posterior_alpha,
        backend=arguments.backend,
        engines=_engines(arguments),
        overwrite=arguments.overwrite,
    )
    reports: list[CompileReport] = []
    with progress_bars() as progress:
        module.build(options, progress, reports.append)
    manifest = read_manifest(arguments.output)
    show(*map(render, reports), *summary(arguments.output, manifest))
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


def _engines(arguments: argparse.Namespace) -> EngineOptions | None:
    """Options for compiling engines now; None if there are none to compile."""
    flag = first_engine_flag(arguments)
    if arguments.backend not in ENGINE_RUNTIMES:
        if flag is not None or arguments.no_compile:
            raise BuildError(f"{flag or '--no-compile'} was given without --backend {' or '.join(ENGINE_RUNTIMES)}")
        return None
    if arguments.no_compile:
        if flag is not None:
            raise BuildError(f"{flag} was given with --no-compile; give it to specexport compile")
        return None
    return engine_options(arguments)
