"""Requests with a hypothesis: its tokens, and how one that is certain enough bypasses the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from specexport.contract.values import require_text
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Chunk, Request
from specexport.runtime.step_program import Outcome


class _Encoder(Protocol):
    """The part of the engine that is used here."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def encode(self, prompt: str | Sequence[int]) -> list[int]: ...


def continuation(engine: _Encoder, prompt: str | Sequence[int], text: str | Sequence[int]) -> list[int]:
    """The tokens of a text that follows a prompt; token ids are checked and returned.

    Raises:
        RequestError: a token id is outside the vocabulary, or the text is not valid.
    """
    if not isinstance(text, str):
        return engine.encode(text) if len(text) else []
    require_text(text, "hypothesis", "hypothesis")
    if isinstance(prompt, str) and prompt:
        # A text's first token may depend on what precedes it.
        before, whole = engine.encode(prompt), engine.encode(prompt + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return list(engine.tokenizer.encode(text, add_special_tokens=False).ids)


def bypasses_model(params: SamplingParams, entropy: float | None) -> bool:
    """Whether a hypothesis is certain enough to be the output without the model (arXiv 2603.11243, stage 1).

    Never if the request needs the model: for log-probabilities, or because it changes the logits.
    """
    gate = params.entropy_threshold if params.acceptance == "relaxed" else None
    scored = params.logprobs is not None or params.prompt_logprobs is not None
    model = scored or params.penalized or params.constrained
    return gate is not None and entropy is not None and entropy < gate and not model


class BypassRunner:
    """Runs requests whose hypothesis is their output, without a model or a slot."""

    def submit(self, request: Request) -> None:
        """Delivers the whole output as one chunk."""
        began = time.perf_counter()
        chunk = request.take(Outcome(list(request.view.hypothesis)), last=True)
        request.stats.total = request.stats.first_token = time.perf_counter() - began
        request.give(chunk)

    def next_chunk(self, request: Request) -> Chunk | None:
        """That chunk; None after it, or when the request was abandoned."""
        return request.chunks.popleft() if request.chunks and not request.abandoned else None

    def abandon(self, request: Request) -> None:
        """Marks a request that is no longer read."""
        request.abandoned = True
