"""Costs and acceptance of a request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

PLAIN = "plain"
"""The name of steps without a proposal."""


@dataclass
class Stats:
    """Counters of one request. Times are seconds of wall clock.

    Attributes:
        prompt_tokens: length of the prompt.
        output_tokens: tokens generated.
        steps: verify steps, plain ones included.
        drafted: draft tokens verified.
        accepted: draft tokens accepted.
        accepted_at: how often a draft token was accepted at each depth of a step's tree.
        steps_with_draft: steps that verified draft tokens.
        steps_by_draft: number of steps by number of draft tokens (0 is plain), for each method that proposed them.
        cached_tokens: tokens of the prompt that were not read, as the cache held them already.
        queued: time until a slot was free.
        prefill: time reading the prompt, by the target and by a draft.
        stalled: time between its steps in which a chunk of another request's prompt was read.
        propose: time proposing, for all requests of its steps.
        verify: time in the target's decode and verify steps, for all requests of its steps.
        accept: time deciding what is accepted, for all requests of its steps.
        host: everything else in its steps: bookkeeping and text.
        first_token: from the start of the request to its first tokens.
        total: from start to end. Neither counts time in which no stream of the engine was read.
        execution: how the work of a step reached the device: ``host`` without a device, ``plain`` call by call,
            ``graph per engine`` as a captured CUDA graph for each model, ``graph per step`` as one for the whole step.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    steps_with_draft: int = 0
    steps_by_draft: dict[str, dict[int, int]] = field(default_factory=dict)
    queued: float = 0.0
    prefill: float = 0.0
    stalled: float = 0.0
    propose: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    host: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    execution: str = "host"

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a verify step commits: accepted ones and the bonus token."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of steps in which a draft token was accepted at each depth."""
        return [count / self.steps_with_draft for count in self.accepted_at] if self.steps_with_draft else []

    @property
    def decode_seconds(self) -> float:
        """Time after the prefill."""
        return self.stalled + self.propose + self.verify + self.accept + self.host

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of decoding."""
        return self.output_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def count_step(self, method: str, drafted: int = 0, depth: int = 0, accepted: int = 0) -> None:
        """Counts one step: the method, its draft tokens, their longest path, and how many were accepted."""
        self.steps += 1
        steps = self.steps_by_draft.setdefault(method if drafted else PLAIN, {})
        steps[drafted] = steps.get(drafted, 0) + 1
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self.steps_with_draft += 1
            self.accepted_at += [0] * (depth - len(self.accepted_at))
            for position in range(accepted):
                self.accepted_at[position] += 1

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures, for JSON."""
        derived = ("acceptance_length", "acceptance_rate", "acceptance_by_position", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
