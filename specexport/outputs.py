"""What ``LLM`` returns. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specexport.runtime import Stats, TokenLogprobs
from specexport.runtime.request import FinishReason

NO_TOKEN = -1
"""Stands among a prompt's tokens where it has an embedding."""


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability.

    Attributes:
        logprob: in nats, before temperature and filters.
        rank: its place among all tokens, 1 for the most probable.
        decoded_token: its text.
    """

    logprob: float
    rank: int
    decoded_token: str


def by_token(entry: TokenLogprobs, token_text: Callable[[int], str]) -> dict[int, Logprob]:
    """Where a token was chosen: the most probable ones and that itself."""
    ranked = [(place, *pair) for place, pair in enumerate(entry.top, start=1)]
    return {
        token: Logprob(logprob, rank, token_text(token))
        for rank, token, logprob in (*ranked, (entry.rank, entry.token, entry.logprob))
    }


@dataclass(frozen=True)
class CompletionOutput:
    """One output.

    Attributes:
        index: which of the request's ``n``.
        text: without the stop text.
        token_ids: every token generated, an end-of-text token included.
        logprobs: for each token itself and the most probable ones, by token; None if the request did not ask.
        cumulative_logprob: the sum of the tokens' own; None if the request did not ask.
        finish_reason: ``stop`` (end of text, a stop text or token) or ``length``.
        metrics: what it cost and how well its drafts were accepted.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason
    metrics: Stats


@dataclass(frozen=True)
class RequestOutput:
    """A request and its outputs.

    Attributes:
        request_id: its place in the call, as text.
        prompt: the text; None where tokens were given.
        prompt_token_ids: what the model was given; -1 where that was an embedding.
        outputs: ``n`` of them.
        prompt_logprobs: for each token of the prompt itself and the most probable ones, by token, None for the first;
            None if the request did not ask.
        finished: always True; outputs come whole.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
