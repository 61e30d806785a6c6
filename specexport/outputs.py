"""The outputs of ``LLM``. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specexport.runtime import Stats, TokenLogprobs
from specexport.runtime.request import FinishReason

NO_TOKEN = -1
"""The token id that stands for an embedding of a prompt."""


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability.

    Attributes:
        logprob: in nats, before temperature and filters.
        rank: its rank among all tokens, 1 for the most probable.
        decoded_token: its text.
    """

    logprob: float
    rank: int
    decoded_token: str


def by_token(entry: TokenLogprobs, token_text: Callable[[int], str]) -> dict[int, Logprob]:
    """The most probable tokens and the chosen one, by token."""
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
        text: the output without the stop text.
        token_ids: every generated token, an end-of-text token included.
        logprobs: for each token its own and those of the most probable ones, by token; None unless requested.
        cumulative_logprob: the sum of the tokens' own; None unless requested.
        finish_reason: ``stop`` (end of text, a stop text or token) or ``length``.
        metrics: its costs and acceptance.
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
        request_id: its index in the call, as text.
        prompt: the text; None for a prompt of tokens.
        prompt_token_ids: the prompt's tokens; -1 for embeddings.
        outputs: ``n`` of them.
        prompt_logprobs: for each prompt token its own and those of the most probable ones, by token, None for the
            first; None unless requested.
        finished: always True.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
