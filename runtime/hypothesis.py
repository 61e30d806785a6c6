"""Requests that bring a hypothesis: its tokens, and one that is sure enough to be the output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from specexport.runtime.params import SamplingParams
from specexport.runtime.program import Outcome
from specexport.runtime.request import Chunk, Request
from specexport.runtime.values import require_text


class _Encoder(Protocol):
    """What is needed of the engine."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def encode(self, prompt: str | Sequence[int]) -> list[int]: ...


def continuation(engine: _Encoder, prompt: str | Sequence[int], text: str | Sequence[int]) -> list[int]:
    """The tokens of a text, or those given, that follow a prompt.

    Raises:
        RequestError: a token id is outside the vocabulary, or it is no text.
    """
    if not isinstance(text, str):
        return engine.encode(text) if len(text) else []
    require_text(text, "hypothesis", "hypothesis")
    if isinstance(prompt, str) and prompt:
        # How a text's first token reads may depend on what is before it.
        before, whole = engine.encode(prompt), engine.encode(prompt + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return list(engine.tokenizer.encode(text, add_special_tokens=False).ids)


def taken_as_it_is(params: SamplingParams, entropy: float | None) -> bool:
    """Whether a hypothesis is sure enough to be the output without the model (arXiv 2603.11243, stage 1).

    Never where log-probabilities are wanted, which only the model can tell, nor where its logits change.
    """
    gate = params.entropy_threshold if params.acceptance == "relaxed" else None
    scored = params.logprobs is not None or params.prompt_logprobs is not None
    model = scored or params.penalized or params.constrained
    return gate is not None and entropy is not None and entropy < gate and not model


class BypassRunner:
    """Runs requests whose hypothesis is their output: no model is asked, and no slot is taken."""

    def submit(self, request: Request) -> None:
        """Makes the whole output one chunk."""
        began = time.perf_counter()
        chunk = request.take(Outcome(list(request.view.hypothesis)), last=True)
        request.stats.total = request.stats.first_token = time.perf_counter() - began
        request.give(chunk)

    def next_chunk(self, request: Request) -> Chunk | None:
        """That chunk; None after it, or when the request was abandoned."""
        return request.chunks.popleft() if request.chunks and not request.abandoned else None

    def abandon(self, request: Request) -> None:
        """Nobody reads the request any more."""
        request.abandoned = True
