"""Run all engines in turns on the same prompts and show their speeds.

At each precision every engine is a process that stays loaded. All engines and ways decode a prompt before the next
prompt, so that drift of the machine's speed affects all equally; ratios within a turn are compared. Results are stored
after every turn, and a later call resumes there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import machine, new_table, write_report
from benchmarks.peers.convert import OPTIONS, ROLES, convert, last_lines
from benchmarks.peers.job import UNCOUNTED, Job, Settings, Way, thread_environment
from benchmarks.peers.setup import SEPARATE, python_of
from benchmarks.tables import ENGINES
from specexport.tables import Table, show

REPO = Path(__file__).resolve().parents[2]
OURS = "specexport"
# OpenVINO decodes plainly with either attention implementation; the faster one counts. Drafts require the other.
MORE_WAYS = {OURS: [Way("default")], "openvino": [Way("sdpa")]}
MOST_LOOKED_UP = 8
"""Draft tokens that a step of ours takes from the text by default."""
SETTLE_SECONDS = 0.2
"""Until the previous engine's threads have stopped spinning."""


@dataclass(frozen=True)
class Measured:
    """One generation of one engine.

    Attributes:
        turn: which repetition.
        prompt: its id.
        text: digest of the tokens.
        version: of the engine and what it runs on.
        decode: tokens a second, without the prompt.
        end_to_end: tokens a second, with it.
        first_token: seconds to it.
    """

    engine: str
    precision: str
    method: str
    k: int
    turn: int
    prompt: str
    decode: float
    end_to_end: float
    tokens_per_step: float
    first_token: float
    text: str
    version: str

    @property
    def place(self) -> tuple[str, int, str]:
        """The turn and prompt within which speeds are compared."""
        return self.precision, self.turn, self.prompt


@dataclass(frozen=True)
class Cell:
    """All generations of one engine at one precision in one way."""

    engine: str
    precision: str
    way: Way
    runs: tuple[Measured, ...]

    def speed(self, kind: str = "decode") -> float:
        """Tokens a second over all generations together, `kind` being decode or end_to_end."""
        return len(self.runs) / sum(1 / float(getattr(run, kind)) for run in self.runs)

    def over(self, other: Cell, kind: str = "decode") -> list[float]:
        """Ratios of speed to the other's generations in the same turn: median, minimum and maximum."""
        theirs = {run.place: run for run in other.runs}
        ratios = [getattr(run, kind) / getattr(theirs[run.place], kind) for run in self.runs]
        return [statistics.median(ratios), min(ratios), max(ratios)]

    def same_as(self, other: Cell) -> int:
        """The number of prompts that both continued with the same tokens in every turn."""
        theirs = {run.prompt: run.text for run in other.runs}
        different = {run.prompt for run in self.runs if run.text != theirs.get(run.prompt)}
        return len({run.prompt for run in self.runs} - different)


class Worker:
    """A process with a loaded engine that answers jobs; the output of its libraries goes to a file."""

    def __init__(self, engine: str, settings: Settings, log: Path) -> None:
        self.engine, self.log = engine, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python_of(engine)), "-m", f"benchmarks.peers.run_{engine}", json.dumps(asdict(settings))],
                env=thread_environment(settings.threads),
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.version = ""

    def read(self) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{ENGINES[self.engine]} ended: {last_lines(self.log.read_text(errors='replace'))}")
        return json.loads(line)

    def ask(self, job: Job) -> Any:
        """The answer to a job."""
        assert self.process.stdin is not None
        time.sleep(SETTLE_SECONDS)
        with contextlib.suppress(BrokenPipeError):  # reading the answer reports why the process ended
            print(job.to_json(), file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def read_prompts(args: argparse.Namespace) -> dict[str, list[int]]:
    """The prompts as token ids, all of the same length, by name; a short text is continued by those that follow."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts: dict[str, list[int]] = {}
    tokens: list[int] = []
    with args.prompts.open(encoding="utf-8") as lines:
        for line in lines:
            prompt = json.loads(line)
            tokens += tokenizer(prompt["text"])["input_ids"]
            if len(tokens) >= args.prompt_tokens:
                prompts[prompt["id"]] = tokens[: args.prompt_tokens]
                tokens = []
            if len(prompts) == args.num_prompts:
                return prompts
    raise ValueError(
        f"{args.prompts} has {len(prompts)} prompts of at least {args.prompt_tokens} tokens, not {args.num_prompts}"
    )


def check(args: argparse.Namespace) -> None:
    """Raise a ValueError about missing files or impossible settings."""
    for folder in (args.target, args.draft):
        if not (folder / "model.safetensors").is_file():
            raise ValueError(f"{folder} has no model.safetensors")
    if args.new_tokens < fewest_tokens(args):
        raise ValueError(f"--new-tokens is {args.new_tokens}; these draft lengths need {fewest_tokens(args)} or more")
    for engine in args.engines:
        if engine in SEPARATE and not python_of(engine).is_file():
            raise ValueError(f"{engine} has no environment; make it with: python -m benchmarks.peers.setup {engine}")


def fewest_tokens(args: argparse.Namespace) -> int:
    """The minimum length of a generation with measured steps, as the first ones do not count."""
    by_default = MOST_LOOKED_UP if OURS in args.engines else 0
    return (UNCOUNTED + 1) * (max([by_default, *args.k, *args.ngram_k]) + 1) + 1


def context_of(args: argparse.Namespace) -> int:
    """The most tokens of a prompt and its text together, drafts included."""
    return -(-(args.prompt_tokens + args.new_tokens + max([0, *args.k, *args.ngram_k])) // 512) * 512


def ways_of(engine: str, args: argparse.Namespace) -> list[Way]:
    """The ways of an engine to decode."""
    plain = [Way("plain"), *MORE_WAYS.get(engine, [])]
    return [*plain, *(Way("draft", k) for k in args.k), *(Way("ngram", k) for k in args.ngram_k)]


def schedule(ways: dict[str, list[Way]], turn: int) -> list[tuple[str, Way]]:
    """The order of a turn: all engines for each way, rotated every turn."""
    engines = list(ways)
    engines = engines[turn % len(engines) :] + engines[: turn % len(engines)]
    order = list(dict.fromkeys(way for engine in engines for way in ways[engine]))
    order.sort(key=lambda way: ("plain", "default", "draft", "ngram").index(way.kind))
    return [(engine, way) for way in order for engine in engines if way in ways[engine]]


def read_runs(path: Path, head: dict[str, Any]) -> list[Measured]:
    """The stored measurements; creates the file if there is none.

    Raises:
        ValueError: they were made with other settings.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")
    first, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for name, value in head.items():
        if first[name] != value:
            raise ValueError(f"{path} was measured with {name} {first[name]}, not {value}; delete it to begin anew")
    return [Measured(**run) for line in lines for run in line]


def measure(args: argparse.Namespace, prompts: dict[str, list[int]], runs: list[Measured]) -> int:
    """Run missing turns for the given minutes; return how many are left."""
    known = {run.place for run in runs}
    end = time.monotonic() + args.minutes * 60
    left = 0
    for precision in args.precisions:
        places = [(precision, turn, prompt) for turn in range(args.repeats) for prompt in prompts]
        missing = [place for place in places if place not in known]
        with contextlib.ExitStack() as stack:
            begun = missing and time.monotonic() < end
            workers = start(precision, args, next(iter(prompts.values())), stack) if begun else {}
            while missing and time.monotonic() < end:
                place = missing.pop(0)
                results = take_turn(workers, place, prompts[place[2]], args)
                with args.runs.open("a", encoding="utf-8") as file:
                    print(json.dumps([asdict(run) for run in results]), file=file)
                runs += results
        left += len(missing)
    return left


def take_turn(
    workers: dict[str, Worker], place: tuple[str, int, str], prompt: list[int], args: argparse.Namespace
) -> list[Measured]:
    """Decode a prompt with all engines in all ways."""
    precision, turn, name = place
    results = []
    for engine, way in schedule({engine: ways_of(engine, args) for engine in workers}, turn):
        answer = workers[engine].ask(Job(prompt, way, args.new_tokens))
        answer["text"] = hashlib.sha256(json.dumps(answer.pop("tokens")).encode()).hexdigest()[:12]
        answer["version"] = workers[engine].version
        results.append(Measured(engine, precision, way.method, way.k, turn, name, **answer))
    return results


def start(
    precision: str, args: argparse.Namespace, prompt: list[int], stack: contextlib.ExitStack
) -> dict[str, Worker]:
    """The engines at a precision, warmed up in all of their ways."""
    workers = {}
    for engine in engines_at(precision, args):
        pair = {"target": args.target, "draft": args.draft}
        folders = convert(engine, precision, pair, args.cache, args.threads, context_of(args))
        target, draft = (str(folders[role].resolve()) for role in ROLES)
        ways = ways_of(engine, args)
        settings = Settings(target, draft, precision, args.threads, ways, context_of(args))
        worker = Worker(engine, settings, args.cache / f"{engine}.log")
        stack.callback(worker.close)
        worker.version = worker.read()
        for way in ways:
            worker.ask(Job(prompt, way, fewest_tokens(args)))
        workers[engine] = worker
    return workers


def engines_at(precision: str, args: argparse.Namespace) -> list[str]:
    """The engines that support a precision."""
    return [engine for engine in args.engines if precision == "fp32" or engine != "transformers"]


def cells_of(runs: Iterable[Measured]) -> list[Cell]:
    """The measurements by engine, precision and way."""
    groups: dict[tuple[str, str, Way], list[Measured]] = {}
    for run in runs:
        groups.setdefault((run.engine, run.precision, Way(run.method, run.k)), []).append(run)
    return [Cell(*key, tuple(group)) for key, group in groups.items()]


def best(cells: Iterable[Cell]) -> dict[tuple[str, str, str], Cell]:
    """The fastest cell of each engine, precision and kind."""
    chosen: dict[tuple[str, str, str], Cell] = {}
    for cell in sorted(cells, key=Cell.speed):
        chosen[cell.engine, cell.precision, cell.way.kind] = cell
    return chosen


def report(cells: list[Cell]) -> list[dict[str, Any]]:
    """Each cell's speed relative to our plain decoding and our best of its kind, and its equal texts."""
    chosen = best(cells)
    entries = []
    for cell in cells:
        kind = cell.way.kind
        ours, plain = (chosen.get((engine, cell.precision, "plain")) for engine in (OURS, cell.engine))
        rival, reference = chosen.get((OURS, cell.precision, kind)), chosen.get(("transformers", "fp32", "plain"))
        entries.append(
            {
                "engine": cell.engine,
                "precision": cell.precision,
                **asdict(cell.way),
                "best": chosen[cell.engine, cell.precision, kind] is cell,
                "version": cell.runs[-1].version,
                "conversion": OPTIONS.get((cell.engine, cell.precision), []),
                "decode_tokens_per_s": round(cell.speed("decode"), 1),
                "end_to_end_tokens_per_s": round(cell.speed("end_to_end"), 1),
                "tokens_per_step": round(statistics.mean(run.tokens_per_step for run in cell.runs), 2),
                "first_token_s": round(statistics.median(run.first_token for run in cell.runs), 3),
                "over_our_plain": ours and cell.over(ours),
                "ours_over_it": rival and rival.over(cell),
                "ours_over_it_end_to_end": rival and rival.over(cell, "end_to_end"),
                "same_as_fp32_greedy": reference and cell.same_as(reference),
                "same_as_own_greedy": plain and cell.same_as(plain),
                "decode_tokens_per_s_of_runs": [round(run.decode, 1) for run in cell.runs],
            }
        )
    return entries


def table(entries: list[dict[str, Any]]) -> Table:
    """The best way of each kind; ratios are medians with the least and the most."""
    numbers = (
        "tokens/s",
        "with prompt",
        "a step",
        "first token, s",
        "over our plain",
        "ours over it",
        "with prompt",
        "as fp32",
        "as own",
    )
    shown = new_table("Tokens per second", ("engine", "weights", "way"), numbers)
    for entry in entries:
        if entry["best"]:
            ratios = (entry[name] for name in ("over_our_plain", "ours_over_it", "ours_over_it_end_to_end"))
            shown.add_row(
                ENGINES[entry["engine"]],
                entry["precision"],
                f"{entry['method']} {entry['k'] or ''}",
                f"{entry['decode_tokens_per_s']:.1f}",
                f"{entry['end_to_end_tokens_per_s']:.1f}",
                f"{entry['tokens_per_step']:.2f}",
                f"{entry['first_token_s']:.2f}",
                *("-" if ratio is None else "{:.2f} ({:.2f}-{:.2f})".format(*ratio) for ratio in ratios),
                *(str(entry[name]) for name in ("same_as_fp32_greedy", "same_as_own_greedy")),
            )
    return shown


def compare(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; 0 if everything ran."""
    options = ("target", "draft", "prompt_tokens", "new_tokens", "k", "ngram_k", "engines")
    head = {"machine": machine(args.threads), **{name: _plain(getattr(args, name)) for name in options}}
    try:
        check(args)
        args.cache.mkdir(parents=True, exist_ok=True)
        prompts = read_prompts(args)
        runs = read_runs(args.runs, head)
        left = measure(args, prompts, runs)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    entries = report(cells_of(runs))
    show(table(entries))
    if left:
        print(f"{left} turns are missing; the same command goes on with them")
    write_report(args.json, {**head, "cells": entries})
    return 0


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Path) else value
