"""``Frontend``, the common part of ``LLM`` and ``AsyncEngine``: an engine and the defaults of its requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specexport.building import bundle_of_model, no_chat_template
from specexport.contract.errors import BuildError, ContextLengthError, RequestError
from specexport.contract.folders import expanded
from specexport.contract.methods import MethodOptions, SpeculativeConfig, known, listed, method_type, read_methods
from specexport.contract.options import keywords
from specexport.contract.reading import is_bundle, read_manifest
from specexport.contract.values import require_text, shown
from specexport.exporter.options import BuildSettings
from specexport.options import EngineOptions
from specexport.runtime import Engine, SamplingParams, Stream, TokenLogprobs
from specexport.runtime.chat import ChatTemplate, Message
from specexport.runtime.prompt import Prompt
from specexport.runtime.speculative import DEFAULT, Speculative, SpeculativeLike
from specexport.runtime.text import encode_text

_LONG = 16
"""A text is long if it has more characters than this, for each token of the context."""
_SLACK = 64
"""Maximum number of tokens by which the beginning of a text may exceed the same part of the whole text."""


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability.

    Attributes:
        logprob: the log-probability in nats, before temperature and filters.
        rank: the token's rank among all tokens, 1 for the most probable.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class Frontend:
    """An engine and the defaults of its requests. Safe to use from several threads.

    Attributes:
        name: the model or bundle, as the user named it.
        speculative: how requests speculate by default.
        seed: determines the seeds of requests without one, by their order; None for random seeds.
    """

    engine: Engine
    name: str
    speculative: Speculative = DEFAULT
    seed: int | None = None
    _count: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    @keywords(EngineOptions)
    def open(cls, *args: Any, **keys: Any) -> Frontend:
        """Opens a bundle, or a model, which is built into the cache if it is not there yet.

        Arguments and errors are the same as :class:`~specexport.llm.LLM`'s.
        """
        return cls._open(EngineOptions.from_keywords(*args, **keys), keys)

    @classmethod
    def open_for_chat(cls, **keys: Any) -> Frontend:
        """Opens a bundle or model for chats; refuses a model without a chat template before building it.

        Raises:
            RequestError: there is no chat template.
        """
        options = EngineOptions.from_keywords(**keys)
        frontend = cls._open(options, keys, chat=True)
        if frontend.engine.chat_template is None:
            frontend.close()
            raise no_chat_template(options.model)
        return frontend

    @classmethod
    def _open(cls, options: EngineOptions, keys: Mapping[str, Any], *, chat: bool = False) -> Frontend:
        """See :meth:`open`; ``keys`` are the options that the caller set."""
        model, bundle, config = options.model, options.bundle, options.speculative_config
        if (model is None) == (bundle is None):
            raise BuildError(f"model is {model!r} and bundle is {bundle!r}; give one of them", param="model")
        path = model if bundle is None else bundle
        if not isinstance(path, (str, PathLike)):
            raise BuildError(f"{'model' if bundle is None else 'bundle'} is {shown(path)}; expected a text or a path")
        build = {name: getattr(options, name) for name in BuildSettings.__struct_fields__ if name in keys}
        if model is not None and is_bundle(model):
            model, bundle = None, model
        loaded: tuple[MethodOptions, ...] = ()
        chosen = DEFAULT
        if bundle is not None:
            if build:
                name = next(iter(build))
                raise BuildError(f"{name} was given with a bundle, which is built already; leave it out", param=name)
            folder = Path(bundle)
            ranks = len(read_manifest(expanded(folder)).target.ranks) or 1
            if options.tensor_parallel_size not in (None, ranks):
                raise BuildError(
                    f"tensor_parallel_size is {options.tensor_parallel_size}, but {folder} was built for {ranks}; "
                    f"leave it out, or build with --tensor-parallel {options.tensor_parallel_size}",
                    param="tensor_parallel_size",
                )
            if config is not None:
                loaded, chosen = _of_bundle(config)
        else:
            folder = bundle_of_model(options, read_methods(config) if config is not None else (), build, chat=chat)
        engine = Engine.load(
            folder,
            threads=options.threads,
            check_hashes=options.check_hashes and bundle is not None,  # the cache has checked a model's bundle
            methods=loaded,
            max_model_len=options.max_model_len,
            calibrate=options.calibrate,
            cache_graphs=options.cache_graphs,
            backend=options.backend,
            gpu_memory_utilization=options.gpu_memory_utilization,
        )
        try:
            # Refuses methods and sizes that the bundle was not built for.
            engine.stream([0], speculative=chosen).close()
        except RequestError as error:
            engine.close()
            raise BuildError(f"speculative_config: {error}", param="speculative_config") from error
        return cls(engine, str(model or bundle), chosen, options.seed)

    def speculation(self, keys: Mapping[str, Any]) -> Speculative:
        """How a request with these settings speculates; without a method, by the default method."""
        if not keys:
            return self.speculative
        return Speculative.of(keys if "hypothesis" in keys else {"method": self.speculative.method, **keys})

    def chat_tokens(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        name: str | None = None,
    ) -> list[int]:
        """The prompt of a conversation; see :meth:`~specexport.runtime.chat.ChatTemplate.render`.

        Raises:
            RequestError: the model has no chat template, or its template refuses the messages.
        """
        text = self.require_chat_template().render(
            messages,
            variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            name=name,
        )
        return self.encode(text, add_special_tokens=False, param="messages")

    def require_chat_template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            RequestError: it has none.
        """
        if self.engine.chat_template is None:
            raise RequestError("messages: the model has no chat template; send a prompt instead", param="messages")
        return self.engine.chat_template

    def tokens(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt; see :meth:`encode` and :class:`~specexport.runtime.prompt.PromptEncoder`."""
        if isinstance(prompt, str):
            prompt = self.encode(prompt, add_special_tokens=add_special_tokens)
        return self.engine.encode(prompt)

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The tokens of a text; may be called while requests run, without delaying them.

        Raises:
            ContextLengthError: the text is long and its beginning overfills the context; the rest is not encoded.
            RequestError: the text is not valid UTF-8.
        """
        require_text(text, f"the {param}" if param == "prompt" else param, param)
        tokenizer, limit = self.engine.tokenizer, self.engine.max_model_len
        size = _LONG * limit
        while size < len(text):
            # Without trailing white space, which may become part of a following token.
            count = len(encode_text(tokenizer, text[:size].rstrip(), add_special_tokens=False))
            if count > limit + _SLACK:
                raise ContextLengthError(
                    f"{param}: a text of {len(text)} characters; the context holds {limit} tokens, and "
                    f"its first {size} characters are {count}; shorten it",
                    param=param,
                )
            size *= 4
        return encode_text(tokenizer, text, add_special_tokens=add_special_tokens)

    def streams(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculative: SpeculativeLike | None = None,
    ) -> list[Stream]:
        """The streams of a request's ``n`` outputs, which start when they are iterated.

        Raises:
            RequestError: a parameter cannot be honoured, or the prompt does not fit.
        """
        params = params or self.engine.params()
        if isinstance(prompt, str):
            prompt = self.encode(prompt)
        tokens = self.engine.encode(prompt)
        chosen = Speculative.of(speculative or self.speculative)
        if isinstance(chosen.hypothesis, str):
            expected = self.encode(chosen.hypothesis, add_special_tokens=False, param="hypothesis")
            chosen = msgspec.structs.replace(chosen, hypothesis=tuple(expected))
        seed = self._seed() if params.seed is None else params.seed
        seeds = [None if seed is None else seed + index for index in range(params.n)]
        return [self.engine.stream(tokens, params.replace(n=1, seed=seed), chosen) for seed in seeds]

    def token_text(self, token: int) -> str:
        """The text of a token in the middle of a text."""
        # Some decoders strip a leading space from the first token, so the text of a second one is used.
        single, double = (self.engine.tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2))
        return double[len(single) :] if double.startswith(single) else single

    def by_token(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The log-probabilities of the most probable tokens and the chosen token."""
        ranked = [(place, *pair) for place, pair in enumerate(entry.top, start=1)]
        return {
            token: Logprob(logprob, rank, self.token_text(token))
            for rank, token, logprob in (*ranked, (entry.rank, entry.token, entry.logprob))
        }

    def close(self) -> None:
        self.engine.close()

    def _seed(self) -> int | None:
        if self.seed is None:
            return None
        return int(np.random.SeedSequence([self.seed, next(self._count)]).generate_state(1)[0])


def _of_bundle(config: SpeculativeConfig) -> tuple[tuple[MethodOptions, ...], Speculative]:
    """Splits the configuration of a bundle into methods without graphs and the default of requests."""
    methods: list[MethodOptions] = []
    chosen: list[Speculative] = []
    for entry in listed(config):
        mapping = {"method": entry} if isinstance(entry, str) and ":" not in entry else entry
        name = mapping.get("method") if isinstance(mapping, Mapping) else None
        if isinstance(mapping, Mapping) and (name is None or (name in known() and method_type(str(name)).needs_graph)):
            extra = next((key for key in mapping if key not in ("method", "num_speculative_tokens")), None)
            if extra is not None:
                raise BuildError(
                    f"speculative_config: {extra} was given with a bundle, which is built already; name method and "
                    "num_speculative_tokens alone, or build another bundle",
                    param="speculative_config",
                )
            try:
                chosen.append(Speculative.of(mapping))
            except RequestError as error:
                raise BuildError(f"speculative_config: {error}", param="speculative_config") from error
        else:
            (method,) = read_methods(mapping)
            methods.append(method)
            if not method_type(method.name).takes_hypothesis:  # only requests with a hypothesis use such a method
                chosen.append(Speculative(method=method.name))
    return tuple(methods), chosen[0] if chosen else DEFAULT
