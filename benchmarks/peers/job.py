"""The protocol of an engine's process, and the timing of a generation. Standard library only.

A process gets its settings as its argument, loads its models, and answers jobs, one line of JSON each, until its input
ends. The output of libraries goes to standard error.
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
"""Longest n-gram to look up; the only one for ONNX Runtime GenAI and llama.cpp, which gain most with it."""


@dataclass(frozen=True)
class Way:
    """A way to decode: plainly if k is 0, else with drafts of k tokens.

    Attributes:
        method: ``plain``, ``draft`` (the draft model), ``ngram`` (look-ups), ``default`` (specexport's own choice), or
            ``sdpa`` (plain decoding with OpenVINO's other attention).
        k: draft tokens a step; 0 for ``default`` too.
    """

    method: str
    k: int = 0

    @property
    def kind(self) -> str:
        """The kind to compare it with: ``plain``, ``draft``, ``ngram`` or ``default``."""
        return "plain" if self.method == "sdpa" else self.method


@dataclass(frozen=True)
class Settings:
    """The settings of a process: its models, the ways to decode, and the most tokens of a prompt and its text."""

    target: str
    draft: str
    precision: str
    threads: int
    ways: list[Way]
    context: int = 512

    @classmethod
    def read(cls) -> Settings:
        """The settings of this process."""
        fields = json.loads(sys.argv[1])
        return cls(**{**fields, "ways": [Way(**way) for way in fields["ways"]]})


@dataclass(frozen=True)
class Job:
    """One generation: the prompt's token ids, the way to decode, and the number of tokens."""

    prompt: list[int]
    way: Way
    new_tokens: int

    def to_json(self) -> str:
        """A line of a process's input."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Job:
        """The job of a line."""
        fields = json.loads(line)
        return cls(**{**fields, "way": Way(**fields["way"])})


@dataclass(frozen=True)
class Run:
    """The result of a job.

    Attributes:
        tokens: the generated tokens.
        decode: tokens a second, without reading the prompt.
        end_to_end: tokens a second, with it.
        tokens_per_step: mean of the target's steps.
        first_token: seconds to it.
    """

    tokens: list[int]
    decode: float
    end_to_end: float
    tokens_per_step: float
    first_token: float


class Deliveries:
    """The tokens of one generation and their times.

    An engine delivers one token at a time when decoding plainly, and a step's accepted tokens when speculating. The
    first delivery waits for the prompt, and with a draft model the second may wait for the draft's reading of it, so
    the decoding speed counts tokens after the second delivery.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.counts: list[int] = []
        self.start = time.perf_counter()

    def add(self, tokens: list[int]) -> None:
        """Record tokens that have just arrived."""
        self.times.append(time.perf_counter() - self.start)
        self.counts.append(len(tokens))
        self.tokens.extend(tokens)

    def finish(self) -> Run:
        """Record the end of the generation; the last delivery may be cut short and is not a whole step."""
        total = time.perf_counter() - self.start
        seconds = self.times[-1] - self.times[UNCOUNTED - 1]
        steps = self.counts[UNCOUNTED:-1] or self.counts
        decode, end_to_end = sum(self.counts[UNCOUNTED:]) / seconds, len(self.tokens) / total
        return Run(self.tokens, decode, end_to_end, statistics.mean(steps), self.times[0])


Decoder = Callable[[Job], Run]


def timed(generate: Callable[[Job, Deliveries], None]) -> Decoder:
    """An engine from a function that records tokens as they arrive."""

    def run(job: Job) -> Run:
        deliveries = Deliveries()
        generate(job, deliveries)
        return deliveries.finish()

    return run


def answer(load: Callable[[Settings], tuple[Decoder, str]]) -> None:
    """Load an engine, report its version and answer jobs.

    Args:
        load: returns the engine, and its name and version.
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
    """Environment variables that limit a process's math libraries to ``threads`` threads and keep it offline."""
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
