"""The API's answers; names and meanings are OpenAI's, some vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specexport.frontend import Logprob
from specexport.server.request_parts import ToolMode
from specexport.server.requests import ChosenFunction, ResponseTool


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
    """Counts of speculation, with vLLM's names."""

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
    """The step of a chunk: accepted draft tokens, then the target's token."""

    tokens: list[tuple[str, int]] = Field(
        description="Text of each, and as which token of its proposal it was drafted, from 1; 0 is the target's own."
    )
    parents: list[int] = Field(description="The tree verified: each node's parent, -1 for the root.")
    drafted: list[str] = Field(description="Draft tokens, of the nodes from 1; none where a device kept them.")
    path: list[int] = Field(description="The nodes accepted.")
    seconds: float = Field(description="When the step ended, since the request came.")


PromptLogprobs = Annotated[
    list[dict[int, Logprob] | None],
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
    """Log-probabilities of a completion's tokens, and of its echoed prompt's tokens but the first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    """An output, or a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(_Answer):
    """A completion, or a chunk of it."""

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
    """A call, or a piece of it; the index identifies the call."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The model's message, or a piece of it, with the reasoning of models that have a channel for it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AssistantCall] | None = None


class ChatChoice(Choice):
    """An answer."""

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
    """The reason why a response is incomplete."""

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
