"""``POST /v1/completions``, with the offsets of tokens in the text."""

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
    """Continues a prompt or several."""
    head = service.head(body, "cmpl")
    # A prompt is a text or a list of tokens; several prompts are a list of either.
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts = cast(list[str | list[int]], [body.prompt] if single else body.prompt)
    engine = service.frontend.engine
    # In a thread, as long texts take long.
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
    streams = await service.start(tokens, params, body)
    before = [ids for ids in tokens for _ in range(body.n)]
    form = _Format(service, head, body, streams, echoed, before)
    return await respond(service, request, body, streams, form)


class _Format:
    """Text completions.

    ``echoed`` are the prompts that outputs repeat; ``prompts`` are the tokens of each output's prompt.
    """

    def __init__(
        self,
        service: Service,
        head: dict[str, Any],
        body: CompletionRequest,
        streams: Sequence[AsyncStream],
        echoed: Sequence[str],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._frontend = service.frontend
        self._head, self._streams = head, streams
        # Log-probabilities of the prompt are part of the output's, instead of a separate field as in vLLM.
        scored = prompts if body.echo and body.logprobs is not None else ()
        self._echoed, self._scored = dict(enumerate(echoed)), dict(enumerate(scored))
        tokenizer = service.frontend.engine.tokenizer
        self._placed = [PlacedTokens(tokenizer, body.skip_special_tokens, prompt) for prompt in prompts]
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
        """Log-probabilities of the most probable tokens and the chosen token, whose text is ``text`` unless empty."""
        # Of tokens with the same text, the most probable counts.
        best: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            name = text if token == entry.token and text else self._frontend.token_text(token)
            best.setdefault(name, finite_logprob(logprob))
        return best


class PlacedTokens:
    """The texts of an output's tokens, with their offsets in the output.

    If a character consists of several tokens, one of them has it as its text, and the others are empty. A special token
    that the output leaves out has its name as its text, but takes no room. The output follows the tokens ``before`` it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._special = special_tokens(tokenizer)
        self._end = 0
        self._begin(before)

    def _begin(self, before: Sequence[int]) -> None:
        self._stream = TextStream(self._tokenizer, before=before, skip_special_tokens=self._skip)

    def prompt(self, text: str, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Places the tokens of a prompt before the output; ``text`` is the prompt as the answer repeats it."""
        self._begin(())
        placed = self.add(tokens)
        if "".join(piece for piece, _ in self._visible(tokens, placed)) + self._stream.finish() != text:
            placed = self._by_encoding(text, tokens) or placed
        self._end = len(text)
        self._begin(tokens)
        return placed

    def add(self, tokens: Iterable[int]) -> list[tuple[str, int]]:
        """Places further tokens; returns the text and offset of each."""
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
        """Places the tokens of a text to which they do not decode, as some tokenizers change texts.

        Empty if they are not the tokens of the text.
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
