"""N-gram lookup and suffix decoding against plain decoding, on text that repeats and on text that does not.

``edit`` contains a file of the standard library and the beginning of a copy, like an answer that repeats most of its
prompt; ``completion`` continues held-out code; ``no repeats`` samples at a temperature where hardly any bigram occurs
twice. Held-out code has half as many tokens as a file. All ways take turns on each prompt, so that drift of the
machine's speed affects all equally. Speeds are tokens over seconds, both summed over prompts.

Besides the table it shows the gain of a tree: at every step of greedy text, how many more tokens the second-latest
continuation would have predicted than the latest one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks import common
from benchmarks.pair import built, inflated_pair
from specexport.commands.bench import built_in_tasks
from specexport.runtime import Completion, Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from specexport.tables import Table, show

SIZES = (8, 16, 4, 2)
METHODS = ("ngram", "suffix")
WARM_UP = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks lookup``."""
    common.add_common_arguments(parser, num_prompts=8, prompt_tokens=240, new_tokens=96)
    parser.add_argument("--bundles", type=Path, help="keeps bundles (default: as --work)")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--k", default="16,8,4", help="draft tokens a step at most; each of 16, 8, 4, 2")


@dataclass(frozen=True)
class Workload:
    """Prompts and sampling parameters."""

    name: str
    prompts: list[list[int]]
    params: SamplingParams


@dataclass
class Row:
    """The result of one way on one workload.

    Attributes:
        workload: its name.
        method: ``plain`` or of the bundle.
        k: draft tokens a step at most.
        tokens_per_step: acceptance length.
        steps_with_draft: share of steps.
        propose_us: host time a step spent looking up, microseconds.
        tokens_per_second: decoding only.
        speed_up: over plain decoding.
        same_text: prompts whose text equals plain decoding's; only greedy text must.
    """

    workload: str
    method: str
    k: int
    tokens_per_step: float
    steps_with_draft: float
    propose_us: float
    tokens_per_second: float
    speed_up: float
    same_text: int


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its table."""
    target, _ = inflated_pair(args.models, args.work)
    folder = built(
        (args.bundles or args.work) / f"lookup.{target.name}.{args.precision}",
        target,
        methods=[{"method": name, "num_speculative_tokens": SIZES} for name in METHODS],
        precision=args.precision,
        max_seq_len=512,
    )
    ways = [("plain", 0), *((method, int(k)) for method in METHODS for k in args.k.split(","))]
    rows: list[Row] = []
    branching: dict[str, float] = {}
    with Engine.load(folder, threads=args.threads, check_hashes=False, calibrate=False) as engine:
        for workload in _workloads(engine, args):
            runs: list[list[Completion]] = [[] for _ in ways]
            for warm in (True, False):
                prompts = workload.prompts[:1] if warm else workload.prompts
                doing = f"{workload.name}: {'warming up' if warm else 'decoding'}"
                for prompt in tqdm(prompts, doing, disable=None):
                    for way, done in zip(ways, runs, strict=True):
                        completion = _decode(engine, way, prompt, workload.params, WARM_UP if warm else args.new_tokens)
                        if not warm:
                            done.append(completion)
            rows += [_row(workload.name, way, done, runs[0]) for way, done in zip(ways, runs, strict=True)]
            if workload.params.greedy:
                pairs = zip(workload.prompts, runs[0], strict=True)
                branching[workload.name] = gained_by_branching([(p, run.token_ids) for p, run in pairs])
    show(_table(args, rows))
    for name, gained in branching.items():
        print(f"{name}: a second chain of 8 beside the first would add {gained:.3f} tokens a step")
    options = ("precision", "num_prompts", "prompt_tokens", "new_tokens")
    common.write_report(
        args.json,
        {
            "machine": common.machine(args.threads),
            "options": {name: getattr(args, name) for name in options},
            "rows": [asdict(row) for row in rows],
            "gained_by_branching": branching,
        },
    )
    return 0


def _workloads(engine: Engine, args: argparse.Namespace) -> list[Workload]:
    greedy = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
    tasks = built_in_tasks(engine.encode, args.num_prompts, args.prompt_tokens)
    edits = [task.prompt for task in tasks if task.workload == "edit"]
    texts = common.read_texts(args.prompts)[: args.num_prompts]
    code = [engine.encode(text)[: args.prompt_tokens // 2] for text in texts]
    return [
        Workload("edit", edits, greedy),
        Workload("completion", code, greedy),
        Workload("completion, T = 0.7", code, greedy.replace(temperature=0.7)),
        Workload("no repeats, T = 1.5", code, greedy.replace(temperature=1.5)),
    ]


def _decode(engine: Engine, way: tuple[str, int], prompt: list[int], params: SamplingParams, tokens: int) -> Completion:
    params = params.replace(max_tokens=tokens)
    if way[0] == "plain":
        return engine.generate(prompt, params, PLAIN)
    return engine.generate(prompt, params, {"method": way[0], "num_speculative_tokens": way[1]})


def gained_by_branching(texts: Sequence[tuple[Sequence[int], Sequence[int]]], size: int = 8) -> float:
    """Correct tokens a step of the second-latest continuation beyond those of the latest one.

    Args:
        texts: prompts and their greedy continuations.
        size: draft tokens of each chain.
    """
    steps = gained = 0
    for prompt, output in texts:
        text, done = list(prompt), 0
        while done < len(output):
            ahead = output[done : done + size]
            right = [_shared(text[start : start + size], ahead) for start in _continuations(text)]
            first = right[0] if right else 0
            gained += max(0, right[1] - first) if len(right) > 1 else 0
            text += output[done : done + first + 1]
            done += first + 1
            steps += 1
    return gained / steps


def _continuations(text: Sequence[int]) -> list[int]:
    """The starts of the latest two continuations of the last four, three or two tokens, latest first."""
    for n in (4, 3, 2):
        tail = text[-n:]
        starts = [end for end in range(len(text) - 1, n - 1, -1) if text[end - n : end] == tail]
        if starts:
            return [starts[0], *[end for end in starts[1:] if text[end] != text[starts[0]]][:1]]
    return []


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _row(workload: str, way: tuple[str, int], done: list[Completion], plain: list[Completion]) -> Row:
    steps = sum(run.stats.steps for run in done)
    return Row(
        workload,
        *way,
        common.acceptance_length(done),
        sum(run.stats.steps_with_draft for run in done) / steps,
        sum(run.stats.propose for run in done) / steps * 1e6,
        common.speed(done),
        common.speed(done) / common.speed(plain),
        common.same_texts(done, plain),
    )


def _table(args: argparse.Namespace, rows: list[Row]) -> Table:
    title = f"{args.precision}, {args.num_prompts} prompts a workload, {args.new_tokens} tokens generated"
    numbers = ("K", "tokens a step", "with draft", "look-up us", "tokens/s", "against plain", "same text")
    table = common.new_table(title, ("workload", "method"), numbers)
    for row in rows:
        table.add_row(
            row.workload,
            row.method,
            str(row.k or ""),
            f"{row.tokens_per_step:.2f}",
            f"{row.steps_with_draft:.0%}",
            f"{row.propose_us:.0f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.speed_up:.2f}x",
            "" if "T =" in row.workload else f"{row.same_text}/{args.num_prompts}",
        )
    return table
