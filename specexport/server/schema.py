"""Requests and responses: OpenAI's names and meanings, and some of vLLM's.

Unknown fields are refused, and so are known ones that ask for something unsupported: nothing is ignored.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import core_schema

from specexport.runtime.params import MAX_LOGPROBS

MAX_CHOICES = 128
_LARGEST = 2**31 - 1


@dataclass(frozen=True, eq=False)  # ``Annotated`` caches by equality, and 0 equals False
class Only:
    """A field that may only have its default, one of ``values``, or be empty; anything else is refused."""

    values: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, {}, [], *self.values], "description": "Anything else is not supported."}

    def _checked(self, value: Any) -> Any:
        same_type = (allowed for allowed in self.values if isinstance(allowed, bool) == isinstance(value, bool))
        if value not in ({}, []) and value not in tuple(same_type):
            expected = " or ".join(map(json.dumps, self.values))
            raise ValueError(f"not supported; leave it out{expected and f' or send {expected}'}")
        return value


Unsupported = Annotated[Any, Only()]
Label = Annotated[Annotated[str, Field(max_length=512)] | None, Field(description="A label: changes nothing.")]

# Lists are refused at their first error: reporting a million of them would take long.
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
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


class _Request(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, json_schema_extra=_nullable
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Removes nulls, which clients send for absent fields; for ``max_tokens`` null means no limit."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name == "max_tokens"}


class Accepted(_Request):
    """Fields without effect: labels, and fields that may only have their default."""

    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = Field(None, description="A label.")
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


class StreamOptions(_Request):
    """How to stream."""

    include_usage: bool = Field(False, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool = Field(False, description="Send the usage so far with every chunk.")
    include_obfuscation: Annotated[Any, Only((False,))] = None


class SpeculativeOptions(_Request):
    """How a request speculates: keys of ``speculative_config``, those of a method that needs no graph among them."""

    model_config = ConfigDict(extra="allow")
    method: str | None = Field(None, max_length=64, description="One of the bundle's methods.")
    num_speculative_tokens: Count | None = Field(None, description="One of its sizes; 0 decodes plainly.")


class StructuredOutputs(_Request):
    """vLLM's ways to constrain an output: one of them, or none."""

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
        """As parameters of the engine."""
        bounds: list[dict[str, str]] = []
        if self.json_ is not None:
            bounds.append({"json_schema": self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)})
        if self.json_object:
            bounds.append({"json_schema": ANY_OBJECT})
        if self.choice is not None:
            bounds.append({"grammar": "start: " + " | ".join(map(quoted, self.choice))})
        if self.regex is not None:
            bounds.append({"grammar": f"start: {_lark_regex(self.regex)}"})
        if self.grammar is not None:
            bounds.append({"grammar": self.grammar})
        return bounds


ANY_OBJECT = '{"type": "object"}'


_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v", "\f": r"\f"}


def _lark_regex(regex: str) -> str:
    """A regular expression in Lark's syntax; it matches the whole output, so anchors at its ends are removed."""
    regex = re.sub(r"^\^|(?<!\\)((?:\\\\)*)\$$", lambda match: match[1] or "", regex)

    def escape(match: re.Match[str]) -> str:
        """Escapes slashes and line breaks, which end it in Lark; ``re.escape`` puts a backslash before either."""
        letter = match[1] or match[0]
        return r"\/" if letter == "/" else _CONTROLS.get(letter, match[0])

    safe = re.sub(r"(?s)\\(.)|[/\n\r\t\v\f]", escape, regex)
    return f"/(?:{safe})/"


def quoted(text: str) -> str:
    """A string literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


class GenerationRequest(Accepted):
    """The common fields of completions, chats and responses."""

    model: str | None = Field(None, max_length=4096, description="One of /v1/models; may be left out.")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Outputs for a prompt.")
    stream: bool = Field(False, description="Send chunks as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="With stream only.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="Texts that end the output and are not part of it; None for the model's own, if any."
    )
    seed: int | None = Field(
        None, ge=-1, le=2**63 - 1, description="The same output again where steps verify the same trees; -1 is none."
    )
    temperature: float | None = Field(None, ge=0, le=2, description="None for the model's own; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="None for the model's own.")
    frequency_penalty: float = Field(0, ge=-2, le=2, description="Subtracted per generated occurrence of a token.")
    presence_penalty: float = Field(0, ge=-2, le=2, description="Subtracted from the logits of generated tokens.")
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] = Field(
        {}, description="Added to the logits of tokens."
    )
    # vLLM's, and ours.
    top_k: int | None = Field(None, ge=-1, le=_LARGEST, description="Keep this many most probable tokens; 0 keeps all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens less probable than this share of the best.")
    stop_token_ids: Annotated[list[Count], Field(max_length=64)] = Field([], description="Tokens that end the output.")
    ignore_eos: bool = Field(False, description="Go on past the end of text.")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Of tokens in the prompt or output; 1 is none, None the model's own."
    )
    min_tokens: Count | None = Field(
        None, description="Tokens before any that ends the output; None for the model's own."
    )
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Constrains the output.")
    speculative: SpeculativeOptions | None = Field(None, description="How to speculate; None as the server does.")
    include_speculation: bool = Field(False, description="Add the counts of speculation to the usage.")
    include_steps: bool = Field(False, description="Streamed: each token's draft token, and the step's tree.")
    timeout: float | None = Field(
        None, gt=0, le=86400, description="Seconds, including the wait; at most the server's."
    )

    @property
    def hypothesis(self) -> str | None:
        """The expected output."""
        return None

    @property
    def bound_by(self) -> str:
        """The field that constrains the output."""
        return "structured_outputs"


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    ) = Field(description="Text or token ids; several of either are several prompts.")
    max_tokens: Count | None = Field(
        16, description="None for what the context holds; left out, the model's own if it has one."
    )
    logprobs: Alternatives | None = Field(None, description="Return log-probabilities, with this many others each.")
    prompt_logprobs: PromptAlternatives = None
    echo: bool = Field(False, description="Begin the text with the prompt.")
    add_special_tokens: bool = Field(True, description="Of a text: those the tokenizer adds by itself.")


class TextPart(_Request):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: Unsupported = None
    logprobs: Unsupported = None


Content = Text | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)]


def plain_text(content: Content | None) -> str:
    """The text of a message, whose parts are joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class CalledFunction(_Request):
    """The called function, with its arguments as JSON."""

    name: ToolName
    arguments: Text


class ToolCall(_Request):
    """A call by the assistant."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(_Request):
    """A function that may be called; its arguments always match its schema, so strict changes nothing."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] = Field({}, description="A JSON schema of an object.")
    strict: bool | None = None


class Tool(_Request):
    """A tool."""

    type: Literal["function"]
    function: Function


class FunctionName(_Request):
    """A function's name."""

    name: ToolName


class ChosenTool(_Request):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class ChatMessage(_Request):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_call_id: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] = []
    reasoning_content: Text | None = Field(None, description="A variable of the model's chat template.")
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class AnyFormat(_Request):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(_Request):
    """A JSON schema with a name."""

    name: str = Field(max_length=64)
    # The field's name is schema, which is a method of pydantic's models.
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = Field(None, max_length=4096)
    strict: bool | None = None


class JsonSchema(_Request):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Prediction(_Request):
    """The expected answer."""

    type: Literal["content"]
    content: Content


class TemplateOptions(_Request):
    """How a conversation is formatted."""

    chat_template: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="The name of one of the model's chat templates, such as tool_use or rag."
    )
    chat_template_kwargs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Any] = Field(
        {}, description="Variables the model's chat template knows."
    )
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = Field(
        None, description="A variable of the model's chat template."
    )

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the template, in addition to the messages."""
        return ({} if self.documents is None else {"documents": self.documents}) | self.chat_template_kwargs


class ChatRequest(GenerationRequest, TemplateOptions):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Count | None = Field(None, description="None for what the context holds.")
    max_tokens: Count | None = Field(None, description="The older name of max_completion_tokens.")
    logprobs: bool = Field(False, description="Return each token's log-probability.")
    top_logprobs: Alternatives | None = Field(None, description="And those of this many others.")
    prompt_logprobs: PromptAlternatives = None
    response_format: Annotated[AnyFormat | JsonSchema, Field(discriminator="type")] | None = Field(
        None, description="Constrains the answer to a grammar."
    )
    prediction: Prediction | None = Field(None, description="The expected answer, verified as a draft.")
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = Field([], description="What may be called.")
    tool_choice: ToolMode | ChosenTool | None = Field(None, description="Whether one is called; auto if there are any.")
    parallel_tool_calls: bool = Field(True, description="Whether there may be several calls.")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="A variable of the model's chat template."
    )
    add_generation_prompt: bool = Field(True, description="End the prompt with what introduces an answer.")
    add_special_tokens: Annotated[Any, Only((False,))] = None
    echo: Annotated[Any, Only((False,))] = None

    @property
    def hypothesis(self) -> str | None:
        return plain_text(self.prediction.content) if self.prediction is not None else None

    @property
    def bound_by(self) -> str:
        if self.structured_outputs is not None and self.structured_outputs.bounds():
            return "structured_outputs"
        return "tools" if self.tools and self.choice != "none" else "response_format"

    @property
    def offered(self) -> list[Function]:
        """The functions that may be called."""
        return [tool.function for tool in self.tools]

    @property
    def choice(self) -> ToolMode | FunctionName | None:
        """Whether a function is called, and which."""
        return self.tool_choice.function if isinstance(self.tool_choice, ChosenTool) else self.tool_choice


class SchemaFormat(NamedSchema):
    """A JSON schema, as responses have it."""

    type: Literal["json_schema"]


class TextConfig(_Request):
    """The format of a response's text."""

    format: Annotated[AnyFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Only(("medium",))] = None


class Reasoning(_Request):
    """Settings of reasoning, for the model's chat template."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Annotated[Any, Only(("auto",))] = None
    generate_summary: Unsupported = None


class InputMessage(_Request):
    """A message of a response's input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = Field(None, max_length=256)
    status: str | None = Field(None, max_length=64)
    phase: str | None = Field(None, max_length=64)


class InputCall(_Request):
    """A call by the assistant, in a response's input."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: ToolName
    arguments: Text
    id: str | None = Field(None, max_length=256)
    status: str | None = Field(None, max_length=64)


class InputCallOutput(_Request):
    """The result of a call, in a response's input."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: Content
    id: str | None = Field(None, max_length=256)
    status: str | None = Field(None, max_length=64)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(lambda item: item.get("type", "message") if isinstance(item, dict) else item.type),
]


class ResponseTool(Function):
    """A tool, as responses have it."""

    type: Literal["function"]


class ChosenFunction(FunctionName):
    """The tool to call, as responses have it."""

    type: Literal["function"]


class ResponseRequest(GenerationRequest, TemplateOptions):
    """``POST /v1/responses``."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: Count | None = Field(None, description="None for what the context holds.")
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    conversation: Unsupported = None
    include_steps: Annotated[Any, Only((False,))] = None
    max_tool_calls: Unsupported = None
    parallel_tool_calls: bool = Field(True, description="Whether there may be several calls.")
    previous_response_id: Unsupported = None
    prompt: Unsupported = None
    tool_choice: ToolMode | ChosenFunction | None = Field(
        None, description="Whether one is called; auto if there are any."
    )
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] = Field(
        [], description="What may be called."
    )
    top_logprobs: Annotated[Any, Only((0,))] = None

    @property
    def bound_by(self) -> str:
        if self.structured_outputs is not None and self.structured_outputs.bounds():
            return "structured_outputs"
        return "tools" if self.tools and self.choice != "none" else "text.format"

    @property
    def offered(self) -> list[ResponseTool]:
        """The functions that may be called."""
        return self.tools

    @property
    def choice(self) -> ToolMode | FunctionName | None:
        """Whether a function is called, and which."""
        return self.tool_choice


class TokenizeRequest(TemplateOptions):
    """``POST /tokenize``: a prompt or a conversation."""

    model: str | None = Field(None, max_length=4096)
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = Field([], description="Of a conversation.")
    add_generation_prompt: bool = Field(True, description="End a conversation with what introduces an answer.")
    add_special_tokens: bool = Field(True, description="Of a prompt: those the tokenizer adds by itself.")


# --- responses --------------------------------------------------------------------------------------------------------


class ErrorDetail(BaseModel):
    """An error; ``param`` names the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of error responses."""

    error: ErrorDetail


class MethodCard(BaseModel):
    """A method that a request may name."""

    name: str
    num_speculative_tokens: list[int] = Field(description="Those that a request may ask for.")


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specexport"
    max_model_len: int
    methods: list[MethodCard] = Field(description="Those that need no hypothesis, the default first.")
    chat: bool = Field(description="Whether it has a chat template, so that it answers messages.")
    predictions: bool = Field(description="Whether a chat may bring a prediction.")


class ModelList(BaseModel):
    """``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class SpeculationUsage(BaseModel):
    """Counts of speculation; names are vLLM's."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    acceptance_length: float


class PromptTokensDetails(BaseModel):
    """Prompt tokens from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Counts of a prediction's tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    speculation: SpeculationUsage | None = None


class Step(BaseModel):
    """The step of a chunk: accepted draft tokens, then the target's own token."""

    tokens: list[tuple[str, int]] = Field(
        description="Text of each, and as which token of its proposal it was drafted, from 1; 0 is the target's own."
    )
    parents: list[int] = Field(description="The tree verified: each node's parent, -1 for the root.")
    drafted: list[str] = Field(description="Draft tokens, of the nodes from 1; none where a device kept them.")
    path: list[int] = Field(description="The nodes accepted.")
    seconds: float = Field(description="When the step ended, since the request came.")


class PromptLogprob(BaseModel):
    """The log-probability of a prompt token or an alternative."""

    logprob: float
    rank: int = Field(description="Its place among all tokens, 1 for the most probable.")
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[int, PromptLogprob] | None],
    Field(description="vLLM's: for each token of the prompt that and the most probable ones; null for the first."),
]


class Choice(BaseModel):
    """The common fields of outputs."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    step: Step | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens, and, echoed, of its prompt's; the first of all has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    """One output, or a piece of one."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(_Answer):
    """A completion, or a chunk of one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    """The log-probability of a token or an alternative."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """The log-probability of a token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message's tokens."""

    content: list[ChatLogprob]


class FunctionCall(BaseModel):
    """A called function, or a piece of it."""

    name: str | None = None
    arguments: str


class AssistantCall(BaseModel):
    """A call, or a piece of one; its index identifies the call."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The model's message, or a piece of it; with its reasoning if it has a channel for that."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AssistantCall] | None = None


class ChatChoice(Choice):
    """One answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatResponse(_Answer):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunkChoice(Choice):
    """A piece of an answer."""

    delta: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatChunk(_Answer):
    """A chunk of a chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class OutputText(BaseModel):
    """The text of a response."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []


class OutputMessage(BaseModel):
    """A response's message."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(BaseModel):
    """A response's call of a function."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Literal["in_progress", "completed", "incomplete"]


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class OutputDetails(BaseModel):
    """Reasoning tokens of the output: 0, as reasoning is part of the text."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    speculation: SpeculationUsage | None = None


class ResponseAnswer(BaseModel):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: ToolMode | ChosenFunction
    tools: list[ResponseTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class TokenizeResponse(BaseModel):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class Status(BaseModel):
    """The server's state."""

    status: str
