"""The comparison with other engines: turns, what is counted, pairs, and going on where it stopped."""

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.peers import compare, job
from benchmarks.peers.compare import Measured, best, cells_of, measure, read_runs, report, schedule
from benchmarks.peers.job import Deliveries, Job, Settings, Way

PLAIN, OTHER, DRAFT, LONG = Way("plain"), Way("sdpa"), Way("draft", 3), Way("draft", 6)


def test_a_turn_takes_all_engines_a_way_and_begins_with_another_each_time():
    ways = {"a": [PLAIN, DRAFT], "b": [PLAIN, OTHER, DRAFT], "c": [PLAIN]}
    assert schedule(ways, 0) == [("a", PLAIN), ("b", PLAIN), ("c", PLAIN), ("b", OTHER), ("a", DRAFT), ("b", DRAFT)]
    assert [engine for engine, way in schedule(ways, 1) if way == PLAIN] == ["b", "c", "a"]


def test_decoding_speed_starts_after_the_second_delivery(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 3.0, 4.0, 8.0])
    monkeypatch.setattr(job.time, "perf_counter", lambda: next(clock))
    deliveries = Deliveries()
    for size in (1, 3, 4, 2):
        deliveries.add([7] * size)
    run = deliveries.finish()
    assert run.decode == (4 + 2) / (4 - 2)
    assert run.end_to_end == 10 / 8
    assert run.tokens_per_step == 4  # the last may be cut short
    assert run.first_token == 1


def _run(engine: str, way: Way, decode: float, prompt: str = "p", turn: int = 0, text: str = "x") -> Measured:
    return Measured(engine, "int8", way.method, way.k, turn, prompt, decode, decode / 2, 1 + way.k / 2, 0.5, text, "1")


def test_speeds_are_compared_within_a_turn():
    ours = [_run("specexport", PLAIN, 10, "p"), _run("specexport", PLAIN, 20, "q")]
    theirs = [_run("ort", PLAIN, 10, "q"), _run("ort", PLAIN, 20, "p", text="y")]
    a, b = cells_of([*ours, *theirs])
    assert a.speed() == b.speed() == pytest.approx(2 / (1 / 10 + 1 / 20))
    assert b.over(a) == [1.25, 0.5, 2.0]
    assert b.same_as(a) == 1


def test_the_best_way_of_each_kind_is_reported_beside_ours():
    cells = cells_of(
        [
            _run("specexport", PLAIN, 10),
            _run("specexport", DRAFT, 30),
            _run("openvino", PLAIN, 8),
            _run("openvino", OTHER, 9),
            _run("openvino", DRAFT, 12),
            _run("openvino", LONG, 20),
        ]
    )
    assert best(cells)["openvino", "int8", "plain"].way == OTHER
    entries = [entry for entry in report(cells) if entry["best"] and entry["engine"] == "openvino"]
    assert [entry["k"] for entry in entries] == [0, 6]
    assert entries[1]["over_our_plain"] == [2, 2, 2]
    assert entries[1]["ours_over_it"] == [1.5, 1.5, 1.5]
    assert entries[1]["same_as_fp32_greedy"] is None
    compare.table(report(cells))


class _Worker:
    version = "1"

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def ask(self, job: Job) -> dict[str, Any]:
        self.jobs.append(job)
        return {"tokens": job.prompt, "decode": 1.0, "end_to_end": 1.0, "tokens_per_step": 1.0, "first_token": 0.5}


def test_a_later_call_runs_the_turns_that_are_missing(tmp_path, monkeypatch):
    worker = _Worker()

    def start(precision: str, args: Any, prompt: list[int], stack: ExitStack) -> dict[str, _Worker]:
        return {"ort": worker}

    monkeypatch.setattr(compare, "start", start)
    args = argparse.Namespace(
        precisions=["int8"], repeats=2, k=[3], ngram_k=[], new_tokens=9, minutes=1, runs=tmp_path / "runs.jsonl"
    )
    head = {"k": [3]}
    prompts = {"p": [1], "q": [2]}
    assert measure(argparse.Namespace(**{**vars(args), "minutes": 0}), prompts, read_runs(args.runs, head)) == 4
    assert measure(args, {"p": [1]}, read_runs(args.runs, head)) == 0
    worker.jobs.clear()
    assert measure(args, prompts, read_runs(args.runs, head)) == 0
    assert [(job.prompt, job.way) for job in worker.jobs] == [([2], PLAIN), ([2], DRAFT)] * 2
    assert {run.place for run in read_runs(args.runs, head)} == {("int8", t, p) for t in (0, 1) for p in prompts}
    with pytest.raises(ValueError, match=r"was measured with k \[3\], not \[4\]; delete it"):
        read_runs(args.runs, {"k": [4]})


FAKE = """
from benchmarks.peers.job import Run, answer
def load(settings):
    print("a library talks", settings.target)
    return lambda job: Run([7] * job.way.k, 2.0, 1.0, 1.5, 0.5), "fake 1"
answer(load)
"""


def test_a_process_answers_jobs_and_refuses_texts_of_another_length():
    settings = Settings("t", "d", "int8", 2, [DRAFT])
    jobs = [Job([1, 2], DRAFT, 3), Job([1], DRAFT, 4)]
    done = subprocess.run(
        [sys.executable, "-c", FAKE, json.dumps(asdict(settings))],
        input="".join(job.to_json() + "\n" for job in jobs),
        capture_output=True,
        text=True,
    )
    version, run = map(json.loads, done.stdout.splitlines())
    assert version == "fake 1"
    assert run == {"tokens": [7, 7, 7], "decode": 2.0, "end_to_end": 1.0, "tokens_per_step": 1.5, "first_token": 0.5}
    assert "a library talks t" in done.stderr
    assert "3 tokens were generated instead of 4" in done.stderr
