"""``LLM`` generates the outputs of many prompts offline."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tqdm import tqdm

from specexport.contract.errors import RequestError
from specexport.contract.options import keywords
from specexport.contract.values import Array, counted, is_sequence, plain, shown, token_ids
from specexport.frontend import Frontend, Logprob
from specexport.options import EngineOptions
from specexport.runtime import Completion, EmbedsPrompt, SamplingParams, Stats, Stream
from specexport.runtime.chat import Message
from specexport.runtime.prompt import Prompt as EnginePrompt
from specexport.runtime.request import FinishReason, complete
from specexport.runtime.speculative import Speculative, SpeculativeLike

Prompt = str | Sequence[int] | Array | EmbedsPrompt | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or ``{"prompt_embeds": parts}``, the same as
``EmbedsPrompt(parts)``."""
NO_TOKEN = -1
"""The token id in place of an embedding of a prompt."""


@dataclass(frozen=True)
class CompletionOutput:
    """An output of a request.

    Attributes:
        index: index among the request's ``n`` outputs.
        text: the text, without the stop text.
        token_ids: all generated tokens, an end-of-text token included.
        logprobs: log-probabilities at each token, by token: its own and the highest; None unless requested.
        cumulative_logprob: sum of the log-probabilities of the tokens; None unless requested.
        finish_reason: ``stop`` (end of text, a stop text or token) or ``length``.
        metrics: costs and acceptance.
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
    """The outputs of a request.

    Attributes:
        request_id: index of the request in the call, as text.
        prompt: the prompt's text; None for a prompt of tokens.
        prompt_token_ids: the prompt's tokens; -1 for embeddings.
        outputs: the ``n`` outputs.
        prompt_logprobs: log-probabilities at each prompt token, by token: its own and the highest, or None at the first
            token; None unless requested.
        finished: always True.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True


class LLM:
    """Generates offline from a bundle, or from a model, which is built on first use. Names and meanings are vLLM's.

    >>> llm = LLM("Qwen/Qwen3-4B", speculative_config={"model": "Qwen/Qwen3-0.6B"})  # doctest: +SKIP
    >>> llm.generate(["one", "two"], SamplingParams(temperature=0.8))  # doctest: +SKIP

    Takes the fields of :class:`~specexport.options.EngineOptions`, all but ``model`` by name. ``docs/python.md`` has a
    table of them, ``help(EngineOptions)`` their types.

    Raises:
        BuildError: an option is unknown or wrong, or the build fails.
        BundleError: the bundle is incomplete, altered or too new.
        BackendError: its backend is not installed or refuses a graph.
    """

    @keywords(EngineOptions)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._frontend = Frontend.open(*args, **options)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._frontend.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling parameters, used by default."""
        return self._frontend.engine.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        speculative: SpeculativeLike | Sequence[SpeculativeLike] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts.

        Args:
            prompts: a prompt or several. A list or array of whole numbers is a prompt of token ids; an array ``[B,N]``
                is B such prompts.
            sampling_params: parameters for all prompts, or for each; None for :meth:`get_default_sampling_params`.
            use_tqdm: show a progress bar on standard error.
            speculative: how to speculate, for all prompts or for each; None for ``speculative_config``.

        Returns:
            The outputs of each prompt, in order.

        Raises:
            RequestError: a request is refused, so that nothing is generated; names the prompt and the reason.
        """
        pairs = [_text_and_tokens(index, prompt) for index, prompt in enumerate(_as_list(prompts))]
        return self._run(pairs, sampling_params, use_tqdm, speculative)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        speculative: SpeculativeLike | Sequence[SpeculativeLike] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, formatted by the model's chat template.

        Args:
            messages: a conversation or several, each a list of ``{"role": ..., "content": ...}``, whose content is a
                text or a list of ``{"type": "text", "text": ...}``.
            sampling_params: as for :meth:`generate`.
            use_tqdm: as for :meth:`generate`.
            chat_template: name of one of the model's templates; None for ``tool_use`` with tools, if there is one, else
                ``default``.
            add_generation_prompt: end the prompt with the beginning of the model's answer.
            continue_final_message: continue the last message instead of answering it.
            tools: descriptions of functions that may be called, for the template.
            chat_template_kwargs: further variables of the template.
            speculative: as for :meth:`generate`.

        Raises:
            RequestError: the model has no chat template, its template refuses the messages, or a parameter is wrong.
        """
        if not is_sequence(messages):
            raise RequestError(f"messages is {shown(messages)}; expected a list of messages", param="messages")
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        variables = {**({} if tools is None else {"tools": list(tools)}), **(chat_template_kwargs or {})}
        tokens = [
            self._frontend.chat_tokens(
                cast(Sequence[Message], conversation),
                variables,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                name=chat_template,
            )
            for conversation in conversations
        ]
        return self._run([(None, ids) for ids in tokens], sampling_params, use_tqdm, speculative)

    def _run(
        self,
        prompts: list[tuple[str | None, EnginePrompt]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        speculative: SpeculativeLike | Sequence[SpeculativeLike] | None,
    ) -> list[RequestOutput]:
        params = _per_prompt("sampling_params", sampling_params, SamplingParams, len(prompts))
        choices = _per_prompt("speculative", speculative, (Speculative, Mapping, str), len(prompts))
        outputs = [
            self._streams(index, prompt, params[index], choices[index]) for index, (_, prompt) in enumerate(prompts)
        ]
        lengths = [len(streams[0].tokens) for streams in outputs]
        completions = iter(self._complete([stream for streams in outputs for stream in streams], use_tqdm))
        return [
            RequestOutput(
                str(index),
                text,
                tuple(max(token, NO_TOKEN) for token in streams[0].tokens[:length]),
                tuple(self._output(at, stream.params, next(completions)) for at, stream in enumerate(streams)),
                self._prompt_logprobs(streams[0]),
            )
            for index, ((text, _), streams, length) in enumerate(zip(prompts, outputs, lengths, strict=True))
        ]

    def _streams(
        self,
        index: int,
        prompt: EnginePrompt,
        params: SamplingParams | None,
        speculative: SpeculativeLike | None,
    ) -> list[Stream]:
        try:
            return self._frontend.streams(prompt, params, speculative)
        except RequestError as error:
            raise type(error)(f"prompt {index}: {error}", param=error.param) from error

    def _complete(self, streams: list[Stream], use_tqdm: bool) -> list[Completion]:
        """Runs streams to their ends, as many at once as the engine has slots."""
        size = shutil.get_terminal_size()  # tqdm shows nothing in a terminal of unknown size
        shown = use_tqdm and streams and sys.stderr is not None  # which a program without a console lacks
        columns, lines = size.columns, size.lines
        # A disabled bar would start a thread too.
        bar = tqdm(total=len(streams), desc="generating", disable=None, ncols=columns, nrows=lines) if shown else None
        engine, waiting, running = self._frontend.engine, deque(streams), list[Stream]()
        completions: dict[Stream, Completion] = {}
        with bar or contextlib.nullcontext():
            try:
                while waiting or running:
                    while waiting and len(running) < engine.slots:
                        running.append(waiting.popleft())
                        running[-1].start()
                    engine.wait_for_end(running)
                    for stream in [stream for stream in running if stream.ended]:
                        completions[stream] = complete(stream)
                        running.remove(stream)
                        if bar is not None:
                            bar.update()
            finally:
                for stream in running:
                    stream.close()
        return [completions[stream] for stream in streams]

    def _output(self, index: int, params: SamplingParams, result: Completion) -> CompletionOutput:
        logprobs = None if params.logprobs is None else list(map(self._frontend.by_token, result.logprobs))
        total = sum(entry.logprob for entry in result.logprobs) if logprobs is not None else None
        text, reason = result.text, result.finish_reason
        return CompletionOutput(index, text, result.token_ids, logprobs, total, reason, result.stats)

    def _prompt_logprobs(self, stream: Stream) -> list[dict[int, Logprob] | None] | None:
        if stream.params.prompt_logprobs is None:
            return None
        return [None, *map(self._frontend.by_token, stream.prompt_logprobs)]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The list of prompts; a sequence of numbers is a single prompt."""
    if isinstance(prompts, (str, Mapping, EmbedsPrompt)):
        return [prompts]
    several = plain(prompts)
    if not is_sequence(several):
        raise RequestError(f"prompts is {shown(prompts)}; expected text or token ids, or a list of either")
    return [several] if several and isinstance(plain(several[0]), (int, float)) else list(several)


def _per_prompt(name: str, argument: Any, kinds: type | tuple[type, ...], count: int) -> list[Any]:
    """The argument's value for each prompt: the same value for all, or an item of a sequence for each."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    values = [argument] * count if argument is None or isinstance(argument, kinds) else argument
    allowed = (*kinds, type(None))
    wrong = next((v for v in values if not isinstance(v, allowed)), None) if is_sequence(values) else values
    if wrong is not None:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise RequestError(f"{name} is {shown(wrong)}; expected {expected}, for all prompts or for each")
    if len(values) != count:
        raise RequestError(f"{len(values)} {name} for {counted(count, 'prompt')}; give one for all, or one for each")
    return list(values)


def _text_and_tokens(index: int, prompt: Prompt) -> tuple[str | None, EnginePrompt]:
    """A prompt's text, if it is text, and its form for the engine."""
    if isinstance(prompt, str):
        return prompt, prompt
    if not isinstance(prompt, Mapping):
        return None, prompt
    match dict(prompt):
        case {"prompt": str(text), **unknown} if not unknown:
            return text, text
        case {"prompt_token_ids": ids, **unknown} if not unknown:
            return None, token_ids(ids, f"prompt {index}: prompt_token_ids")
        case {"prompt_embeds": parts, **unknown} if not unknown:
            return None, EmbedsPrompt(parts)
        case {"prompt": wrong, **unknown} if not unknown:
            raise RequestError(f"prompt {index}: its text is {shown(wrong)}; token ids are called prompt_token_ids")
    raise RequestError(
        f"prompt {index} has the keys {sorted(map(str, prompt))}; expected one of prompt, prompt_token_ids and "
        "prompt_embeds"
    )
