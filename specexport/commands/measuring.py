"""What the commands that decode text to learn from it have in common: their flags, and the text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from specexport.building import exporter
from specexport.contract.errors import RequestError
from specexport.contract.manifest import Manifest
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from specexport.tuning.workloads import read_lines


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the bundle, the text, and how much of it is decoded."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder made by specexport build")
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="text like that to come, but not what it was trained on: text files, or .jsonl with a text a line",
    )
    parser.add_argument("--max-nodes", type=int, default=32, metavar="N", help="most tokens a step verifies")
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="how many prompts to decode")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="tokens of a prompt")
    parser.add_argument("-n", "--max-tokens", type=int, default=96, help="tokens to generate for each")
    parser.add_argument("--temperature", type=float, default=0.0, help="decode at this temperature; 0 is greedy")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--dry-run", action="store_true", help="print the result and leave the bundle as it is")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def open_to_tune(arguments: argparse.Namespace) -> Bundle:
    """Checks the numbers that say how much is measured, and opens the bundle to measure and to write to.

    Raises:
        SpecExportError: a number is too small, the exporter is not installed, or the bundle is not whole; says which.
    """
    for flag, least in (("max_nodes", 2), ("prompts", 1), ("prompt_tokens", 2), ("max_tokens", 2)):
        if getattr(arguments, flag) < least:
            raise RequestError(f"--{flag.replace('_', '-')} is {getattr(arguments, flag)}; expected {least} or more")
    if not arguments.dry_run:
        exporter()
    return Bundle.open(arguments.bundle)


def step_room(manifest: Manifest) -> int:
    """Tokens a step may have behind the longest context."""
    return max(graph.point.cache for graph in manifest.target.graph.points) - manifest.max_seq_len + 1


def usual_rows(arguments: argparse.Namespace, manifest: Manifest) -> int:
    """Rows of the cache half-way through the text that is decoded."""
    rows: int = min(arguments.prompt_tokens + arguments.max_tokens // 2, manifest.max_seq_len - 1)
    return rows


def decoded_with(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling parameters of the text that is decoded."""
    return SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=0, ignore_eos=True)


def read_prompts(engine: Engine, files: Sequence[Path], count: int, tokens: int) -> list[list[int]]:
    """Prompts of at most so many tokens: each line of a ``.jsonl``, and windows of the text of other files.

    Raises:
        RequestError: a file is missing, is no text, or has a line without a text; names it.
    """
    limit = min(tokens, engine.manifest.max_seq_len // 2)
    prompts: list[list[int]] = []
    for path in files:
        if path.suffix == ".jsonl":
            prompts += [engine.encode(line.text)[:limit] for line in read_lines(path)]
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}: {error}; expected a text file or .jsonl") from error
        ids = engine.encode(text) if text else []
        prompts += [ids[start : start + limit] for start in range(0, max(1, len(ids) - limit), 2 * limit)]
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    if not prompts:
        raise RequestError(f"{', '.join(map(str, files))}: no text of two tokens or more")
    # Spread over all that was given.
    step = max(1, len(prompts) // count)
    return prompts[::step][:count]
