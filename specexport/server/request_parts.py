"""Parts of requests: fields without effect, fields of the engine's options, messages, tools and constraints."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from specexport.contract.manifest import GenerationDefaults
from specexport.contract.options import Options, options
from specexport.runtime.params import MAX_LOGPROBS

MAX_CHOICES = 128
LARGEST = 2**31 - 1
_LIMITS = ("ge", "gt", "le", "lt")


@dataclass(frozen=True, eq=False)  # ``Annotated`` caches by equality, and 0 equals False
class Only:
    """A field that must have its default, be one of ``values``, or be empty."""

    values: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, {}, [], *self.values], "description": "Anything else is not supported."}

    def _check(self, value: Any) -> Any:
        same_type = (allowed for allowed in self.values if isinstance(allowed, bool) == isinstance(value, bool))
        if value not in ({}, []) and value not in tuple(same_type):
            expected = " or ".join(map(json.dumps, self.values))
            raise ValueError(f"not supported; leave it out{expected and f' or send {expected}'}")
        return value


def whole_text(value: Any) -> Any:
    """Refuses halves of characters in a JSON value that answers may repeat; pydantic checks texts with limits."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("string_unicode", "half a character") from error
    except RecursionError as error:
        raise PydanticCustomError("recursion", "nested too deeply") from error
    return value


Unsupported = Annotated[Any, Only()]
Label = Annotated[Annotated[str, Field(max_length=512)] | None, Field(description="A label: changes nothing.")]
Addition = Annotated[Any, Field(exclude=True, description="Added by a client or another server: changes nothing.")]

# Lists are refused at their first error, as reporting a million errors would take long.
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Tokens = Annotated[list[Count], Field(min_length=1, fail_fast=True)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
PromptAlternatives = Annotated[Alternatives | None, Field(description="The same of the prompt's tokens; not streamed.")]
Text = Annotated[str, Field(max_length=4_000_000)]
TokenId = Annotated[str, Field(pattern=r"^\d{1,9}$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
ToolMode = Literal["none", "auto", "required"]


def _nullable(schema: dict[str, Any]) -> None:
    """Allows null for optional fields in a schema."""
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = {"type": "null"}


class RequestModel(BaseModel):
    """The base class of everything in a request: strict, and without unknown fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, json_schema_extra=_nullable
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Removes nulls, which clients send for absent fields, except ``max_tokens``, where null means no limit."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name == "max_tokens"}


class FieldsWithoutEffect(RequestModel):
    """Fields without effect: labels, and fields that must have their default."""

    metadata: Annotated[dict[str, str], Field(max_length=64), AfterValidator(whole_text)] | None = Field(
        None, description="A label."
    )
    prompt_cache_key: Label = None
    prompt_cache_retention: Label = None
    request_id: Label = None
    safety_identifier: Label = None
    service_tier: Label = None
    user: Label = None
    audio: Unsupported = None
    background: Annotated[Any, Only((False,))] = None
    bad_words: Unsupported = None
    best_of: Annotated[Any, Only((1,))] = None
    continue_final_message: Annotated[Any, Only((False,))] = None
    detokenize: Annotated[Any, Only((True,))] = None
    early_stopping: Annotated[Any, Only((False,))] = None
    function_call: Annotated[Any, Only(("none",))] = None
    functions: Unsupported = None
    include: Unsupported = None
    include_reasoning: Annotated[Any, Only((True,))] = None
    include_stop_str_in_output: Annotated[Any, Only((False,))] = None
    length_penalty: Annotated[Any, Only((1.0,))] = None
    logits_processors: Unsupported = None
    modalities: Annotated[Any, Only((["text"],))] = None
    prediction: Unsupported = None
    priority: Annotated[Any, Only((0,))] = None
    prompt_logprobs: Unsupported = None
    return_token_ids: Annotated[Any, Only((False,))] = None
    return_tokens_as_token_ids: Annotated[Any, Only((False,))] = None
    spaces_between_special_tokens: Annotated[Any, Only((True,))] = None
    store: Annotated[Any, Only((False,))] = None
    suffix: Annotated[Any, Only(("",))] = None
    truncation: Annotated[Any, Only(("disabled",))] = None
    use_beam_search: Annotated[Any, Only((False,))] = None
    verbosity: Annotated[Any, Only(("medium",))] = None
    web_search_options: Unsupported = None


def model_of(
    base: type[BaseModel], kind: type[Options], names: Collection[str], **limits: dict[str, Any]
) -> type[BaseModel]:
    """A model with fields of options: types, ranges, help, and the defaults that a bundle's model cannot replace.

    ``limits`` replaces the ranges of some fields.
    """
    fields: dict[str, Any] = {}
    for option in (options(kind)[name] for name in names):
        models = option.name in GenerationDefaults.__struct_fields__  # a bundle's model may have another default
        optional = models or option.default is None
        text = f"{option.help} (default: the model's own)" if models else option.sentence
        about = {limit: value for limit, value in option.about.items() if limit in _LIMITS}
        about |= {"description": text[0].upper() + text[1:] + ".", **limits.get(option.name, {})}
        part: Any = Any if option.kind is object else option.kind
        kinds: Any = tuple[part, ...] if option.several else part
        default = None if optional else option.default
        fields[option.name] = (kinds | None if optional else kinds, Field(default, **about))
    return create_model(f"_{kind.__name__}Fields", __base__=base, **fields)


class SentBack(RequestModel):
    """The base class of parts of conversations, with what clients add to them, or keep of another server's answers."""

    cache_control: Addition = None
    finish_reason: Addition = None
    id: Addition = None
    index: Addition = None
    metadata: Addition = None
    parsed: Addition = None
    parsed_arguments: Addition = None
    provider_specific_fields: Addition = None
    reasoning_details: Addition = None
    thinking_blocks: Addition = None


class TextPart(SentBack):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: Unsupported = None
    logprobs: Unsupported = None


Content = Text | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)]


def plain_text(content: Content | None) -> str:
    """The text of a message, joined from its parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class CalledFunction(SentBack):
    """The called function, with its arguments as JSON."""

    name: ToolName
    arguments: Text = ""


class ToolCall(SentBack):
    """A call by the assistant."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(RequestModel):
    """A function that may be called; its arguments match its schema even if it is not strict."""

    name: ToolName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(whole_text)] = Field(
        {}, description="A JSON schema of an object."
    )
    strict: bool | None = None


class Tool(SentBack):
    """A tool."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    """A function's name."""

    name: ToolName


class ChosenTool(RequestModel):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class ChatMessage(SentBack):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_call_id: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] = []
    reasoning_content: Text | None = Field(None, description="A variable of the model's chat template.")
    reasoning: Text | None = Field(None, description="The same by vLLM's present name.")
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _with_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing, in a message of the role {self.role!r}")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class StructuredOutputs(RequestModel):
    """vLLM's ways to constrain an output, of which at most one may be given."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool = Field(False, description="Any JSON object.")
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    regex: Text | None = None
    grammar: Text | None = Field(None, description="llguidance's form of Lark.")
    disable_fallback: Annotated[Any, Only((False,))] = None
    disable_any_whitespace: Annotated[Any, Only((False,))] = None
    disable_additional_properties: Annotated[Any, Only((False,))] = None

    @model_validator(mode="after")
    def _at_most_one(self) -> StructuredOutputs:
        if len(self.bounds()) > 1:
            raise ValueError("give one of json, json_object, choice, regex and grammar")
        return self

    def bounds(self) -> list[dict[str, str]]:
        """The constraints as sampling parameters."""
        bounds: list[dict[str, str]] = []
        if self.json_ is not None:
            bounds.append({"json_schema": self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)})
        if self.json_object:
            bounds.append({"json_schema": ANY_OBJECT})
        if self.choice is not None:
            bounds.append({"grammar": "start: " + " | ".join(map(quote, self.choice))})
        if self.regex is not None:
            bounds.append({"grammar": f"start: {_lark_regex(self.regex)}"})
        if self.grammar is not None:
            bounds.append({"grammar": self.grammar})
        return bounds


ANY_OBJECT = '{"type": "object"}'


_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v", "\f": r"\f"}


def _lark_regex(regex: str) -> str:
    """A regular expression in Lark's syntax, without anchors at its ends, as it matches the whole output."""
    regex = re.sub(r"^\^|(?<!\\)((?:\\\\)*)\$$", lambda match: match[1] or "", regex)

    def escape(match: re.Match[str]) -> str:
        """Escapes slashes and line breaks, which end an expression in Lark, with or without a backslash before them."""
        letter = match[1] or match[0]
        return r"\/" if letter == "/" else _CONTROLS.get(letter, match[0])

    safe = re.sub(r"(?s)\\(.)|[/\n\r\t\v\f]", escape, regex)
    return f"/(?:{safe})/"


def quote(text: str) -> str:
    """A text as a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
