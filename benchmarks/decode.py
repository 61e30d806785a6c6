"""Plain and speculative decoding, with the cost of every step, on the benchmark-size pair.

Plain decoding and every K run one after another on each prompt, so that a machine whose speed drifts treats them alike;
figures are medians over prompts and repeats, and speed-ups are ratios of times taken next to each other.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table

from benchmarks.pair import bundle, inflated_pair
from specexport.contract import tensors
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backend import Array, Graph

CHOICES = tuple(range(1, 9))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``python -m benchmarks decode``."""
    parser.add_argument("--models", type=Path, default=Path("examples/models"), help="holds demo-target and demo-draft")
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts/held_out.jsonl"))
    parser.add_argument("--work", type=Path, default=Path(".cache/bench"), help="keeps inflated models and bundles")
    parser.add_argument("--precisions", default="fp32,int8,int4")
    parser.add_argument("--k", default="1,2,3,4,5,6,7,8", help="draft tokens a step to try")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument(
        "--long-context", type=int, default=4096, help="compare with a bundle declaring this; 0: do not"
    )
    parser.add_argument("--json", type=Path, help="write everything measured to this file")


@dataclass
class Point:
    """Decoding with one K at one precision.

    Attributes:
        precision: of the matrices.
        k: draft tokens a step; 0 is plain.
        tokens_per_second: median over prompts and repeats, decoding only.
        speed_up: median of the ratios to plain decoding of the same prompt in the same round.
        acceptance_length: tokens a step commits.
        verify_ms: c(K+1), the target's bare graph run.
        propose_ms: d(K), the draft's bare graph run.
        allowed: the speed-up that acceptance and step costs allow: length * c(1) / (c(K+1) + d(K)).
        host_ms: everything a step spends outside the two graphs.
        same_text: prompts whose tokens equal plain decoding's.
    """

    precision: str
    k: int
    tokens_per_second: float
    speed_up: float
    acceptance_length: float
    verify_ms: float
    propose_ms: float
    allowed: float
    host_ms: float
    same_text: int


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its tables."""
    console = Console()
    target, draft = inflated_pair(args.models, args.work)
    ks = tuple(int(k) for k in args.k.split(","))
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.num_prompts]
    texts = [json.loads(line)["text"] for line in lines]
    measured: list[Point] = []
    for precision in args.precisions.split(","):
        folder = bundle(target, draft, args.work, precision, CHOICES, args.max_seq_len, args.block_size)
        with Engine.load(folder, threads=args.threads, check_hashes=False) as engine:
            prompts = [engine.encode(text)[: args.prompt_tokens] for text in texts]
            points = _decode(engine, precision, prompts, ks, args)
        measured += points
        console.print(_table(precision, points, len(prompts)))
    long = _long_context(target, draft, texts, args) if args.long_context else None
    if long is not None:
        console.print(
            f"300 tokens into the text, a declared context of {args.long_context} against 512: "
            f"a plain step takes {long['plain']:.3f}x, a verify step {long['verify']:.3f}x as long"
        )
    if args.json:
        report = {"machine": machine(args.threads), "points": [asdict(p) for p in measured], "long_context": long}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def machine(threads: int) -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.processor(),
    )
    return {"cpu": cpu, "threads": threads, "python": platform.python_version(), "onnxruntime": onnxruntime.__version__}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _decode(
    engine: Engine, precision: str, prompts: list[list[int]], ks: tuple[int, ...], args: argparse.Namespace
) -> list[Point]:
    """Plain decoding and every K, prompt by prompt."""
    params = SamplingParams(max_tokens=args.new_tokens, temperature=0.0, ignore_eos=True)
    runs: dict[int, list[Any]] = {k: [] for k in (0, *ks)}
    for k in runs:  # warm every shape up
        engine.generate(
            prompts[0], params.replace(max_tokens=2 * k + 2), num_speculative_tokens=k or None, speculation=k > 0
        )
    for _ in range(args.repeats):
        for prompt in prompts:
            for k, done in runs.items():
                done.append(engine.generate(prompt, params, num_speculative_tokens=k or None, speculation=k > 0))
    rows = args.prompt_tokens + args.new_tokens // 2
    draft = getattr(engine._proposer, "_graph", None)
    costs = {k: step_costs(engine._target, draft, k, rows) for k in runs}
    points = []
    for k, done in runs.items():
        length = statistics.mean(run.stats.acceptance_length for run in done)
        ratios = [
            run.stats.tokens_per_second / base.stats.tokens_per_second for run, base in zip(done, runs[0], strict=True)
        ]
        hosts = [(run.stats.host + run.stats.accept) / run.stats.steps * 1e3 for run in done]
        points.append(
            Point(
                precision,
                k,
                statistics.median(run.stats.tokens_per_second for run in done),
                statistics.median(ratios),
                length,
                *costs[k],
                length * costs[0][0] / sum(costs[k]),
                statistics.median(hosts),
                sum(a.token_ids == b.token_ids for a, b in zip(done, runs[0], strict=True)) // args.repeats,
            )
        )
    return points


def step_costs(target: Graph, draft: Graph | None, k: int, rows: int, repeats: int = 15) -> tuple[float, float]:
    """Median times of the bare graphs of a step, c(K+1) and d(K), in milliseconds, with ``rows`` valid cache rows.

    They run in turn, as in decoding: alone, a draft that fits the processor's cache would stay in it and look cheaper
    than it is.
    """
    given = _filled(target, k + 1, 0, rows)
    given[tensors.POSITION_IDS][:] = rows + np.arange(k + 1)
    if k and draft is not None:
        _filled(draft, 2, k, rows)
    verify, propose = [], []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        if k and draft is not None:
            draft.run(2, k)
        between = time.perf_counter()
        target.run(k + 1)
        verify.append(time.perf_counter() - between)
        propose.append(between - start)
    return statistics.median(verify[3:]) * 1e3, statistics.median(propose[3:]) * 1e3 if k else 0.0


def _filled(graph: Graph, tokens: int, drafts: int, rows: int) -> dict[str, Array]:
    graph.reserve(rows + tokens + drafts)
    given = graph.inputs(tokens, drafts)
    given[tensors.INPUT_IDS][:] = np.arange(tokens) + 50
    given[tensors.PAST_LENGTH][:] = rows
    return given


def _long_context(target: Path, draft: Path, texts: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Step times 300 tokens into a text: a long declared context over a short one."""
    engines = {
        length: Engine.load(
            bundle(target, draft, args.work, "int8", CHOICES, length, args.block_size),
            threads=args.threads,
            check_hashes=False,
        )
        for length in (512, args.long_context)
    }
    ratios: dict[str, list[float]] = {"plain": [], "verify": []}
    for _ in range(5):
        for name, tokens in (("plain", 1), ("verify", 5)):
            short, long = (step_costs(engine._target, None, tokens - 1, 300)[0] for engine in engines.values())
            ratios[name].append(long / short)
    for engine in engines.values():
        engine.close()
    return {name: statistics.median(values) for name, values in ratios.items()}


def _table(precision: str, points: list[Point], prompts: int) -> Table:
    table = Table(title=f"{precision}, greedy, {prompts} prompts", title_justify="left")
    for name in ("K", "tokens/s", "speed-up", "acceptance length", "c(K+1) ms", "d(K) ms", "allowed", "efficiency"):
        table.add_column(name, justify="right")
    table.add_column("host ms", justify="right")
    table.add_column("same text", justify="right")
    for p in points:
        table.add_row(
            str(p.k) if p.k else "plain",
            f"{p.tokens_per_second:.1f}",
            f"{p.speed_up:.2f}x",
            f"{p.acceptance_length:.2f}",
            f"{p.verify_ms:.2f}",
            f"{p.propose_ms:.2f}" if p.k else "",
            f"{p.allowed:.2f}x",
            f"{p.speed_up / p.allowed:.3f}",
            f"{p.host_ms:.3f}",
            f"{p.same_text}/{prompts}",
        )
    return table
