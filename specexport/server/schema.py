"""Requests and responses: OpenAI's names and meanings, and the few of vLLM's that go beyond them.

A field that is not known is refused, and so is a known one that asks for what is not there: nothing is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from specexport.runtime.params import MAX_LOGPROBS

MAX_CHOICES = 128
_LARGEST = 2**31 - 1


def _neutral(value: Any) -> Any:
    if value not in (None, 0, {}, []):
        raise ValueError("not supported; leave it out")
    return value


Unsupported = Annotated[
    Any, AfterValidator(_neutral), WithJsonSchema({"enum": [None, 0, {}, [], False], "description": "Not supported."})
]
"""What clients may send as long as it asks for nothing."""

# Lists end at the first thing that is wrong with them: of a million wrong ones each would take its time to be said.
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Tokens = Annotated[list[Count], Field(min_length=1, fail_fast=True)]
Others = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Text = Annotated[str, Field(max_length=4_000_000)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Request):
    """How to stream."""

    include_usage: bool = Field(False, description="Send a last chunk with the usage of the whole request.")


class SpeculativeOptions(_Request):
    """How a request speculates: keys of ``speculative_config``, those of a method that needs no graph among them."""

    model_config = ConfigDict(extra="allow")
    method: str | None = Field(None, max_length=64, description="One of the bundle's ways to speculate.")
    num_speculative_tokens: Count | None = Field(None, description="One of its sizes; 0 decodes plainly.")


class Generation(_Request):
    """What completions and chats have in common."""

    model: str | None = Field(None, max_length=4096, description="One of those /v1/models names; may be left out.")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Outputs for a prompt.")
    stream: bool = Field(False, description="Send chunks as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="With stream only.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="Texts that end the output and are not part of it."
    )
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="Makes the output reproducible.")
    temperature: float | None = Field(None, ge=0, le=2, description="None for the model's own; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="None for the model's own.")
    user: str | None = Field(None, max_length=512, description="Who asks; changes nothing.")
    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None
    # vLLM's, and ours.
    top_k: int | None = Field(None, ge=-1, le=_LARGEST, description="Keep this many most probable tokens; 0 keeps all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens less probable than this share of the best.")
    stop_token_ids: Annotated[list[Count], Field(max_length=64)] = Field([], description="Tokens that end the output.")
    ignore_eos: bool = Field(False, description="Go on past the end of text.")
    speculative: SpeculativeOptions | None = Field(None, description="How to speculate; None as the server does.")
    include_speculation: bool = Field(False, description="Add what speculation did to the usage.")
    timeout: float | None = Field(None, gt=0, le=86400, description="Seconds, waiting included; the server's at most.")

    @property
    def hypothesis(self) -> str | None:
        """What the output is expected to be."""
        return None


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    ) = Field(description="Text or token ids; several of either are several prompts.")
    max_tokens: Count | None = Field(16, description="None for what the context holds.")
    logprobs: Others | None = Field(None, description="Give each token's log-probability and those of so many others.")
    echo: bool = Field(False, description="Begin the text with the prompt.")
    best_of: Unsupported = None
    suffix: Unsupported = None


class TextPart(_Request):
    """A part of a message."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)]


def plain_text(content: Content | None) -> str:
    """The text of a message, whose parts are joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class ChatMessage(_Request):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_call_id: str | None = Field(None, max_length=256)
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class AnyFormat(_Request):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(_Request):
    """A JSON schema with a name."""

    name: str = Field(max_length=64)
    # The field is called schema, which pydantic's models have a method of.
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = Field(None, max_length=4096)
    strict: bool | None = None


class JsonSchema(_Request):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Prediction(_Request):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: Content


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Count | None = Field(None, description="None for what the context holds.")
    max_tokens: Count | None = Field(None, description="The older name of max_completion_tokens.")
    logprobs: bool = Field(False, description="Give each token's log-probability.")
    top_logprobs: Others | None = Field(None, description="And those of so many others.")
    chat_template_kwargs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Any] = Field(
        {}, description="Variables the model's chat template knows."
    )
    response_format: Annotated[AnyFormat | JsonSchema, Field(discriminator="type")] | None = Field(
        None, description="Constrains the answer to a grammar."
    )
    prediction: Prediction | None = Field(None, description="The expected answer, verified as a draft.")
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    metadata: Unsupported = None
    modalities: Unsupported = None
    parallel_tool_calls: Unsupported = None
    reasoning_effort: Unsupported = None
    service_tier: Unsupported = None
    store: Unsupported = None
    tool_choice: Unsupported = None
    tools: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @property
    def hypothesis(self) -> str | None:
        return plain_text(self.prediction.content) if self.prediction is not None else None


class TokenizeRequest(_Request):
    """``POST /tokenize``: a prompt or a conversation."""

    model: str | None = Field(None, max_length=4096)
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = Field(True, description="Of a prompt: those the tokenizer adds by itself.")


# --- responses --------------------------------------------------------------------------------------------------------


class ErrorDetail(BaseModel):
    """What went wrong: ``param`` names the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Every error's body."""

    error: ErrorDetail


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specexport"
    max_model_len: int


class ModelList(BaseModel):
    """``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class SpeculationUsage(BaseModel):
    """What speculation did; names are vLLM's."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    acceptance_length: float


class CompletionTokensDetails(BaseModel):
    """What became of a prediction's tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None
    speculation: SpeculationUsage | None = None


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length"] | None = None


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


class CompletionChoice(_Choice):
    """One output, or a piece of one."""

    text: str
    logprobs: CompletionLogprobs | None = None


class CompletionResponse(_Answer):
    """A completion, or a chunk of one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    """A token that might have been, or was."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token that was."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message's tokens."""

    content: list[ChatLogprob]


class AssistantMessage(BaseModel):
    """What the model said, or a piece of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(_Choice):
    """One answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatResponse(_Answer):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunkChoice(_Choice):
    """A piece of an answer."""

    delta: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatChunk(_Answer):
    """A chunk of a chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TokenizeResponse(BaseModel):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class Status(BaseModel):
    """How the server is."""

    status: str
