"""Build the demo models' bundle and stream text from it, plainly and with speculation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from specexport.commands.build import Bars, build_progress, exporter
from specexport.commands.run import describe
from specexport.contract.errors import BuildError
from specexport.contract.manifest import MANIFEST_NAME
from specexport.runtime import Completion, Engine, SamplingParams

_PROMPT = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n'


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
        params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
        engine.generate(arguments.prompt, params.replace(max_tokens=8))  # warm up: buffers are made on first use
        print(arguments.prompt, end="", flush=True)
        with engine.stream(arguments.prompt, params) as stream:
            tokens: list[int] = []
            for chunk in stream:
                tokens += chunk.token_ids
                print(chunk.text, end="", flush=True)
            print("\n")
        plain = engine.generate(arguments.prompt, params, speculation=False)
        print(describe(stream.stats))
        _compare(plain, tokens, stream.stats.tokens_per_second)
    return 0


def _compare(plain: Completion, tokens: list[int], speculative_rate: float) -> None:
    same = list(plain.token_ids) == tokens
    rate = plain.stats.tokens_per_second
    print(
        f"speed-up    {speculative_rate / rate:.2f}x: {speculative_rate:.0f} tokens/s against {rate:.0f} plain, "
        f"{'the same text' if same else 'a different text'} token for token"
    )
