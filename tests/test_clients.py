"""What OpenAI's clients of today send: bodies that were recorded, tools, responses, request ids, other origins."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from specexport.server.answers import OutputCall, OutputMessage
from specexport.server.request_parts import Function, Only, StructuredOutputs
from specexport.server.requests import ChatRequest, CompletionRequest, ResponseRequest
from specexport.server.responses import Output
from specexport.server.tools import HERMES, LLAMA, Calling, CallReader, call_format, calling
from tests import serving
from tests.fixtures import Bundles
from tests.serving import NAME, Served, served, with_chat_template
from tests.test_constraint import accepts

RECORDED = json.loads(Path(__file__).with_name("client_requests.json").read_text())
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
_SAMPLED = {"top_p": 1.0, "top_k": -1, "temperature": 0.0}
VLLM_BENCH: Any = [
    {"client": f"vllm 0.33 bench serve: {path}", "path": path, "body": {"model": NAME, **body}}
    for path, body in {
        "/tokenize": {"prompt": "one two", "add_special_tokens": False},
        "/v1/completions": {
            "prompt": "one two",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            **_STREAMED,
            **_SAMPLED,
        },
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "one two"}]}],
            "max_completion_tokens": 8,
            **_STREAMED,
            **_SAMPLED,
        },
    }.items()
]
"""Recorded too, but by hand: the package wants a torch of its own."""
CHAT: Any = [{"role": "user", "content": "one two"}]
PET = {
    "type": "object",
    "properties": {"kind": {"$ref": "#/$defs/kind"}, "words": {"enum": ['a "b" }', "\\{"]}},
    "required": ["kind", "words"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["cat", "dog"]}},
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "keep", "parameters": PET}},
    {"type": "function", "function": {"name": "lose", "parameters": PET}},
]
FUNCTIONS = [Function.model_validate(tool["function"]) for tool in TOOLS]
ARGUMENTS = ('{"kind":"cat","words":"a \\"b\\" }"}', '{"kind":"dog","words":"\\\\{"}')


@pytest.fixture(scope="module")
def running(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = with_chat_template(bundle("llama-near"), tmp_path_factory.mktemp("clients") / "bundle", serving.HERMES)
    with served(folder, cors=["https://page.example"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="EMPTY", max_retries=0)


@pytest.mark.parametrize("sent", [*RECORDED, *VLLM_BENCH], ids=lambda sent: sent["client"])
def test_recorded_client_requests_are_answered(running, sent):
    answer = httpx.post(f"{running.url}{sent['path']}", json=sent["body"], timeout=120)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text or '"error":null' in answer.text.replace(" ", "")


def test_neutral_settings_change_nothing(running):
    nothing: dict[str, Any] = {
        "best_of": 1,
        "suffix": "",
        "seed": -1,
        "repetition_penalty": 1.0,
        "length_penalty": 1,
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "store": False,
        "tool_choice": "auto",
        "structured_outputs": {},
        "top_logprobs": 0,
        **dict.fromkeys(
            ("n", "stop", "logprobs", "stream", "stream_options", "temperature", "nobody_knows_this"), None
        ),
    }
    fields = {"temperature": 0, "max_tokens": 6}
    texts = []
    for more in ({}, nothing | fields):
        answer = running.answer("/v1/chat/completions", **{"messages": CHAT, **fields, **more})
        texts.append(answer["choices"][0]["message"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatRequest, ResponseRequest])
def test_single_valued_schemas_are_answered(request_type):
    base: dict[str, Any] = {"prompt": "a"} if request_type is CompletionRequest else {}
    base |= {"messages": CHAT} if request_type is ChatRequest else {}
    base |= {"input": "a"} if request_type is ResponseRequest else {}
    request = [
        (name, value)
        for name, field in request_type.model_fields.items()
        for value in (value for only in field.metadata if isinstance(only, Only) for value in only.values)
    ]
    assert {("detokenize", True), ("priority", 0), ("best_of", 1)} <= set(map(_frozen, request))
    for name, value in request:
        assert getattr(request_type.model_validate({**base, name: value}), name) is value
        with pytest.raises(ValidationError, match=f"{name}\n.*not supported"):
            request_type.model_validate({**base, name: "something else"})


def _frozen(pair: tuple[str, Any]) -> tuple[str, Any]:
    return pair[0], tuple(pair[1]) if isinstance(pair[1], list) else pair[1]


def test_a_prompts_log_probabilities(running):
    """vLLM's ``prompt_logprobs``: what ``echo`` gives, by token, in every output."""
    arguments = {"prompt": ["one two three", "one"], "max_tokens": 1, "temperature": 0}
    ways: list[Any] = [{"prompt_logprobs": 1, "n": 2}, {"echo": True, "logprobs": 1}]
    texts = [running.answer("/v1/completions", **arguments, **more)["choices"] for more in ways]
    tokens = running.answer("/tokenize", prompt="one two three")["tokens"]
    assert texts[0][0]["prompt_logprobs"] == texts[0][1]["prompt_logprobs"]
    first, *others = texts[0][0]["prompt_logprobs"]
    assert first is None
    assert len(others) == len(tokens) - 1
    for token, ranked, logprob in zip(tokens[1:], others, texts[1][0]["logprobs"]["token_logprobs"][1:], strict=False):
        assert ranked[str(token)]["logprob"] == logprob
        assert {prompt_logprob["rank"] for prompt_logprob in ranked.values()} == {1, ranked[str(token)]["rank"]}
    answer = running.answer("/v1/chat/completions", messages=CHAT, max_tokens=1, prompt_logprobs=0)
    counts = [logprobs and len(logprobs) for logprobs in answer["prompt_logprobs"]]
    assert counts == [None, *[1] * (answer["usage"]["prompt_tokens"] - 1)]


def test_usage_may_come_with_every_chunk(client):
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    parts = list(client.completions.create(model=NAME, prompt="a", stream=True, stream_options=options, temperature=0))
    counts = [part.usage.completion_tokens for part in parts if part.usage is not None]
    assert len(counts) == len(parts)
    assert counts == sorted(counts)
    assert counts[-1] <= 16


@pytest.mark.parametrize(
    ("way", "texts"),
    [
        ({"choice": ["cat", "do/g"]}, {"cat", "do/g"}),
        ({"regex": r"a/(b|c)\/"}, {"a/b/", "a/c/"}),
        ({"regex": re.escape("a\nb/ #\tc")}, {"a\nb/ #\tc"}),
        ({"regex": "a\nb"}, {"a\nb"}),
        ({"regex": "^(a|b)$"}, {"a", "b"}),
        ({"regex": ""}, {""}),
        ({"choice": ['"\\\n\x7f', "\x0c\u2028é"]}, {'"\\\n\x7f', "\x0c\u2028é"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"json": {"const": 7}}, {"7"}),
    ],
)
def test_outputs_are_structured_as_vllm_has_it(client, way, texts):
    response = client.completions.create(model=NAME, prompt="a", n=3, extra_body={"structured_outputs": way})
    assert {choice.text for choice in response.choices} <= texts


def test_every_character_may_be_escaped(running):
    engine = running.service.engine.frontend.engine
    for letter in (*map(chr, range(1, 128)), "\x85", "é", "\u2028", "\U0001f642"):
        text = f"a{letter}b"
        (bound,) = StructuredOutputs(regex=re.escape(text)).bounds()
        assert accepts(engine, "grammar", bound["grammar"], text), letter


def test_tools_that_no_grammar_binds_are_named(running):
    schema = {"type": "object", "properties": {"a": {"type": "magic"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": CHAT, "tools": tools}, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text


# --- tools ------------------------------------------------------------------------------------------------------------


def written(form: Any, calls: list[tuple[str, str]]) -> str:
    marks = [
        f'{form.begin}{{"name": "{name}", "{form.arguments}": {arguments}}}{form.end}' for name, arguments in calls
    ]
    return "\n".join(marks)


def test_texts_without_calls_are_returned_unchanged():
    for form, text in ((HERMES, "a <tool_cal"), (LLAMA, "so {")):
        reader = CallReader(Calling(form, FUNCTIONS, forced=False, parallel=True))
        assert "".join(reader.push(letter, False)[0] for letter in text) + reader.push("", True)[0] == text


@pytest.mark.parametrize("form", [HERMES, LLAMA])
@pytest.mark.parametrize("forced", [False, True])
def test_grammars_accept_exactly_the_models_formats(running, form, forced):
    engine = running.service.engine.frontend.engine
    grammar = Calling(form, FUNCTIONS, forced, parallel=True).grammar()
    first = written(form, [("keep", ARGUMENTS[0])])
    two = written(form, [("keep", ARGUMENTS[0]), ("lose", ARGUMENTS[1])])

    def taken(text: str) -> bool:
        return accepts(engine, "grammar", grammar, text)

    assert taken(first)
    assert taken(two) == bool(form.begin)
    assert not taken(first.replace("keep", "kick"))
    assert not taken(first.replace("cat", "cow"))
    assert taken("some text") == (not forced)
    if form.begin:
        assert taken("some text " + first) == (not forced)


def test_templates_name_their_way_of_calling():
    assert call_format(serving.HERMES) == HERMES
    assert call_format(serving.TEMPLATE) is None
    llama = """{{ 'Respond as {"name": function name, "parameters": dictionary of its arguments}' }}{{ tools }}"""
    assert call_format(llama) == LLAMA
    assert call_format("{{ tools }} <tool_call><function=") is None
    for other in ("{name}\n<arg_key>a</arg_key>", '\n<invoke name="a">', "<tool_calls>[{name}]</tool_calls>"):
        assert call_format("{{ tools }} <tool_call>" + other) is None


def test_an_earlier_call_reaches_the_template(running):
    results: Any = {"id": "x", "type": "function", "function": {"name": "keep", "arguments": '{"a": 1}'}}
    template = running.service.engine.frontend.engine.chat_template
    text = template.render(
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]
    )
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    sent = {"role": "assistant", "content": None, "tool_calls": [results]}
    running.answer("/v1/chat/completions", messages=[*CHAT, sent], max_tokens=1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there is no tool .x."),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "the same name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "of an object"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(more, words):
    with pytest.raises(Exception, match=words):
        calling(ChatRequest.model_validate({"messages": CHAT, **more}), serving.HERMES)


# --- responses, request ids, other origins ----------------------------------------------------------------------------


def test_responses_equal_chat_completions(client):
    messages: Any = [{"role": "system", "content": "be brief"}, *CHAT]
    chat = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=12)
    arguments: Any = {"model": NAME, "instructions": "be brief", "temperature": 0, "max_output_tokens": 12}
    for fields in ("one two", CHAT, [{"role": "user", "content": [{"type": "input_text", "text": "one two"}]}]):
        response = client.responses.create(input=fields, **arguments)
        assert response.output_text == chat.choices[0].message.content
    assert response.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    counted = (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert (response.usage.input_tokens, response.usage.output_tokens) == counted
    events = list(client.responses.create(input="one two", stream=True, **arguments))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
    )
    assert events[0].type == "response.created"
    assert events[-1].type == f"response.{response.status}"
    assert events[-1].response.output_text == response.output_text


def test_a_response_may_call_tools(client):
    tools: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    arguments: Any = {"model": NAME, "tools": tools, "temperature": 0}
    named = {"type": "function", "name": "lose"}
    response = client.responses.create(input="one two", tool_choice=named, **arguments)
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, call.status, response.status, response.output_text) == ("lose", "completed", "completed", "")
    assert set(json.loads(call.arguments)) == {"kind", "words"}
    assert [tool.name for tool in response.tools] == ["keep", "lose"]
    assert response.tool_choice.name == "lose"

    events = list(client.responses.create(input="one two", tool_choice=named, stream=True, **arguments))
    last: Any = events[-1]
    assert last.response.output[0].arguments == call.arguments
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("function_call_arguments.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * deltas,
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert "".join(getattr(event, "delta", "") for event in events) == call.arguments
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1

    chat = client.chat.completions.create(
        model=NAME,
        temperature=0,
        tools=TOOLS,
        max_tokens=4,
        messages=[
            *CHAT,
            {
                "role": "assistant",
                "content": "well",
                "tool_calls": [
                    {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for name in ("1", "2")
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ],
    )
    calls: Any = [
        {"type": "function_call", "call_id": name, "name": call.name, "arguments": call.arguments}
        for name in ("1", "2")
    ]
    fields: Any = [*CHAT, {"role": "assistant", "content": "well"}, *calls]
    fields.append({"type": "function_call_output", "call_id": "1", "output": "done"})
    again = client.responses.create(input=fields, max_output_tokens=4, **arguments)
    assert again.output_text == chat.choices[0].message.content
    assert again.usage.input_tokens == chat.usage.prompt_tokens


def test_response_items_are_streamed():
    """What is said before calls is a message, and each call an item of its own."""
    text = "well <tool_call>\n" + "\n</tool_call>\n<tool_call>\n".join(
        f'{{"name": "keep", "arguments": {arguments}}}' for arguments in ARGUMENTS
    )
    for size in (1, 3, len(text)):
        output = Output(Calling(HERMES, FUNCTIONS, forced=False, parallel=True))
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        events = [event for part in parts for event in output.push(part, None)]
        events += output.push("", "length")
        message, *calls = output.items
        assert isinstance(message, OutputMessage)
        assert (message.content[0].text, message.status) == ("well ", "completed")
        assert [(call.arguments, call.status) for call in calls if isinstance(call, OutputCall)] == [
            (ARGUMENTS[0], "completed"),
            (ARGUMENTS[1], "incomplete"),
        ]
        ends = [fields["item"] for kind, fields in events if kind == "response.output_item.done"]
        assert ends == [pair.model_dump() for pair in output.items]
        places = [fields["output_index"] for _, fields in events]
        assert places == sorted(places)


def test_a_response_that_fails_says_so(client):
    extra = {"ignore_eos": True, "timeout": 0.05}
    events = list(client.responses.create(model=NAME, input="a", stream=True, extra_body=extra))
    assert events[-1].type == "response.failed"
    assert "did not finish within" in events[-1].response.error.message


def test_requests_have_ids(running):
    for path, inputs in (("/health", "mine-1"), ("/v1/nothing", "mine-2"), ("/health", None), ("/health", "two words")):
        headers = {} if inputs is None else {"X-Request-Id": inputs}
        echoed = httpx.get(running.url + path, headers=headers).headers["x-request-id"]
        assert (echoed == inputs) == (inputs in ("mine-1", "mine-2"))
        assert echoed.isprintable()


def test_pages_of_other_origins_are_let_in_by_name(running):
    for origin, allowed in (("https://page.example", "https://page.example"), ("https://other.example", None)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        settings = httpx.options(f"{running.url}/v1/completions", headers=headers)
        assert settings.headers.get("access-control-allow-origin") == allowed
        answer = httpx.get(f"{running.url}/health", headers={"Origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed
