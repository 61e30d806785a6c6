"""specexport and its peers on the same models, prompts and threads.

The peers are transformers, ONNX Runtime GenAI, OpenVINO GenAI and llama.cpp.

Each engine runs in a separate environment and process, greedily and without stopping at an end-of-text token, so that
all of them generate the same number of tokens:

    python -m benchmarks.peers.setup                        # once: the environments
    python -m benchmarks peers --target DIR --draft DIR     # convert the models, run the engines, print a table

`run_<engine>.py` are the processes, `job.py` defines their protocol, `compare.py` lets them take turns, `convert.py`
converts the models for each engine. This file has no imports that the engines' environments lack.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.tables import ENGINES

PRECISIONS = ("fp32", "int8", "int4")


def _words(allowed: tuple[str, ...], text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in allowed:
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(allowed)}")
    return words


def _engines(text: str) -> list[str]:
    return _words(tuple(ENGINES), text)


def _precisions(text: str) -> list[str]:
    return _words(PRECISIONS, text)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.strip()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `python -m benchmarks peers`."""
    parser.add_argument("--target", type=Path, required=True, help="folder of the target checkpoint")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft checkpoint")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=Path("examples/prompts/held_out.jsonl"),
        help="JSON lines with id, file and text",
    )
    parser.add_argument("--num-prompts", type=int, default=4, help="how many of them")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens to generate")
    parser.add_argument("--threads", type=int, default=2, help="for every engine")
    parser.add_argument("--precisions", type=_precisions, default=list(PRECISIONS), help="weights to run at")
    parser.add_argument("--k", type=_numbers, default=[3, 4, 6], help="tokens of drafts to try")
    parser.add_argument("--ngram-k", type=_numbers, default=[4, 8], help="of drafts that are looked up in the text")
    parser.add_argument("--repeats", type=int, default=2, help="turns of every prompt")
    parser.add_argument("--engines", type=_engines, default=list(ENGINES), help="engines to run")
    parser.add_argument("--cache", type=Path, default=Path(".cache/peers"), help="converted models")
    parser.add_argument(
        "--runs", type=Path, default=Path(".cache/peers/runs.jsonl"), help="keeps turns; what it has is not run again"
    )
    parser.add_argument("--minutes", type=float, default=60, help="begin no turn after so many")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")


def main(args: argparse.Namespace) -> int:
    """Run the comparison; 0 if every engine ran."""
    from benchmarks.peers.compare import compare

    return compare(args)
