"""Build a bundle from a target and ways to speculate: a draft, Medusa heads, an MLP speculator, text that repeats."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from specexport.commands.engines import add_engine_arguments, asked_for, engine_options, render
from specexport.commands.inspect import summary
from specexport.contract.engines import BACKENDS, ENGINE_RUNTIMES
from specexport.contract.errors import BuildError
from specexport.contract.reading import read_manifest

if TYPE_CHECKING:
    from specexport.exporter.engines.bundle import CompileReport
    from specexport.exporter.engines.options import EngineOptions

_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport build``."""
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="Hugging Face folder or hub id")
    parser.add_argument("--draft", metavar="DIR_OR_ID", help="smaller model with the same tokenizer")
    parser.add_argument(
        "--universal-draft",
        metavar="DIR_OR_ID",
        help="smaller model with another tokenizer, translated through text; costs acceptance, so prefer --draft",
    )
    parser.add_argument(
        "--self-draft-layers", type=int, metavar="N", help="propose with the target's own first N layers and its head"
    )
    parser.add_argument("--medusa", metavar="DIR", help="Medusa heads of the target (specexport train medusa)")
    parser.add_argument(
        "--draft-medusa", metavar="DIR", help="Medusa heads of the draft, which then proposes a tree in one pass"
    )
    parser.add_argument(
        "--mlp-speculator",
        metavar="DIR_OR_ID",
        help="MLP speculator of the target: an ibm-fms accelerator, or specexport train mlp-speculator",
    )
    parser.add_argument(
        "--ngram", action="store_true", help="propose what followed the last tokens earlier in the text"
    )
    parser.add_argument("--prompt-lookup-max", type=int, metavar="N", help="most tokens --ngram matches (default: 4)")
    parser.add_argument("--prompt-lookup-min", type=int, metavar="N", help="fewest (default: 2)")
    parser.add_argument(
        "--suffix", action="store_true", help="propose the most frequent continuation of the longest suffix seen before"
    )
    parser.add_argument(
        "--hypothesis", action="store_true", help="verify texts that requests give up front (run --hypothesis)"
    )
    parser.add_argument(
        "--lookahead",
        nargs="?",
        const="cpu",
        type=_lookahead,
        metavar="W,N,G",
        help="lookahead decoding: columns of the window, tokens of an n-gram, guesses a step; or gpu for the paper's "
        "sizes (alone: 4,3,4, for CPUs)",
    )
    parser.add_argument(
        "--no-lookahead-seeding", action="store_true", help="do not start --lookahead's pool with the prompt's n-grams"
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=_draft_tokens,
        metavar="K[,K...]",
        help="draft tokens a step (default: 4; 8,4,2 for --ngram and --suffix, 16,8,4,2 for --hypothesis): a chain, or "
        "the tree of that size that suits the heads; of several the first is the default and requests may choose the "
        "others",
    )
    parser.add_argument(
        "--tree",
        action="append",
        default=[],
        metavar="FILE_OR_PRESET",
        help="token tree to verify: JSON or a preset's name; repeatable, the first is the default. Of the target's "
        "heads if there are some",
    )
    parser.add_argument(
        "--posterior-threshold", type=float, default=0.09, metavar="E", help="epsilon of typical acceptance"
    )
    parser.add_argument("--posterior-alpha", type=float, default=0.3, metavar="A", help="alpha of typical acceptance")
    parser.add_argument(
        "--inputs-embeds",
        action="store_true",
        help="let prompts hold embeddings in the place of tokens, as an encoder of sounds or images makes them",
    )
    parser.add_argument(
        "--max-seq-len", type=int, metavar="S", help="longest prompt and output (default: the model's, at most 2048)"
    )
    parser.add_argument(
        "--max-batch-size", type=int, default=8, metavar="B", help="most requests that run at once (default: 8)"
    )
    parser.add_argument(
        "--precision",
        choices=_PRECISIONS,
        default="fp32",
        help="how matrices are stored; fp8 pays on GPUs of compute capability 8.9 or higher only",
    )
    parser.add_argument(
        "--draft-precision",
        choices=_PRECISIONS,
        help="of the draft, of Medusa heads and of the speculator (default: int8, or int4 where the target is)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="weights that share a scale in int8 and int4 (default: 32; in int4 that only proposes, at most 32)",
    )
    parser.add_argument(
        "--lowering",
        choices=("native", "portable"),
        default="native",
        help="portable: operators up to opset 20 only, for TensorRT 10.3 (JetPack 6) and Python 3.10; not for int4",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="onnxruntime",
        help="what the bundle is for; all but the first keep whole steps on a GPU, the last two compile engines for it",
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="leave compiling the engines to specexport compile, on the device that will run them",
    )
    add_engine_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="then time its steps on this machine, so that batches speculate as much as pays here (tune batch)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")


def _draft_tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number or several with commas between") from None


def _lookahead(text: str) -> str | tuple[int, int, int]:
    if "," not in text:
        return text
    try:
        window, ngram, guesses = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither W,N,G nor a preset") from None
    return window, ngram, guesses


def exporter() -> types.ModuleType:
    """The exporter, or an error that names the extra it needs.

    Raises:
        BuildError: the ``[export]`` extra is not installed, or Python is older than 3.11.
    """
    if sys.version_info < (3, 11):
        raise BuildError(
            f"building needs Python 3.11 or newer; this is {sys.version_info.major}.{sys.version_info.minor}. "
            "Bundles run on 3.10, so build elsewhere and copy the folder"
        )
    try:
        from specexport.exporter import build
    except ImportError as error:
        raise BuildError(
            f"building needs the [export] extra ({error}); install it with: pip install 'specexport[cpu,export]'"
        ) from error
    return build


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport build``."""
    sources = (arguments.draft, arguments.universal_draft, arguments.medusa, arguments.mlp_speculator)
    if arguments.draft_precision is not None and all(source is None for source in sources):
        raise BuildError("--draft-precision was given without --draft, --medusa or --mlp-speculator, which it is for")
    lookup = {
        name: getattr(arguments, name)
        for name in ("prompt_lookup_max", "prompt_lookup_min")
        if getattr(arguments, name) is not None
    }
    if lookup and not arguments.ngram:
        raise BuildError(f"--{next(iter(lookup)).replace('_', '-')} was given without --ngram, which it is for")
    if arguments.no_lookahead_seeding and arguments.lookahead is None:
        raise BuildError("--no-lookahead-seeding was given without --lookahead, which it is for")
    module = exporter()
    wanted = arguments.num_speculative_tokens or (None,)
    options = module.BuildOptions(
        target=arguments.target,
        output=arguments.output,
        draft=arguments.draft,
        universal_draft=arguments.universal_draft,
        self_draft_layers=arguments.self_draft_layers,
        medusa=arguments.medusa,
        draft_medusa=arguments.draft_medusa,
        mlp_speculator=arguments.mlp_speculator,
        ngram=arguments.ngram,
        suffix=arguments.suffix,
        hypothesis=arguments.hypothesis,
        lookahead=arguments.lookahead,
        lookahead_seeding=not arguments.no_lookahead_seeding,
        **lookup,
        num_speculative_tokens=wanted[0],
        speculative_choices=wanted[1:],
        trees=tuple(arguments.tree),
        inputs_embeds=arguments.inputs_embeds,
        max_seq_len=arguments.max_seq_len,
        max_batch_size=arguments.max_batch_size,
        precision=arguments.precision,
        draft_precision=arguments.draft_precision,
        block_size=arguments.block_size,
        lowering=arguments.lowering,
        posterior_threshold=arguments.posterior_threshold,
        posterior_alpha=arguments.posterior_alpha,
        backend=arguments.backend,
        engines=_engines(arguments),
        overwrite=arguments.overwrite,
    )
    console = Console(stderr=True)
    reports: list[CompileReport] = []
    with build_progress(console) as progress:
        module.build(options, Bars(progress), reports.append)
        if arguments.measure:
            from specexport.tuning.batch import measure_into

            measure_into(arguments.output, progress=Bars(progress))
    for report in reports:
        Console().print(render(report))
    Console().print(summary(arguments.output, read_manifest(arguments.output)))
    return 0


def _engines(arguments: argparse.Namespace) -> EngineOptions | None:
    """How to compile, if engines are to be compiled now."""
    asked = asked_for(arguments)
    if arguments.backend not in ENGINE_RUNTIMES:
        if asked is not None or arguments.no_compile:
            raise BuildError(f"{asked or '--no-compile'} was given without --backend {' or '.join(ENGINE_RUNTIMES)}")
        return None
    if arguments.no_compile:
        if asked is not None:
            raise BuildError(f"{asked} was given with --no-compile; give it to specexport compile")
        return None
    return engine_options(arguments)


def build_progress(console: Console) -> Progress:
    """The progress display of a build."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console
    )


class Bars:
    """Shows the exporter's progress reports, a bar a step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        """Called by the exporter with a step's name, how much is done, and how much there is."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done, total=total)
