"""The effect of precisions on models: KL divergence from fp32, perplexity and equal first choices over a fixed text.

Each model is built at each precision, and the build measures it. GGUF files of the same model, such as llama.cpp's
Q4_K_M, are dequantized by transformers: only weights are compared, not another engine's arithmetic. Results are stored
in a file, from which ``python -m scripts.docs`` writes the table of docs/precision.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import common, tables
from specexport.contract.reading import read_manifest
from specexport.exporter import graph_checks
from specexport.exporter.build import build
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.tokenizer import load_tokenizer
from specexport.exporter.options import BuildOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks precision``."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="NAME=SOURCE[,FILE.gguf]",
        help="a model, and other readings of it; none: the table",
    )
    parser.add_argument("--precisions", default="int8,int4")
    parser.add_argument(
        "--work", type=Path, default=Path(".cache/precision"), help="keeps bundles while they are built"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/precision.json"))


def main(args: argparse.Namespace) -> int:
    """Measures the models and prints the table."""
    results: dict[str, Any] = json.loads(args.json.read_text(encoding="utf-8")) if args.json.is_file() else {}
    for argument in args.models:
        name, _, rest = argument.partition("=")
        source, *files = rest.split(",")
        rows = results.setdefault(name, {})
        for precision in args.precisions.split(","):
            rows[precision] = _built(source, args.work / f"{name}.{precision}", precision)
            common.write_report(args.json, results)
        for file in files:
            rows[Path(file).stem.rpartition(".")[2]] = _read(source, Path(file))
            common.write_report(args.json, results)
    print(tables.precision(results))
    return 0


def _built(source: str, output: Path, precision: Any) -> dict[str, Any]:
    folder = build(BuildOptions(source, output, precision=precision, max_seq_len=512, max_batch_size=1, overwrite=True))
    target = read_manifest(folder).target
    assert target.precision.quality is not None
    return {"bytes": (folder / target.weights).stat().st_size, **msgspec.to_builtins(target.precision.quality)}


def _read(source: str, file: Path) -> dict[str, Any]:
    checkpoint = load_checkpoint(source)
    tokens = load_tokenizer(locate(source)).tokenizer.encode(graph_checks.default_text()).ids
    expected = graph_checks.reference(checkpoint, tokens)
    assert expected is not None
    del checkpoint
    other = graph_checks.reference(load_checkpoint(str(file)), tokens)
    assert other is not None
    comparison = graph_checks.compare(expected, other.logits)
    return {"bytes": file.stat().st_size, **msgspec.to_builtins(comparison)}
