"""What an engine's process is told and asked, what it answers, and how a generation is timed. Standard library only.

A process is started with its settings as its argument, loads its models, and answers jobs, one line of JSON each, until
its input ends. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

UNCOUNTED = 2
LOOKUP = 2
"""Longest n-gram that is looked up: the only one by ONNX Runtime GenAI and llama.cpp, which gain most with this one."""


@dataclass(frozen=True)
class Way:
    """How to decode: plainly where k is 0, else with drafts of k tokens.

    Attributes:
        method: ``plain``, ``draft`` (the draft model), ``ngram`` (looked up in the text), for specexport ``default``:
            as it chooses by itself, or, for OpenVINO, ``sdpa``: plainly with its other attention.
        k: draft tokens a step; 0 with ``default``, too.
    """

    method: str
    k: int = 0

    @property
    def kind(self) -> str:
        """What it is compared as: ``plain``, ``draft`` or ``ngram``."""
        return self.method if self.k else "plain"


@dataclass(frozen=True)
class Settings:
    """What a process is started with: its models, and the ways it will be asked for."""

    target: str
    draft: str
    precision: str
    threads: int
    ways: list[Way]

    @classmethod
    def read(cls) -> Settings:
        """Those that this process was started with."""
        given = json.loads(sys.argv[1])
        return cls(**{**given, "ways": [Way(**way) for way in given["ways"]]})


@dataclass(frozen=True)
class Job:
    """One generation: the prompt's token ids, how to go on with them, and for how many tokens."""

    prompt: list[int]
    way: Way
    new_tokens: int

    def to_json(self) -> str:
        """A line of a process's input."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Job:
        """The job of a line."""
        given = json.loads(line)
        return cls(**{**given, "way": Way(**given["way"])})


@dataclass(frozen=True)
class Run:
    """What a job gave.

    Attributes:
        tokens: what was generated.
        decode: tokens a second, without the prompt's reading.
        end_to_end: tokens a second, with it.
        tokens_per_step: mean of the target's steps.
    """

    tokens: list[int]
    decode: float
    end_to_end: float
    tokens_per_step: float


class Deliveries:
    """The tokens of one generation and when they came.

    An engine hands over one token at a time when it decodes plainly, and one round's accepted tokens at a time when it
    speculates. The first delivery waits for the prompt, and with a draft model the second may wait for the draft's
    prompt, so the decode speed counts what follows the second delivery.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.counts: list[int] = []
        self.start = time.perf_counter()

    def add(self, tokens: list[int]) -> None:
        """Take note of tokens that have come just now."""
        self.times.append(time.perf_counter() - self.start)
        self.counts.append(len(tokens))
        self.tokens.extend(tokens)

    def finish(self) -> Run:
        """Take note of the end of the generation; the last delivery, which may be cut short, is not a whole step."""
        total = time.perf_counter() - self.start
        seconds = self.times[-1] - self.times[UNCOUNTED - 1]
        steps = self.counts[UNCOUNTED:-1] or self.counts
        return Run(
            self.tokens, sum(self.counts[UNCOUNTED:]) / seconds, len(self.tokens) / total, statistics.mean(steps)
        )


Decoder = Callable[[Job], Run]


def timed(generate: Callable[[Job, Deliveries], None]) -> Decoder:
    """An engine from a function that adds tokens to deliveries as they come."""

    def run(job: Job) -> Run:
        deliveries = Deliveries()
        generate(job, deliveries)
        return deliveries.finish()

    return run


def answer(load: Callable[[Settings], tuple[Decoder, str]]) -> None:
    """Load an engine, say its version and answer jobs.

    Args:
        load: the engine, and what it is with its version.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine, version = load(Settings.read())
    print(json.dumps(version), file=answers, flush=True)
    for line in sys.stdin:
        job = Job.read(line)
        run = engine(job)
        if len(run.tokens) != job.new_tokens:
            raise RuntimeError(f"{len(run.tokens)} tokens were generated instead of {job.new_tokens}")
        print(json.dumps(asdict(run)), file=answers, flush=True)


def thread_environment(threads: int) -> dict[str, str]:
    """The environment of a process whose math libraries shall use so many threads and that stays off the network."""
    count = str(threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
