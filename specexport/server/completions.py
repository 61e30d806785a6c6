"""``POST /v1/completions``, with the offsets of tokens in their text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from fastapi import Request, Response
from pydantic import BaseModel
from tokenizers import Tokenizer

from specexport.async_engine import AsyncStream
from specexport.contract.errors import RequestError
from specexport.runtime import Chunk, TokenLogprobs
from specexport.runtime.text import TextStream, special_tokens
from specexport.server import answers
from specexport.server.requests import CompletionRequest
from specexport.server.service import Service, finite_logprob, prompt_logprobs, respond


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Continues one prompt or several."""
    head = service.head(body, "cmpl")
    # A prompt is text, or a list of tokens; a list of either is several.
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts = cast(list[str | list[int]], [body.prompt] if single else body.prompt)
    engine = service.frontend.engine
    # Long texts take long, so they are encoded in a thread.
    encode = partial(service.frontend.tokens, add_special_tokens=body.add_special_tokens)
    tokens = [await asyncio.to_thread(encode, prompt) for prompt in prompts]
    params = service.params(body, body.max_tokens, body.logprobs)
    echoed: list[str] = []
    scores = body.echo and body.logprobs is not None
    if scores and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs: given with echo and logprobs, which return the same", param="prompt_logprobs"
        )
    params = params.replace(prompt_logprobs=body.logprobs if scores else body.prompt_logprobs)
    if body.echo:
        decode = engine.tokenizer.decode
        skip = body.skip_special_tokens
        texts = [prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=skip) for prompt in prompts]
        echoed = [text for text in texts for _ in range(body.n)]
    scored = [ids for ids in tokens for _ in range(body.n)] if scores else []
    streams = await service.start(tokens, params, body)
    form = _Format(service, head, body, streams, echoed, scored)
    return await respond(service, request, body, streams, form)


class _Format:
    """Text completions.

    ``echoed`` are the prompts that outputs repeat, ``scored`` the tokens of prompts whose log-probabilities are part of
    their outputs; otherwise these are a field of their own, as in vLLM.
    """

    def __init__(
        self,
        service: Service,
        head: dict[str, Any],
        body: CompletionRequest,
        streams: Sequence[AsyncStream],
        echoed: Sequence[str],
        scored: Sequence[Sequence[int]],
    ) -> None:
        self._frontend = service.frontend
        self._head, self._streams = head, streams
        self._echoed, self._scored = dict(enumerate(echoed)), dict(enumerate(scored))
        tokenizer = service.frontend.engine.tokenizer
        self._placed = [PlacedTokens(tokenizer, body.skip_special_tokens) for _ in streams]
        self._separate_scores = body.prompt_logprobs is not None

    def choice(self, index: int, chunk: Chunk) -> answers.CompletionChoice:
        prompt, echoed = self._scored.pop(index, None), self._echoed.pop(index, "")
        placed = self._placed[index].prompt(echoed, prompt) if prompt is not None else []
        placed += self._placed[index].add(entry.token for entry in chunk.logprobs)
        scores: list[TokenLogprobs | None] = [*chunk.logprobs]
        if prompt is not None:
            scores = [None, *self._streams[index].prompt_logprobs, *scores]
        separate_scores: dict[str, Any] = (
            {"prompt_logprobs": prompt_logprobs(self._streams[index], self._frontend)} if self._separate_scores else {}
        )
        return answers.CompletionChoice(
            index=index,
            text=echoed + chunk.text,
            logprobs=self._logprobs(scores, placed) if scores else None,
            finish_reason=cast(Any, chunk.finish_reason),
            **separate_scores,
        )

    def answer(self, choices: list[Any], usage: answers.Usage | None) -> BaseModel:
        fields = self._head | {"choices": choices} | ({} if usage is None else {"usage": usage})
        return answers.CompletionResponse(object="text_completion", **fields)

    def _logprobs(
        self, entries: Sequence[TokenLogprobs | None], placed: Sequence[tuple[str, int]]
    ) -> answers.CompletionLogprobs:
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for entry, (text, _) in zip(entries, placed, strict=True):
            chosen.append(None if entry is None else finite_logprob(entry.logprob))
            top.append(None if entry is None else self._likely(entry, text))
        texts, offsets = map(list, zip(*placed, strict=True))
        return answers.CompletionLogprobs(tokens=texts, token_logprobs=chosen, top_logprobs=top, text_offset=offsets)

    def _likely(self, entry: TokenLogprobs, text: str) -> dict[str, float]:
        """The most probable tokens and the chosen one, which has the text ``text`` if that is not empty."""
        # Different tokens may have the same text; the most probable one stands for them.
        best: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            name = text if token == entry.token and text else self._frontend.token_text(token)
            best.setdefault(name, finite_logprob(logprob))
        return best


class PlacedTokens:
    """The texts of an output's tokens with their offsets: the output from an offset on begins with the token's text.

    If several tokens make up a character, one of them has it as its text, and the others are empty. A special token
    that is left out of the text has its name as its text, and no length.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._special = special_tokens(tokenizer)
        self._end = 0
        self._begin()

    def _begin(self) -> None:
        self._stream = TextStream(self._tokenizer, skip_special_tokens=self._skip)

    def prompt(self, text: str, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Places the tokens of a prompt that the output follows; ``text`` is the prompt as the answer repeats it."""
        placed = self.add(tokens)
        if "".join(piece for piece, _ in self._visible(tokens, placed)) + self._stream.finish() != text:
            placed = self._by_encoding(text, tokens) or placed
        self._end = len(text)
        self._begin()
        return placed

    def add(self, tokens: Iterable[int]) -> list[tuple[str, int]]:
        """Places further tokens: the text and offset of each."""
        placed = []
        for token in tokens:
            hidden = self._skip and token in self._special
            piece = self._stream.push(token)
            placed.append((self._special[token] if hidden else piece, self._end))
            self._end += len(piece)
        return placed

    def _visible(self, tokens: Sequence[int], placed: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        pairs = zip(tokens, placed, strict=True)
        return [place for token, place in pairs if not (self._skip and token in self._special)]

    def _by_encoding(self, text: str, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Places the tokens of a text that they do not decode to, as some tokenizers change texts; empty if the tokens
        are not the text's.
        """
        for add_special_tokens in (True, False):
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            if list(encoding.ids) == list(tokens):
                break
        else:
            return []
        placed, end = [], 0
        for token, (_, after) in zip(tokens, encoding.offsets, strict=True):
            after = max(end, after)
            hidden = after == end and token in self._special
            placed.append((self._special[token] if hidden else text[end:after], end))
            end = after
        return placed
