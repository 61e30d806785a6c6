"""Sampling parameters of a request."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from specexport.contract.errors import RequestError
from specexport.contract.generation import NO_RULES, GenerationRules
from specexport.runtime.values import plain, require_text, shown

MAX_LOGPROBS = 20
"""Most alternatives a token whose log-probabilities a request may ask for."""
_GREEDY_BELOW = 1e-5
"""Dividing logits by lower temperatures would overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Names and meanings are vLLM's.

    Filters apply in the order temperature, top-k, top-p, min-p, to the target's distribution p and to the draft's q
    alike, so speculation does not change what is sampled.

    Attributes:
        max_tokens: most tokens to generate; 0 generates none, None as many as the context holds.
        temperature: divides the logits; 0, and anything below 1e-5, takes the most probable token (greedy).
        top_p: keep the smallest set of most probable tokens that holds this much probability; 1 keeps all.
        top_k: keep this many most probable tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than this fraction of the most probable one; 0 keeps all.
        seed: gives the same text again on a machine where steps verify the same trees; None draws a fresh one.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: tokens that end the output as an end-of-text token does: its last token, not in its text.
        n: outputs for one prompt. A stream is one output; ``LLM`` and the server make several.
        logprobs: return each token's log-probability and those of this many most probable tokens; 0 returns its own
            alone, None nothing. They are the target's, before temperature and filters.
        prompt_logprobs: the same for every prompt token but the first, which has no context. The prompt is then read in
            steps of the bundle's widest verified width, without the prefix cache.
        logit_bias: added to the logits of tokens, by their ids: a mapping of numbers from -100 to 100.
        repetition_penalty: divides the positive logits of every token of the prompt and the output so far by this, and
            multiplies the negative ones; 1 changes nothing.
        frequency_penalty: subtracted from a token's logit for each time the output has it; from -2 to 2.
        presence_penalty: subtracted once from the logit of each token that the output has; from -2 to 2. Biases come
            first, then the penalties in this order, all before temperature and filters. At a node of a tree the output
            so far includes the draft tokens before it, so the text is what plain decoding would sample.
        min_tokens: least tokens before an end-of-text token, a stop token or the end of a stop text; if the context
            ends earlier, so does the output.
        skip_special_tokens: leave special tokens out of the text.
        json_schema: constrains the output to JSON of this schema, a mapping or its JSON; needs llguidance. Tokens are
            sampled from the model's distribution over those that the schema allows.
        grammar: constrains the output to a grammar in llguidance's dialect of Lark; not with a json_schema.
        ignore_eos: go on past end-of-text tokens, as benchmarks do.
        rules: further rules of the model's ``generation_config.json``; part of the model's own parameters. The default
            changes nothing.
        acceptance: ``lossless``; or ``typical``: a draft token stays if it is likely enough, so more are accepted, and
            the output no longer follows the model's distribution, though greedy decoding is still lossless; or
            ``relaxed``, for requests with a hypothesis: its tokens stay while the model finds them likely enough, in
            greedy decoding too (arXiv 2603.11243); not lossless.
        posterior_threshold: epsilon of typical acceptance (Medusa, arXiv 2401.10774); None for the bundle's.
        posterior_alpha: its alpha: a token of probability p stays if p > min(epsilon, alpha * exp(-entropy)); None for
            the bundle's.
        likelihood_threshold: of relaxed acceptance: a token stays if the model gives it more probability than this, at
            temperature 1 and before top-k, top-p and min-p. The paper has 0.2 for accuracy and 0.1 for speed.
        entropy_threshold: of relaxed acceptance: a hypothesis whose own entropy, in nats, is below this becomes
            the output without the model. The paper has 0.7 for accuracy and 3.0 for speed. None always runs the model.

    Numbers and arrays may be NumPy's or torch's.

    Raises:
        RequestError: a value is out of range; names the field.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    skip_special_tokens: bool = True
    json_schema: str | None = None
    grammar: str | None = None
    ignore_eos: bool = False
    rules: GenerationRules = NO_RULES
    acceptance: Literal["lossless", "typical", "relaxed"] = "lossless"
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    likelihood_threshold: float = 0.2
    entropy_threshold: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        stop, ends, added = self.stop, self.stop_token_ids, self.logit_bias
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _several("stop", stop))
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", ends))
        _require("logit_bias", added, added is None or isinstance(added, Mapping), "a mapping of token ids")
        object.__setattr__(self, "logit_bias", {plain(key): plain(value) for key, value in (added or {}).items()})
        if isinstance(self.json_schema, Mapping):
            try:
                object.__setattr__(self, "json_schema", json.dumps(self.json_schema, default=_number))
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"json_schema: not JSON: {error}", param="json_schema") from error
        for name in ("json_schema", "grammar"):
            value = getattr(self, name)
            expected = "a mapping, or its JSON as a text" if name == "json_schema" else "a text"
            _require(name, value, value is None or isinstance(value, str), expected)
            require_text(value or "", name, name)
        most = self.max_tokens
        _require("max_tokens", most, most is None or (_whole(most) and most >= 0), "a whole number >= 0, or None")
        _require("temperature", self.temperature, _finite(self.temperature) and self.temperature >= 0, "a number >= 0")
        _require("top_p", self.top_p, _finite(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        _require("top_k", self.top_k, _whole(self.top_k) and self.top_k >= -1, "a whole number >= -1")
        _require("min_p", self.min_p, _finite(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]")
        _require("seed", self.seed, self.seed is None or (_whole(self.seed) and self.seed >= 0), "a whole number >= 0")
        modes = ("lossless", "typical", "relaxed")
        _require("acceptance", self.acceptance, self.acceptance in modes, " or ".join(map(repr, modes)))
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            _require(name, value, value is None or (_finite(value) and 0 <= value <= 1), "a number in [0, 1]")
        least, entropy = self.likelihood_threshold, self.entropy_threshold
        _require("likelihood_threshold", least, _finite(least) and 0 <= least <= 1, "a number in [0, 1]")
        _require("entropy_threshold", entropy, entropy is None or (_finite(entropy) and entropy >= 0), "a number >= 0")
        texts = all(isinstance(text, str) and text for text in self.stop)
        _require("stop", self.stop, texts, "texts that are not empty")
        for text in self.stop:
            require_text(text, "stop", "stop")
        ids = all(_whole(token) and token >= 0 for token in self.stop_token_ids)
        _require("stop_token_ids", self.stop_token_ids, ids, "whole numbers >= 0")
        _require("n", self.n, _whole(self.n) and self.n >= 1, "a whole number >= 1")
        _require("rules", self.rules, isinstance(self.rules, GenerationRules), "GenerationRules")
        if self.rules is not NO_RULES:
            try:
                msgspec.convert(msgspec.to_builtins(self.rules), GenerationRules)
            except msgspec.ValidationError as error:
                raise RequestError(f"rules: {error}", param="rules") from error
        least = self.min_tokens
        _require("grammar", self.grammar, self.grammar is None or self.json_schema is None, "None with a json_schema")
        _require(
            "ignore_eos",
            self.ignore_eos,
            not (self.constrained and self.ignore_eos),
            "False with a json_schema, a grammar or tools, which end the text",
        )
        up_to = "a whole number >= 0" if most is None else f"0 to max_tokens, which is {most}"
        _require("min_tokens", least, _whole(least) and 0 <= least <= (least if most is None else most), up_to)
        _require(
            "min_tokens",
            least,
            not (self.constrained and least),
            "0 with a json_schema, a grammar or tools, which end the text",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(name, value, _finite(value) and -2 <= value <= 2, "a number in [-2, 2]")
        often = self.repetition_penalty
        _require("repetition_penalty", often, _finite(often) and 0.01 <= often <= 100, "a number in [0.01, 100]")
        biases = all(
            _whole(token) and token >= 0 and _finite(bias) and -100 <= bias <= 100
            for token, bias in self.logit_bias.items()
        )
        _require("logit_bias", dict(self.logit_bias), biases, "token ids with numbers in [-100, 100]")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            few = value is None or (_whole(value) and 0 <= value <= MAX_LOGPROBS)
            _require(name, value, few, f"a whole number from 0 to {MAX_LOGPROBS}")

    @property
    def constrained(self) -> bool:
        """Whether a schema or a grammar constrains the output."""
        return self.json_schema is not None or self.grammar is not None

    @property
    def penalized(self) -> bool:
        """Whether logits change before anything is sampled, other than by a grammar."""
        changes = self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1, self.min_tokens
        return any(changes) or bool(self.logit_bias) or self.rules.change_logits

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen instead of sampling."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    def replace(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _require(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {shown(value)}; expected {expected}", param=name)


def _several(name: str, values: object) -> tuple[Any, ...]:
    """Plain values from any iterable; None is empty."""
    iterable = isinstance(values, Iterable) and not isinstance(values, (str, bytes))
    _require(name, values, values is None or iterable, "a list")
    return tuple(map(plain, values or ()))  # type: ignore[call-overload]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # of a whole number that no float holds
        return False


def _number(value: Any) -> Any:
    """Converts numbers and arrays of NumPy and torch for JSON."""
    converted = plain(value)
    if converted is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return converted
