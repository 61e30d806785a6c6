"""What an engine's process is asked and what it answers, and how a generation is timed. Standard library only.

An engine hands over its tokens in deliveries: one token at a time when it decodes plainly, one round's accepted tokens
at a time when it speculates. The first delivery waits for the prompt, and with a draft model the second may wait for
the draft's prompt, so the decode speed counts what follows the second delivery. The end-to-end speed counts everything.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

UNCOUNTED = 2


@dataclass(frozen=True)
class Job:
    """One engine's work: its models, the prompts as token ids, and the draft lengths to try (none: plain decoding)."""

    target: str
    draft: str
    ks: list[int]
    prompts: list[list[int]]
    new_tokens: int
    threads: int
    repeats: int
    precision: str = "fp32"
    options: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """What the process reads."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls) -> Job:
        """Read the job from standard input."""
        return cls(**json.load(sys.stdin))


class Deliveries:
    """The tokens of one generation and when they came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.counts: list[int] = []
        self.total = 0.0
        self.start = time.perf_counter()

    def add(self, tokens: list[int]) -> None:
        """Take note of tokens that have come just now."""
        self.times.append(time.perf_counter() - self.start)
        self.counts.append(len(tokens))
        self.tokens.extend(tokens)

    def finish(self) -> None:
        """Take note of the end of the generation."""
        self.total = time.perf_counter() - self.start

    @property
    def decode_seconds(self) -> float:
        """Seconds per token after the uncounted deliveries."""
        return (self.times[-1] - self.times[UNCOUNTED - 1]) / sum(self.counts[UNCOUNTED:])

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a delivery; the last one, which may be cut short, does not count either."""
        return statistics.mean(self.counts[UNCOUNTED:-1] or self.counts)


Generate = Callable[[list[int], int, Deliveries], None]


def measure(job: Job, generate: Generate, version: str, settings: dict[str, Any]) -> None:
    """Time an engine on every prompt and print the answer as one line of JSON.

    `generate(prompt, k, deliveries)` generates with drafts of k tokens, or plainly where k is 0, and adds what comes.
    """
    ks = job.ks or [0]
    for k in ks:
        generate(job.prompts[0], k, Deliveries())
    runs: dict[tuple[int, int], list[Deliveries]] = {}
    for _ in range(job.repeats):
        for index, prompt in enumerate(job.prompts):
            for k in ks:
                run = Deliveries()
                generate(prompt, k, run)
                run.finish()
                if len(run.tokens) != job.new_tokens:
                    raise RuntimeError(f"{len(run.tokens)} tokens were generated instead of {job.new_tokens}")
                runs.setdefault((k, index), []).append(run)
    answer = {
        "version": version,
        "settings": settings,
        "results": [{"k": k, "prompts": [_summary(runs[k, index]) for index in range(len(job.prompts))]} for k in ks],
    }
    print(json.dumps(answer), flush=True)


def _summary(runs: list[Deliveries]) -> dict[str, Any]:
    decode = [1 / run.decode_seconds for run in runs]
    end_to_end = [len(run.tokens) / run.total for run in runs]
    return {
        "decode_tokens_per_s": statistics.median(decode),
        "end_to_end_tokens_per_s": statistics.median(end_to_end),
        "decode_tokens_per_s_of_repeats": decode,
        "tokens_per_step": statistics.mean(run.tokens_per_step for run in runs),
        "tokens": runs[0].tokens,
        "repeats_agree": all(run.tokens == runs[0].tokens for run in runs),
    }


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
