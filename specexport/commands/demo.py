"""Build the demo models' bundle and stream text from it, plainly and with speculation."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from rich.console import Console

from specexport.commands.build import Bars, build_progress, exporter
from specexport.commands.run import describe
from specexport.contract.errors import BuildError
from specexport.contract.manifest import MANIFEST_NAME
from specexport.runtime import Engine, SamplingParams

_PROMPT = 'class Server:\n    """Handle requests."""\n\n    def __init__(self, host, port):\n        self.host = host\n'
_ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport demo``."""
    parser.add_argument(
        "--models", type=Path, default=Path("examples/models"), metavar="DIR", help="holds demo-target and demo-draft"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("build/demo-bundle"), metavar="BUNDLE")
    parser.add_argument("-p", "--prompt", default=_PROMPT, help="text to continue")
    parser.add_argument("-n", "--max-tokens", type=int, default=160, help="tokens to generate")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport demo``."""
    target, draft = arguments.models / "demo-target", arguments.models / "demo-draft"
    if not (arguments.output / MANIFEST_NAME).is_file():
        if not target.is_dir() or not draft.is_dir():
            raise BuildError(
                f"{arguments.models}: no demo-target and demo-draft; run this in a checkout of specexport, or pass "
                "--models"
            )
        print(f"$ specexport build --target {target} --draft {draft} -o {arguments.output}", file=sys.stderr)
        module = exporter()
        with build_progress(Console(stderr=True)) as progress:
            module.build(
                module.BuildOptions(target=str(target), draft=str(draft), output=arguments.output), Bars(progress)
            )
    with Engine.load(arguments.output) as engine:
        sampled = SamplingParams(temperature=0.7, top_p=0.95, seed=2, max_tokens=arguments.max_tokens, ignore_eos=True)
        print(arguments.prompt, end="", flush=True)
        with engine.stream(arguments.prompt, sampled) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print("\n")
        print(describe(stream.stats))
        _compare(engine, arguments.prompt, sampled)
    return 0


def _compare(engine: Engine, prompt: str, sampled: SamplingParams) -> None:
    """Says how much sooner speculation is done, sampled and greedy, and that greedy says the same with it."""
    greedy = sampled.replace(temperature=0.0)
    for name, params in (("sampled", sampled), ("greedy", greedy)):
        runs = [[engine.generate(prompt, params, speculation=on) for on in (True, False)] for _ in range(_ROUNDS)]
        fast, plain = (
            statistics.median(run.stats.tokens_per_second for run in side) for side in zip(*runs, strict=True)
        )
        line = f"{name:11} {fast / plain:.2f}x: {fast:.0f} tokens/s with speculation, {plain:.0f} without"
        if params.greedy:
            same = all(one.token_ids == other.token_ids for one, other in runs)
            line += ", the same text token for token" if same else ", and a different text: run specexport verify"
        print(line)
