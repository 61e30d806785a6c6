"""Sampling parameters of a request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

import msgspec
from msgspec import Meta

from specexport.contract.errors import RequestError
from specexport.contract.manifest import NO_RULES, GenerationRules
from specexport.contract.options import Options, option
from specexport.contract.values import plain, require_text, shown

DEFAULT_MAX_TOKENS = 128
MAX_LOGPROBS = 20
"""Most alternatives a token whose log-probabilities a request may ask for."""
_GREEDY_BELOW = 1e-5
"""Dividing logits by lower temperatures would overflow."""
_text, _sampling, _speculation = (partial(option, group=group) for group in ("text", "sampling", "speculation"))

if TYPE_CHECKING:  # the types that callers may pass
    _Texts = Sequence[str]
    _TokenIds = Sequence[int]
    _Schema = str | Mapping[str, Any]
else:  # the types that they are converted to
    _Texts, _TokenIds, _Schema = tuple[str, ...], tuple[int, ...], str


class SamplingParams(Options, frozen=True):
    """The parameters for continuing one prompt. Names and meanings are vLLM's.

    ``logit_bias`` comes first, then the penalties in the order repetition, frequency, presence. Filters follow in the
    order temperature, top-k, top-p, min-p, for the target's distribution p and the draft's q alike. At a node of a tree
    the output so far includes the draft tokens before it. So speculation does not change the distribution of texts.

    Numbers and arrays may be NumPy's or torch's.

    Attributes:
        max_tokens: most tokens to generate; None for as many as the context holds.
        temperature: divide logits by this; 0, and anything below 1e-5, is greedy.
        top_p: keep the most probable tokens with this total probability; 1 keeps all, 0 is greedy.
        top_k: keep the N most probable tokens; 0 or -1 keeps all.
        min_p: keep tokens with this share of the highest probability; 0 keeps all.
        seed: gives the same text again on a machine where steps verify the same trees (default: a new one).
        stop: texts that end the output and are not part of it (default: none).
        stop_after: stop texts count only behind this text, such as the end of a model's thoughts (default: from the
            start).
        stop_token_ids: tokens that end the output as an end-of-text token does: its last token, not in its text
            (default: none).
        n: outputs for a prompt; a stream is one, LLM and the server return several.
        logprobs: return each token's log-probability and those of this many most probable tokens; they are the
            target's, before temperature and filters (default: none).
        prompt_logprobs: the same of every prompt token but the first; the prompt is then read without the prefix cache
            (default: none).
        logit_bias: added to the logits of tokens, by their ids (default: none).
        repetition_penalty: divides the positive logits of tokens in the prompt or output, and multiplies negative ones;
            1 is none.
        frequency_penalty: subtracted from a token's logit for each time the output has it.
        presence_penalty: subtracted once from the logit of each token that the output has.
        min_tokens: tokens before any that ends the output; if the context ends earlier, so does the output.
        skip_special_tokens: leave special tokens out of the text.
        json_schema: constrains the output to JSON of this schema; needs llguidance (default:
            none).
        grammar: constrains the output to a grammar in llguidance's dialect of Lark (default: none).
        ignore_eos: continue past end-of-text tokens, up to the maximum length.
        rules: further rules of the model's generation_config.json (default: none).
        acceptance: acceptance rule; typical and relaxed (for a hypothesis) accept more and are not lossless.
        posterior_threshold: epsilon of typical acceptance (default: the bundle's).
        posterior_alpha: its alpha: a token of probability p stays if p > min(epsilon, alpha * exp(-entropy)) (default:
            the bundle's).
        likelihood_threshold: relaxed acceptance accepts tokens of more than this probability; the paper has 0.2, and
            0.1 for speed.
        entropy_threshold: relaxed acceptance takes a whole hypothesis of less entropy than this, in nats; the paper has
            0.7, and 3.0 for speed (default: never).

    Raises:
        RequestError: a value is out of range; names the field.
    """

    max_tokens: Annotated[int | None, _text("N", short="-n", ge=0)] = DEFAULT_MAX_TOKENS
    temperature: Annotated[float, _sampling("T", ge=0)] = 1.0
    top_p: Annotated[float, _sampling("P", ge=0, le=1)] = 1.0
    top_k: Annotated[int, _sampling("N", ge=-1, le=2**31 - 1, expected="a whole number >= -1")] = 0
    min_p: Annotated[float, _sampling("P", ge=0, le=1)] = 0.0
    seed: Annotated[int | None, _sampling("N", ge=0)] = None
    stop: Annotated[_Texts, _text("TEXT", repeat=True, min_length=1)] = ()
    stop_after: Annotated[str, _text("TEXT")] = ""
    stop_token_ids: Annotated[_TokenIds, _text("ID", ge=0)] = ()
    n: Annotated[int, _text("N", ge=1)] = 1
    logprobs: Annotated[int | None, _text("N", ge=0, le=MAX_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, _text("N", ge=0, le=MAX_LOGPROBS)] = None
    logit_bias: Annotated[dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-100, le=100)]], _sampling()] = {}  # noqa: RUF012
    repetition_penalty: Annotated[float, _sampling("R", ge=0.01, le=100)] = 1.0
    frequency_penalty: Annotated[float, _sampling("F", ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, _sampling("F", ge=-2, le=2)] = 0.0
    min_tokens: Annotated[int, _text("N", ge=0)] = 0
    skip_special_tokens: Annotated[bool, _text(off="keep special tokens in the text")] = True
    json_schema: Annotated[_Schema | None, _text("JSON", expected="a mapping, or its JSON")] = None
    grammar: Annotated[str | None, _text("LARK")] = None
    ignore_eos: Annotated[bool, _text()] = False
    rules: Annotated[GenerationRules, _text(hidden=True, expected="a GenerationRules")] = NO_RULES
    acceptance: Annotated[Literal["lossless", "typical", "relaxed"], _speculation()] = "lossless"
    posterior_threshold: Annotated[float | None, _speculation("E", ge=0, le=1)] = None
    posterior_alpha: Annotated[float | None, _speculation("A", ge=0, le=1)] = None
    likelihood_threshold: Annotated[float, _speculation("P", ge=0, le=1)] = 0.2
    entropy_threshold: Annotated[float | None, _speculation("H", ge=0)] = None

    @classmethod
    def refusal(cls, message: str, name: str) -> RequestError:
        return RequestError(message, param=name)

    def __hash__(self) -> int:
        fields = (getattr(self, name) for name in self.__struct_fields__)
        return hash(tuple(value for value in fields if not isinstance(value, dict)))

    def __post_init__(self) -> None:
        """Converts the forms in which callers may pass texts, lists and schemas, then checks all values."""
        for name in ("stop", "stop_token_ids"):
            msgspec.structs.force_setattr(self, name, _several(getattr(self, name)))
        if self.logit_bias is None:
            msgspec.structs.force_setattr(self, "logit_bias", {})
        if isinstance(self.json_schema, Mapping):
            try:
                msgspec.structs.force_setattr(self, "json_schema", json.dumps(self.json_schema, default=_number))
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"json_schema: not JSON: {error}", param="json_schema") from error
        super().__post_init__()

    def check(self) -> None:
        """Checks texts, and parameters against each other.

        Raises:
            RequestError: a text is not UTF-8, or two parameters contradict each other.
        """
        schema = cast("str | None", self.json_schema)
        for name, texts in (
            ("json_schema", [schema]),
            ("grammar", [self.grammar]),
            ("stop", (*self.stop, self.stop_after)),
        ):
            for text in texts:
                require_text(text or "", name, name)
        if self.rules is not NO_RULES:
            try:
                msgspec.convert(msgspec.to_builtins(self.rules), GenerationRules)
            except msgspec.ValidationError as error:
                raise RequestError(f"rules: {error}", param="rules") from error
        if self.grammar is not None and self.json_schema is not None:
            raise RequestError("grammar was given with json_schema; give one of them", param="grammar")
        ended = "with a json_schema, a grammar or tools, which end the text"
        if self.constrained and self.ignore_eos:
            self._refuse("ignore_eos", f"False {ended}")
        if self.constrained and self.min_tokens:
            self._refuse("min_tokens", f"0 {ended}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"0 to max_tokens, which is {self.max_tokens}")

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise RequestError(f"{name} is {shown(getattr(self, name))}; expected {expected}", param=name)

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
        return self.temperature < _GREEDY_BELOW or self.top_k == 1 or self.top_p == 0

    def replace(self, **changes: Any) -> SamplingParams:
        return msgspec.structs.replace(self, **changes)


def require_params(params: object) -> None:
    """Refuses other values for a request's parameters, such as a dictionary.

    Raises:
        RequestError: it is neither None nor :class:`SamplingParams`.
    """
    if not isinstance(params, (SamplingParams, NoneType)):
        raise RequestError(f"params is {shown(params)}; expected SamplingParams", param="params")


def _several(values: object) -> object:
    """A text or any iterable as a tuple; None as an empty one."""
    if isinstance(values, (str, bytes)) or values is None:
        return () if values is None else (values,)
    return tuple(values) if isinstance(values, Iterable) else values


def _number(value: Any) -> Any:
    """Converts numbers and arrays of NumPy and torch for JSON."""
    converted = plain(value)
    if converted is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return converted
