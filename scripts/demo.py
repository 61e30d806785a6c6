"""Build the bundle of the demo models and stream text from it, plainly and with speculation."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from specexport.building import damage
from specexport.cli import main as specexport
from specexport.contract.errors import SpecExportError
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN

_PROMPT = 'class Server:\n    """Handle requests."""\n\n    def __init__(self, host, port):\n        self.host = host\n'
_ROUNDS = 9
_HELPERS = {
    "draft_model": "demo-draft",
    "medusa": "demo-medusa",
    "eagle3": "demo-eagle3",
    "dflash": "demo-dflash",
}
"""The demo model of each method."""


def main() -> None:
    """Builds the bundle if it does not exist, and decodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--method", choices=tuple(_HELPERS), default="draft_model", help="method of speculation (default: draft_model)"
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=Path("examples/models"),
        metavar="DIR",
        help="folder of the demo models (default: examples/models)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="BUNDLE", help="bundle to build (default: build/demo-METHOD)"
    )
    parser.add_argument("-p", "--prompt", default=_PROMPT, help="text to continue (default: the start of a class)")
    parser.add_argument("-n", "--max-tokens", type=int, default=160, help="tokens to generate (default: 160)")
    arguments = parser.parse_args()
    name = _HELPERS[arguments.method]
    target, helper = arguments.models / "demo-target", arguments.models / name
    bundle = arguments.output or Path("build") / f"demo-{arguments.method.replace('_', '-')}"
    if damage(bundle, check_hashes=False) is not None:
        if not target.is_dir() or not helper.is_dir():
            sys.exit(
                f"{arguments.models}: no demo-target and {name}; run this in a clone of specexport, or pass --models"
            )
        words = ["build", "--target", str(target), "--method", f"{arguments.method}:{helper}", "-o", str(bundle)]
        print("$ specexport", *words, file=sys.stderr)
        if code := specexport([*words, "--overwrite"]):
            sys.exit(code)
    with Engine.load(bundle) as engine:
        sampled = SamplingParams(temperature=0.7, top_p=0.95, seed=2, max_tokens=arguments.max_tokens, ignore_eos=True)
        print(arguments.prompt, end="", flush=True)
        with engine.stream(arguments.prompt, sampled) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print("\n")
        print(_compared(engine, arguments.prompt, sampled))
        if engine.inexact:
            print(f"Kernels: {engine.inexact}.")


def _compared(engine: Engine, prompt: str, params: SamplingParams) -> str:
    """Describes the speed-up over plain decoding and whether greedy texts are equal."""
    runs = [[engine.generate(prompt, params, speculation) for speculation in (None, PLAIN)] for _ in range(_ROUNDS)]
    fast, plain = (statistics.median(run.stats.tokens_per_second for run in side) for side in zip(*runs, strict=True))
    length = statistics.mean(run.stats.output_tokens / run.stats.steps for run, _ in runs)
    greedy = params.replace(temperature=0.0)
    speculative, without = (engine.generate(prompt, greedy, speculation).token_ids for speculation in (None, PLAIN))
    return (
        f"With speculation {fast:.0f} tokens a second, without it {plain:.0f}: {fast / plain:.1f} times as fast, as a "
        f"step gives {length:.1f} tokens instead of one.\nAt temperature 0 both say "
        + ("the same, token for token." if speculative == without else "different texts: run specexport verify.")
    )


if __name__ == "__main__":
    try:
        main()
    except SpecExportError as error:
        sys.exit(f"demo: error: {error}")
