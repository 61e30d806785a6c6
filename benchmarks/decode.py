"""Plain and speculative decoding, with the cost of every step, on the benchmark-size pair.

Plain decoding and every K take turns on each prompt, each between as many steps of its bare graphs, so that drift of
the machine's speed affects all equally. Speeds are tokens over seconds, both summed over prompts and repeats; step
costs are means too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks import common
from benchmarks.pair import bundle, inflated_pair
from specexport.contract import tensors
from specexport.methods.draft_model import DraftModelProposer
from specexport.runtime import Completion, Engine, SamplingParams
from specexport.runtime.backend import Array, Graph, RunShape
from specexport.runtime.speculative import PLAIN
from specexport.tables import Table, show

CHOICES = tuple(range(1, 9))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks decode``."""
    common.add_common_arguments(parser, num_prompts=16, prompt_tokens=128, new_tokens=96)
    parser.add_argument("--precisions", default="fp32,int8,int4")
    parser.add_argument("--k", default="1,2,3,4,5,6,7,8", help="draft tokens a step to try")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; above, texts are seeded samples")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument(
        "--long-context", type=int, default=4096, help="compare with a bundle declaring this; 0: do not"
    )


@dataclass
class Point:
    """Decoding with one K at one precision.

    Attributes:
        precision: of the matrices.
        k: draft tokens a step; 0 is plain.
        tokens_per_second: decoding only, prefill aside.
        speed_up: over plain decoding.
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
    target, draft = inflated_pair(args.models, args.work)
    ks = tuple(int(k) for k in args.k.split(","))
    texts = common.read_texts(args.prompts)[: args.num_prompts]
    measured: list[Point] = []
    over_bare: dict[str, float] = {}
    for precision in args.precisions.split(","):
        folder = bundle(target, draft, args.work, precision, CHOICES, args.max_seq_len, args.block_size)
        with Engine.load(folder, threads=args.threads, check_hashes=False, calibrate=False) as engine:
            prompts = [engine.encode(text)[: args.prompt_tokens] for text in texts]
            points = _decode(engine, precision, prompts, ks, args)
            over_bare[precision] = _plain_over_bare(engine, prompts)
        measured += points
        way = f"temperature {args.temperature:g}" if args.temperature else "greedy"
        show(
            _table(f"{precision}, {way}, {len(prompts)} prompts", points, len(prompts) * (not args.temperature)),
            f"a plain step takes {over_bare[precision]:.3f}x as long as its bare graph",
        )
    long = _long_context(target, draft, texts, args) if args.long_context else None
    if long is not None:
        print(
            f"300 tokens into the text, a declared context of {args.long_context} against 512: "
            f"a plain step takes {long['plain']:.3f}x, a verify step {long['verify']:.3f}x as long"
        )
    options = ("num_prompts", "prompt_tokens", "new_tokens", "temperature", "repeats", "block_size")
    common.write_report(
        args.json,
        {
            "machine": common.machine(args.threads),
            "options": {name: getattr(args, name) for name in options},
            "points": [asdict(p) for p in measured],
            "plain_over_bare": over_bare,
            "long_context": long,
        },
    )
    return 0


def _decode(
    engine: Engine, precision: str, prompts: list[list[int]], ks: tuple[int, ...], args: argparse.Namespace
) -> list[Point]:
    """Plain decoding and every K, prompt by prompt."""
    params = SamplingParams(max_tokens=args.new_tokens, temperature=args.temperature, seed=0, ignore_eos=True)
    rows = args.prompt_tokens + args.new_tokens // 2
    proposer = engine.proposers["draft_model"]
    assert isinstance(proposer, DraftModelProposer)
    runs: dict[int, list[Completion]] = {k: [] for k in (0, *ks)}
    costs: dict[int, list[tuple[float, float]]] = {k: [] for k in runs}
    for k in runs:  # warm-up of every shape
        engine.generate(prompts[0], params.replace(max_tokens=2 * k + 2), {"num_speculative_tokens": k})
    for prompt in tqdm(prompts * args.repeats, f"decoding at {precision}", disable=None):
        for k, done in runs.items():
            half = args.new_tokens // (2 * k + 2) + 1  # plain steps for the K tokens and the bonus token
            costs[k] += step_costs(engine._target, proposer.graph, k, rows, half)
            done.append(engine.generate(prompt, params, {"num_speculative_tokens": k}))
            costs[k] += step_costs(engine._target, proposer.graph, k, rows, half)
    return [_point(precision, k, runs, costs, args.repeats) for k in runs]


def _plain_over_bare(engine: Engine, prompts: list[list[int]], repeats: int = 2, steps: int = 60) -> float:
    """The time of a plain step over that of the bare graph, run with the same rows before and after it."""
    params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
    ratios = []
    for prompt in prompts * repeats:
        rows = len(prompt) + steps // 2
        bare = step_costs(engine._target, None, 0, rows, steps)
        stats = engine.generate(prompt, params, PLAIN).stats
        bare += step_costs(engine._target, None, 0, rows, steps)
        ratios.append(stats.decode_seconds / stats.steps * 1e3 / statistics.mean(verify for verify, _ in bare))
    return statistics.median(ratios)


def _point(
    precision: str,
    k: int,
    runs: dict[int, list[Completion]],
    costs: dict[int, list[tuple[float, float]]],
    repeats: int,
) -> Point:
    done, plain = runs[k], runs[0]
    steps = sum(run.stats.steps for run in done)
    length = common.acceptance_length(done)
    # Means, like speeds: a median would ignore moments when the machine was slow for all.
    verify, propose = (statistics.mean(part) for part in zip(*costs[k], strict=True))
    bare = statistics.mean(cost for cost, _ in costs[0])
    return Point(
        precision,
        k,
        common.speed(done),
        common.speed(done) / common.speed(plain),
        length,
        verify,
        propose,
        length * bare / (verify + propose),
        sum(run.stats.host + run.stats.accept for run in done) / steps * 1e3,
        common.same_texts(done, plain) // repeats,
    )


def step_costs(
    target: Graph, draft: Graph | None, k: int, rows: int, repeats: int = 10, warm: int = 2
) -> list[tuple[float, float]]:
    """Times of the bare graphs of a step, c(K+1) and d(K), in milliseconds, with ``rows`` valid cache rows.

    They alternate, as in decoding: alone, a small draft would stay in the processor's cache and look too cheap.
    """
    inputs = _filled(target, rows, RunShape(k + 1, k + 1))
    inputs[tensors.POSITION_IDS][:] = rows + np.arange(k + 1)
    if k and draft is not None:
        _filled(draft, rows, RunShape(2, drafts=k))
    times = []
    for _ in range(warm + repeats):
        start = time.perf_counter()
        if k and draft is not None:
            draft.run(RunShape(2, drafts=k))
        between = time.perf_counter()
        target.run(RunShape(k + 1, k + 1))
        times.append(((time.perf_counter() - between) * 1e3, (between - start) * 1e3 if k else 0.0))
    return times[warm:]


def _filled(graph: Graph, past: int, shape: RunShape) -> dict[str, Array]:
    graph.reserve(past + shape.tokens + shape.drafts)
    inputs = graph.inputs(shape)
    inputs[tensors.INPUT_IDS][:] = np.arange(shape.tokens) + 50
    inputs[tensors.PAST_LENGTH][:] = past
    return inputs


def _long_context(target: Path, draft: Path, texts: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Ratio of step times 300 tokens into a text, with a long declared context over a short one."""
    engines = {
        length: Engine.load(
            bundle(target, draft, args.work, "int8", CHOICES, length, args.block_size),
            threads=args.threads,
            check_hashes=False,
            calibrate=False,
        )
        for length in (512, args.long_context)
    }
    ratios: dict[str, list[float]] = {"plain": [], "verify": []}
    for _ in range(5):
        for name, tokens in (("plain", 1), ("verify", 5)):
            short, long = (
                statistics.median(verify for verify, _ in step_costs(engine._target, None, tokens - 1, 300, 9))
                for engine in engines.values()
            )
            ratios[name].append(long / short)
    for engine in engines.values():
        engine.close()
    return {name: statistics.median(values) for name, values in ratios.items()}


def _table(title: str, points: list[Point], comparable: int) -> Table:
    """A table with a row per K; ``comparable`` prompts should give equal texts, 0 for samples."""
    columns = ("K", "tokens/s", "speed-up", "acceptance length", "c(K+1) ms", "d(K) ms", "allowed", "efficiency")
    table = common.new_table(title, (), (*columns, "host ms", "same text"))
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
            f"{p.same_text}/{comparable}" if comparable else "",
        )
    return table
