"""Helpers of the benchmarks: arguments, prompts, the machine, speeds, tables and files."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from specexport.runtime import Completion
from specexport.runtime.machine import cpu_features, cpu_name
from specexport.tables import Table

FEATURES = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")


def add_common_arguments(parser: argparse.ArgumentParser, **counts: int) -> None:
    """Adds the arguments common to benchmarks of the benchmark-size pair.

    ``counts`` has the benchmark's defaults of some of ``num_prompts``, ``prompt_tokens`` and ``new_tokens``.
    """
    parser.add_argument("--models", type=Path, default=Path("examples/models"), help="holds the demo models and heads")
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts/held_out.jsonl"))
    parser.add_argument("--work", type=Path, default=Path(".cache/bench"), help="keeps inflated models and bundles")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    for name, default in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def read_texts(prompts: Path) -> list[str]:
    """The prompts of a JSON Lines file."""
    return [json.loads(line)["text"] for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]


def machine(threads: int) -> dict[str, Any]:
    """The processor, the instruction sets that matter for the choice of kernels, the versions and the date."""
    features = cpu_features().split()
    return {
        "cpu": cpu_name(),
        "features": [name for name in FEATURES if name in features],
        "threads": threads,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnxruntime": onnxruntime.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def speed(done: Sequence[Completion]) -> float:
    """Tokens a second of decoding: all tokens over all seconds."""
    return sum(run.stats.output_tokens for run in done) / sum(run.stats.decode_seconds for run in done)


def acceptance_length(done: Sequence[Completion]) -> float:
    """Mean tokens committed per step."""
    return sum(run.stats.output_tokens for run in done) / sum(run.stats.steps for run in done)


def same_texts(done: Sequence[Completion], others: Sequence[Completion]) -> int:
    """The number of texts that are equal token for token."""
    return sum(a.token_ids == b.token_ids for a, b in zip(done, others, strict=True))


def new_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table with text columns followed by number columns."""
    return Table(title, (*words, *numbers), "l" * len(words) + "r")


def write_report(path: Path | None, report: Any) -> None:
    """Writes a report as JSON, unless ``path`` is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
