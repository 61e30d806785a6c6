"""The API's requests; names and meanings are OpenAI's, some vLLM's.

Unknown fields and unsupported values are refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from specexport.runtime import SamplingParams
from specexport.server.request_parts import (
    ANY_OBJECT,
    MAX_CHOICES,
    Alternatives,
    ChosenTool,
    Content,
    Count,
    FieldsWithoutEffect,
    Function,
    FunctionName,
    Messages,
    Only,
    PromptAlternatives,
    RequestModel,
    SentBack,
    Stop,
    StructuredOutputs,
    Text,
    TokenId,
    Tokens,
    Tool,
    ToolMode,
    ToolName,
    Unsupported,
    model_of,
    plain_text,
    whole_text,
)

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Fields that are parameters of the engine."""

if TYPE_CHECKING:

    class _Sampling(FieldsWithoutEffect):
        skip_special_tokens: bool
else:
    _Sampling = model_of(FieldsWithoutEffect, SamplingParams, SAMPLING, temperature={"le": 2})


class StreamOptions(RequestModel):
    """Options of streaming."""

    include_usage: bool = Field(False, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool = Field(False, description="Send the usage so far with every chunk.")
    include_obfuscation: Annotated[Any, Only((False,))] = None


class SpeculativeOptions(RequestModel):
    """Speculation of a request: keys of ``speculative_config``, including those of methods without a graph."""

    model_config = ConfigDict(extra="allow")
    method: str | None = Field(None, max_length=64, description="One of the bundle's methods.")
    num_speculative_tokens: Count | None = Field(None, description="One of its sizes; 0 decodes plainly.")

    _whole_text = model_validator(mode="before")(whole_text)


class GenerationRequest(_Sampling):
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
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] = Field(
        {}, description="Added to the logits of tokens."
    )
    # Fields of vLLM, and of ours.
    stop_token_ids: Annotated[list[Count], Field(max_length=64)] = Field([], description="Tokens that end the output.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Constrains the output.")
    speculative: SpeculativeOptions | None = Field(None, description="How to speculate; None as the server does.")
    include_speculation: bool = Field(False, description="Add the counts of speculation to the usage.")
    include_steps: bool = Field(False, description="Streamed: each token's draft token, and the step's tree.")
    timeout: float | None = Field(
        None, gt=0, le=86400, description="Seconds, including the wait; at most the server's."
    )

    format_field: ClassVar[str] = ""
    """Name of the field with the output's format, if any."""

    @property
    def hypothesis(self) -> str | None:
        """The expected output."""
        return None

    @property
    def schema_of_text(self) -> str | None:
        """The JSON schema that the output's text has to match, as JSON; None for any text."""
        return None


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


class AnyFormat(RequestModel):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(RequestModel):
    """A JSON schema with a name."""

    name: str = Field(max_length=64)
    # The field is called schema, like a method of pydantic's models.
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = Field(None, max_length=4096)
    strict: bool | None = None


class JsonSchema(RequestModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _schema(form: AnyFormat | NamedSchema | None) -> str | None:
    """The JSON schema of a format, as JSON; None for any text."""
    if isinstance(form, NamedSchema):
        return json.dumps(form.schema_)
    return ANY_OBJECT if form is not None and form.type == "json_object" else None


class Prediction(RequestModel):
    """The expected answer."""

    type: Literal["content"]
    content: Content


class TemplateOptions(RequestModel):
    """Options of formatting a conversation."""

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
        """Variables of the template besides the messages."""
        return ({} if self.documents is None else {"documents": self.documents}) | self.chat_template_kwargs


class SchemaFormat(NamedSchema):
    """A JSON schema, in the form of responses."""

    type: Literal["json_schema"]


class ResponseTool(Function):
    """A tool, in the form of responses."""

    type: Literal["function"]


class ChosenFunction(FunctionName):
    """The tool to call, in the form of responses."""

    type: Literal["function"]


class ConversationRequest(GenerationRequest, TemplateOptions):
    """The common fields of chats and responses."""

    parallel_tool_calls: bool = Field(True, description="Whether there may be several calls.")
    tools: Sequence[Tool | ResponseTool] = []
    tool_choice: ToolMode | ChosenTool | ChosenFunction | None = None

    @property
    def offered(self) -> list[Function]:
        """The functions that may be called."""
        return [tool.function if isinstance(tool, Tool) else tool for tool in self.tools]

    @property
    def choice(self) -> ToolMode | FunctionName | None:
        """Whether to call a function, or which."""
        return self.tool_choice.function if isinstance(self.tool_choice, ChosenTool) else self.tool_choice


class ChatRequest(ConversationRequest):
    """``POST /v1/chat/completions``."""

    format_field = "response_format"

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
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = Field(
        [], description="Functions it may call."
    )
    tool_choice: ToolMode | ChosenTool | None = Field(None, description="Whether it calls one; auto if there are any.")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="A variable of the model's chat template."
    )
    add_generation_prompt: bool = Field(True, description="End the prompt with what introduces an answer.")
    continue_final_message: bool = Field(False, description="Continue the last message instead of answering it.")
    add_special_tokens: Annotated[Any, Only((False,))] = None
    echo: Annotated[Any, Only((False,))] = None

    @property
    def hypothesis(self) -> str | None:
        return plain_text(self.prediction.content) if self.prediction is not None else None

    @property
    def schema_of_text(self) -> str | None:
        form = self.response_format
        return _schema(form.json_schema if isinstance(form, JsonSchema) else form)


class TextConfig(RequestModel):
    """The format of a response's text."""

    format: Annotated[AnyFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Only(("medium",))] = None


class Reasoning(RequestModel):
    """Settings of reasoning for the model's chat template."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Annotated[Any, Only(("auto",))] = None
    generate_summary: Unsupported = None


class _Item(SentBack):
    id: str | None = Field(None, max_length=256)
    status: str | None = Field(None, max_length=64)


class InputMessage(_Item):
    """A message in a response's input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: str | None = Field(None, max_length=64)


class InputCall(_Item):
    """A call by the assistant, in a response's input."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: ToolName
    arguments: Text


class InputCallOutput(_Item):
    """The result of a call, in a response's input."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: Content


def _kind(item: Any) -> Any:
    """The type of an item in a response's input, by default a message; None if it is no item."""
    return (item.get("type") or "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="Input should be a message, a function_call or a function_call_output",
    ),
]


class ResponseRequest(ConversationRequest):
    """``POST /v1/responses``."""

    format_field = "text.format"

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: Count | None = Field(None, description="None for what the context holds.")
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    conversation: Unsupported = None
    include_steps: Annotated[Any, Only((False,))] = None
    max_tool_calls: Unsupported = None
    previous_response_id: Unsupported = None
    prompt: Unsupported = None
    tool_choice: ToolMode | ChosenFunction | None = Field(
        None, description="Whether it calls one; auto if there are any."
    )
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] = Field(
        [], description="Functions it may call."
    )
    top_logprobs: Annotated[Any, Only((0,))] = None

    @property
    def schema_of_text(self) -> str | None:
        return None if self.text is None else _schema(self.text.format)


class TokenizeRequest(TemplateOptions):
    """``POST /tokenize``: a prompt or a conversation."""

    model: str | None = Field(None, max_length=4096)
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = Field([], description="Of a conversation.")
    add_generation_prompt: bool = Field(True, description="End a conversation with what introduces an answer.")
    continue_final_message: bool = Field(False, description="End a conversation within its last message.")
    add_special_tokens: bool = Field(True, description="Of a prompt: those the tokenizer adds by itself.")

    @property
    def without_effect(self) -> set[str]:
        """The fields that have no effect on this kind of text."""
        if self.messages is None:
            return {*TemplateOptions.model_fields, "tools", "add_generation_prompt", "continue_final_message"}
        return {"add_special_tokens"} if self.add_special_tokens else set()
