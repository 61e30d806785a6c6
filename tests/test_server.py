"""``specexport serve``, as the official openai client and plain HTTP see it."""

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from specexport.runtime import SamplingParams, Stats
from specexport.runtime.chat import ChatTemplate
from specexport.server.chat import template_message
from specexport.server.request_parts import ChatMessage
from specexport.server.requests import ChatRequest
from specexport.server.service import usage_of
from tests.fixtures import Bundles
from tests.serving import HERMES, NAME, Served, served, with_chat_template
from tests.threads import wait_until

PROMPT = "one two three"
GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
CHAT: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two"}]


@pytest.fixture(scope="module")
def folder(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(bundle("llama-near"), tmp_path_factory.mktemp("served") / "bundle")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Served]:
    with served(folder, max_body_bytes=100_000) as running:
        yield running


@pytest.fixture(scope="module")
def client(tiny: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="EMPTY", max_retries=0)


@pytest.fixture
def http(tiny: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.url, timeout=120) as plain:
        yield plain


def answer_text(tiny: Served, prompt: Any, **params: Any) -> Any:
    """What the engine says by itself."""
    return tiny.service.engine.frontend.engine.generate(prompt, SamplingParams(**params))


# --- completions ------------------------------------------------------------------------------------------------------


def test_the_example_of_vllms_documentation_runs_as_it_is(tiny):
    client = openai.OpenAI(api_key="EMPTY", base_url=f"{tiny.url}/v1")
    model = client.models.list().data[0].id
    completion = client.completions.create(
        model=model, prompt="A robot may not injure a human being", echo=False, n=2, stream=False, logprobs=3
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert len(choice.logprobs.tokens or []) == len(choice.logprobs.token_logprobs or []) <= 16
        assert all(len(top) >= 1 for top in choice.logprobs.top_logprobs or [])
    streamed = client.completions.create(model=model, prompt="A robot may not", n=2, stream=True, logprobs=3)
    assert {choice.index for part in streamed for choice in part.choices} == {0, 1}


def test_completions_equal_the_engines(tiny, client):
    expected = answer_text(tiny, PROMPT, temperature=0.0, max_tokens=16, ignore_eos=True)
    response = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, **GREEDY)
    assert response.choices[0].text == expected.text
    assert response.choices[0].finish_reason == "length"
    assert response.object == "text_completion"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (expected.stats.prompt_tokens, 16)
    assert response.usage.total_tokens == response.usage.prompt_tokens + 16


def test_a_streamed_completion_says_the_same_in_pieces(tiny, client):
    expected = answer_text(tiny, PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True)
    stream = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=40, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    parts = list(stream)
    assert "".join(choice.text for part in parts for choice in part.choices) == expected.text
    assert [choice.finish_reason for part in parts[:-1] for choice in part.choices][-1] == "length"
    assert len(parts) > 5
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == 40
    assert len({part.id for part in parts}) == 1


def test_prompts_come_as_texts_and_tokens(tiny, client):
    ids = tiny.service.engine.frontend.engine.encode(PROMPT)
    alone = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, **GREEDY).choices[0].text
    for prompt, count in (([PROMPT, "what"], 2), (ids, 1), ([ids, [5, 6]], 2)):
        response = client.completions.create(model=NAME, prompt=prompt, max_tokens=6, **GREEDY)
        assert [choice.index for choice in response.choices] == list(range(count))
        assert response.choices[0].text == alone


def test_echo_and_no_tokens(client):
    for stream in (False, True):
        response = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=0, echo=True, stream=stream)
        parts = list(response) if stream else [response]
        assert "".join(choice.text for part in parts for choice in part.choices) == PROMPT


def test_a_top_p_of_0_is_greedy(client):
    greedy, none = (
        client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, **params)
        for params in ({"temperature": 0}, {"temperature": 1, "top_p": 0})
    )
    assert none.choices[0].text == greedy.choices[0].text


def test_stop_texts_seeds_and_n(tiny, client):
    whole = answer_text(tiny, PROMPT, temperature=0.0, max_tokens=16, ignore_eos=True).text
    stop = whole[4:6]
    response = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, stop=[stop], **GREEDY)
    assert response.choices[0].text == whole[: whole.index(stop)]
    assert response.choices[0].finish_reason == "stop"
    sampled: Any = {"model": NAME, "prompt": PROMPT, "n": 3, "temperature": 1.0, "max_tokens": 12}
    texts = [[choice.text for choice in client.completions.create(seed=seed, **sampled).choices] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_an_event_is_one_line_to_every_client(tiny):
    prompt = "a\x85b\u2028c\u2029d\x0be\x0cf\x1cg\x1eh\r\ni"
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "stream": True}
    assert "".join(event["choices"][0]["text"] for event in tiny.events("/v1/completions", body)) == prompt


@pytest.mark.parametrize(("room", "echo"), [(0, True), (5, True), (8, False)])
def test_logprobs_are_the_engines(tiny, client, room, echo):
    """Of the output, and with ``echo`` of the prompt before it."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": room, "ignore_eos": True, "logprobs": 2}
    expected = answer_text(tiny, PROMPT, **params, prompt_logprobs=2 if echo else None)
    entries = [*expected.prompt_logprobs, *expected.logprobs]
    logprobs = [*[None] * echo, *(pytest.approx(entry.logprob, abs=1e-3) for entry in entries)]
    arguments: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": room, "logprobs": 2, "echo": echo}
    arguments |= GREEDY
    response = client.completions.create(**arguments).choices[0]
    assert response.text == PROMPT * echo + expected.text
    details: Any = response.logprobs
    assert details.token_logprobs == logprobs
    assert details.text_offset[0] == 0
    if echo:
        assert details.top_logprobs[0] is None
        assert details.text_offset[1] == len(details.tokens[0])
    parts = [choice for part in client.completions.create(**arguments, stream=True) for choice in part.choices]
    assert "".join(part.text for part in parts) == response.text
    streamed = [part.logprobs for part in parts if part.logprobs is not None]
    assert [value for entry in streamed for value in entry.token_logprobs or []] == logprobs
    assert [value for entry in streamed for value in entry.text_offset or []] == details.text_offset


def test_speculation_is_chosen_and_reported_on_request(client):
    texts = []
    for count in (0, 2, 7):
        speculative = {"num_speculative_tokens": count} | ({"method": "draft_model"} if count else {})
        body = {"ignore_eos": True, "speculative": speculative, "include_speculation": True}
        response = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, temperature=0.0, extra_body=body)
        details = response.usage.model_dump()["speculation"]
        assert details["num_draft_tokens"] == count * details["num_drafts"]
        assert details["num_accepted_tokens"] == sum(details["num_accepted_tokens_per_pos"])
        texts.append(response.choices[0].text)
    assert texts[0] == texts[1] == texts[2]


# --- chats ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_put_into_the_models_words(tiny, client):
    prompt = tiny.service.engine.frontend.engine.tokenizer.encode(
        "<s>system: be brief\nuser: one two\nassistant:", add_special_tokens=False
    ).ids
    expected = answer_text(tiny, prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
    response = client.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=12, **GREEDY)
    assert response.choices[0].message.content == expected.text
    assert response.choices[0].message.role == "assistant"
    assert response.usage.prompt_tokens == len(prompt)


def test_a_streamed_chat_says_the_same_in_pieces(client):
    asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 30, "n": 2, "seed": 3, "temperature": 0.9}
    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True))
    for index in (0, 1):
        deltas = [choice.delta for part in parts for choice in part.choices if choice.index == index]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == whole.choices[index].message.content
    assert all(part.object == "chat.completion.chunk" for part in parts)


def test_chat_logprobs_name_tokens_and_bytes(client):
    arguments: Any = {"messages": CHAT, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, **GREEDY}
    response = client.chat.completions.create(model=NAME, **arguments)
    content = response.choices[0].logprobs.content
    assert len(content) == 6
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert "\ufffd" in entry.token or bytes(entry.bytes).decode() == entry.token


def test_chat_logprobs_name_the_bytes_of_parts_of_characters(client, tiny):
    half = tiny.service.engine.frontend.engine.tokenizer.token_to_id("Ã")  # the first byte of é
    arguments: Any = {"messages": CHAT, "max_tokens": 1, "logprobs": True, "logit_bias": {half: 100}, **GREEDY}
    (entry,) = client.chat.completions.create(model=NAME, **arguments).choices[0].logprobs.content
    assert (entry.token, entry.bytes) == ("\ufffd", ["é".encode()[0]])


def test_template_errors_are_request_errors(client):
    with pytest.raises(openai.BadRequestError, match="no tools") as caught:
        client.chat.completions.create(model=NAME, messages=[{"role": "tool", "content": "x", "tool_call_id": "a"}])
    assert caught.value.param == "messages"


def test_a_request_names_variables_of_the_template_and_no_arguments(http):
    names = ("self", "source", "variables", "template", "args", "known", "__class__")
    body = {"messages": CHAT, "max_tokens": 1, "chat_template_kwargs": dict.fromkeys(names, 1)}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_an_answer_may_be_sent_back_as_the_client_holds_it(client):
    first = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=4)
    message: Any = first.choices[0].message
    client.chat.completions.create(model=NAME, messages=[*CHAT, message, CHAT[1]], max_tokens=4)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
def test_what_the_clients_helpers_return_may_be_sent_back(client):
    class Pet(BaseModel):
        kind: Literal["cat"]

    pet = {"name": "pet", "parameters": {**Pet.model_json_schema(), "additionalProperties": False}, "strict": True}
    chat: Any = {"model": NAME, "messages": CHAT, "max_tokens": 60}
    parsed = client.chat.completions.parse(**chat, response_format=Pet).choices[0].message
    assert parsed.parsed == Pet(kind="cat")
    tools: Any = {"tools": [{"type": "function", "function": pet}], "tool_choice": "required"}
    with client.chat.completions.stream(**chat, **tools, parallel_tool_calls=False) as stream:
        called = stream.get_final_completion().choices[0].message
    assert called.tool_calls[0].function.parsed_arguments == {"kind": "cat"}
    for message in (parsed, called, called.model_dump()):
        client.chat.completions.create(model=NAME, messages=[*CHAT, message, CHAT[1]], max_tokens=1)
    body: Any = {"model": NAME, "max_output_tokens": 60}
    items = client.responses.parse(**body, input="one", text_format=Pet).output
    tools["tools"] = [{"type": "function", **pet}]
    with client.responses.stream(**body, **tools, input="one", parallel_tool_calls=False) as events:
        items += events.get_final_response().output
    for item in (*items, *(item.model_dump() for item in items)):
        client.responses.create(model=NAME, input=[item, CHAT[1]], max_output_tokens=1)


def test_what_clients_add_to_messages_changes_nothing(client, http):
    added = {"cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"refusal": None}, "id": "a"}
    message = {"role": "assistant", "content": [{"type": "text", "text": "one", **added}], **added}
    message |= {"reasoning_details": [{"type": "reasoning.text"}], "thinking_blocks": [{}], "finish_reason": "stop"}
    message |= {"annotations": [], **dict.fromkeys(("audio", "function_call", "refusal", "tool_calls"))}
    counts = set()
    for said in (message, {"role": "assistant", "content": "one"}):
        body = {"messages": [*CHAT, said, CHAT[1]], "max_tokens": 1}
        counts.add(http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])
    assert len(counts) == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_models_reasoning_reaches_its_template(name):
    message = ChatMessage.model_validate({"role": "assistant", "content": "4", name: "2 and 2"})
    template = ChatTemplate("{{ messages[0].reasoning_content }}: {{ messages[0].content }}", {})
    assert template.render([template_message(message)]) == "2 and 2: 4"


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_an_answer_is_bound_to_a_schema(client):
    named: Any = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
    for seed in (1, 2, 3):
        response = client.chat.completions.create(
            model=NAME, messages=CHAT, response_format=named, seed=seed, temperature=1.2, n=2
        )
        for choice in response.choices:
            assert choice.finish_reason == "stop"
            assert set(json.loads(choice.message.content or "")) == {"kind", "old"}
    response = client.chat.completions.create(
        model=NAME, messages=CHAT, response_format={"type": "json_object"}, temperature=0, max_tokens=12
    )
    assert (response.choices[0].message.content or "").startswith("{")
    client.chat.completions.create(model=NAME, messages=CHAT, response_format={"type": "text"}, max_tokens=1)
    named["json_schema"]["schema"] = {"type": "magic"}
    with pytest.raises(openai.BadRequestError, match="Invalid type: magic") as caught:
        client.chat.completions.create(model=NAME, messages=CHAT, response_format=named)
    assert caught.value.param == "response_format"


def test_a_prediction_is_verified(client):
    plain = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=32, **GREEDY)
    text = plain.choices[0].message.content or ""
    response = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=32, prediction={"type": "content", "content": text}, **GREEDY
    )
    assert response.choices[0].message.content == text
    details = response.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


@pytest.mark.parametrize(("steps", "accepted", "output", "used"), [(1, 8, 3, 3), (2, 16, 11, 10), (2, 9, 11, 9)])
def test_usage_counts_what_is_in_the_output(steps, accepted, output, used):
    """A step may accept draft tokens behind the output's end."""
    expected = {"type": "content", "content": "a"}
    body = ChatRequest.model_validate({"messages": CHAT, "prediction": expected, "include_speculation": True})
    stats = Stats(prompt_tokens=5, output_tokens=output, steps=steps, drafted=16, accepted=accepted)
    usage = usage_of(body, [SimpleNamespace(stats=stats)])
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (used, 16 - used)
    assert usage.speculation.acceptance_length == stats.acceptance_length == output / steps


def test_a_prediction_is_not_verified_without_speculation(client):
    plain = {"speculative": {"num_speculative_tokens": 0}}
    expected: Any = {"type": "content", "content": "a"}
    with pytest.raises(openai.BadRequestError, match="give one of them") as caught:
        client.chat.completions.create(model=NAME, messages=CHAT, prediction=expected, extra_body=plain)
    assert caught.value.param == "prediction"


# --- the other endpoints ----------------------------------------------------------------------------------------------


def test_models_tokenize_health_and_ready(http, client, tiny):
    assert [model.id for model in client.models.list().data] == [NAME, "also"]
    assert client.models.retrieve(NAME).id == NAME
    engine = tiny.service.engine.frontend.engine
    body = http.post("/tokenize", json={"prompt": PROMPT}).json()
    assert body == {"count": len(engine.encode(PROMPT)), "max_model_len": 512, "tokens": engine.encode(PROMPT)}
    assert http.post("/tokenize", json={"messages": CHAT}).json()["count"] > 5
    for unused in ({"prompt": "a", "tools": [TOOL]}, {"messages": CHAT, "add_special_tokens": True}):
        refused = http.post("/tokenize", json=unused)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, [*unused][1])
    assert http.post("/tokenize", json={"messages": CHAT, "add_special_tokens": False}).status_code == 200
    begun = [*CHAT, {"role": "assistant", "content": "It is"}]
    continued = http.post("/tokenize", json={"messages": begun, "continue_final_message": True}).json()["tokens"]
    assert engine.tokenizer.decode(continued).endswith("assistant: It is")
    params = {"temperature": 0, "max_tokens": 5}
    answer = tiny.answer(
        "/v1/chat/completions", messages=begun, continue_final_message=True, add_generation_prompt=False, **params
    )
    said = answer["choices"][0]["message"]["content"]
    assert said == tiny.answer("/v1/completions", prompt=continued, **params)["choices"][0]["text"]
    cut = http.post("/tokenize", content=json.dumps({"prompt": HALF}), headers={"Content-Type": "application/json"})
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "prompt")
    assert http.get("/health").json() == {"status": "ok"}
    for path in ("/health", "/ready", "/", "/metrics", "/openapi.json", "/v1/models", f"/v1/models/{NAME}"):
        head = http.head(path)  # as wget --spider and monitors ask
        assert (head.status_code, head.content) == (200, b""), path
    assert http.head("/v1/models/none").status_code == 404
    assert http.get("/ready").json() == {"status": "ready"}


def test_a_stalled_engine_is_not_healthy(http, tiny, monkeypatch):
    monkeypatch.setattr(tiny.service.frontend.engine, "stall_reason", lambda timeout: f"over {timeout:g} s")
    answer = http.get("/health")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "over 300 s")


def test_metrics_count_what_happened(http, client, tiny):
    def read() -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    tiny.idle()
    before = read()
    body = {"ignore_eos": True, "include_speculation": True}
    response = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, temperature=0.0, extra_body=body)
    tiny.idle()
    after = read()
    label = f'{{model_name="{NAME}"}}'

    def grown(name: str, labels: str = label) -> float:
        return after[f"specexport:{name}{labels}"] - before.get(f"specexport:{name}{labels}", 0.0)

    details = response.usage.model_dump()["speculation"]
    assert grown("generation_tokens_total") == 20
    assert grown("prompt_tokens_total") == response.usage.prompt_tokens
    assert grown("prefix_cache_hits_total") == response.usage.prompt_tokens_details.cached_tokens
    assert grown("spec_decode_num_drafts_total") == details["num_drafts"]
    assert grown("spec_decode_num_draft_tokens_total") == details["num_draft_tokens"]
    assert grown("spec_decode_num_accepted_tokens_total") == details["num_accepted_tokens"]
    first = f'{{model_name="{NAME}",position="0"}}'
    assert grown("spec_decode_num_accepted_tokens_per_pos_total", first) == details["num_accepted_tokens_per_pos"][0]
    assert grown("request_success_total", f'{{finished_reason="length",model_name="{NAME}"}}') == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"{name}_count") == 1
    assert 0 < grown("inter_token_latency_seconds_count") < 20
    assert after[f"specexport:num_requests_running{label}"] == 0
    assert after["process_resident_memory_bytes"] > 0


# --- what is wrong ----------------------------------------------------------------------------------------------------


NEEDED: Any = {"completions": {"prompt": "a"}, "chat/completions": {"messages": CHAT}, "responses": {"input": "a"}}
"""What a request must hold, by endpoint."""
NOTHING = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
HALF = "cut \ud83d"
CUT = {"type": "function", "name": "f", "parameters": {"title": HALF}}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", {"prompt": 1}, "prompt", "prompt"),
        ("completions", None, "prompt", "prompt is missing"),
        ("completions", {"prompt": []}, "prompt", "prompt is []; expected at least 1 item"),
        ("completions", {"prompt": [-1]}, "prompt.0", "prompt.0 is -1; expected at least 0"),
        ("completions", {"prompt": [5.5]}, "prompt.0", "prompt.0 is 5.5; expected a text or a whole number or a list"),
        ("completions", {"prompt": ["a", [5]]}, "prompt.1", "a text"),
        ("completions", {"prompt": [5] * 600, "max_tokens": 0}, "prompt", "the context holds 512; shorten the prompt"),
        ("completions", {"max_tokens": -1}, "max_tokens", "at least 0"),
        ("completions", {"max_tokens": "5"}, "max_tokens", "max_tokens is '5'; expected a whole number"),
        ("completions", {"temperature": 3}, "temperature", "at most 2"),
        ("completions", {"top_p": -1}, "top_p", "top_p is -1; expected at least 0"),
        ("completions", {"n": 0}, "n", "at least 1"),
        ("completions", {"logprobs": 21}, "logprobs", "at most 20"),
        ("completions", {"magic": 1}, "magic", "not known; leave it out"),
        ("completions", {"frequency_penalty": 3}, "frequency_penalty", "at most 2"),
        ("completions", {"best_of": 2}, "best_of", "not supported; leave it out or send 1"),
        ("completions", {"best_of": True}, "best_of", "not supported"),
        ("completions", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "with stream"),
        ("completions", {"prompt_logprobs": 1, "echo": True, "logprobs": 1}, "prompt_logprobs", "echo"),
        ("responses", {"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias.x", "logit_bias.x is 'x'; expected text of the pattern"),
        ("completions", {"logit_bias": {"999999": 1}}, "logit_bias", "the model has tokens"),
        ("completions", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
        ("completions", {"structured_outputs": {"json": {"type": "magic"}}}, "structured_outputs", "type: magic"),
        ("completions", {"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ("responses", {"text": {"format": NOTHING}}, "text.format", "not"),
        ("chat/completions", {"store": True}, "store", "not supported; leave it out or send false"),
        ("responses", {"previous_response_id": "x"}, "previous_response_id", "not supported"),
        ("responses", {"n": 2}, "n", "one output"),
        ("completions", {"stop": [""]}, "stop.0", "stop.0 is ''; expected at least 1 character"),
        ("completions", {"prompt": [5, 999_999]}, "prompt", "the prompt holds token 999999"),
        ("completions", {"prompt": [5] * 512}, "prompt", "the context holds 512"),
        ("completions", {"stream_options": {}}, "stream_options", "without stream"),
        ("completions", {"include_steps": True}, "include_steps", "given without stream"),
        ("responses", {"include_steps": True, "stream": True}, "include_steps", "not supported"),
        ("completions", {"speculative": {"method": "magic"}}, "speculative.method", "the bundle has draft_model"),
        ("completions", {"speculative": {"num_speculative_tokens": 3}}, "speculative.num_speculative_tokens", "1, 2"),
        ("completions", {"speculative": {"k": 3}}, "speculative.k", "without a method"),
        ("completions", {"prompt": HALF}, "prompt", "half a character"),
        ("completions", {"stop": HALF}, "stop", "half a character"),
        ("completions", {"user": HALF}, "user", "half a character"),
        ("completions", {"structured_outputs": {"regex": HALF}}, "structured_outputs.regex", "half a character"),
        ("completions", {"structured_outputs": {"json": {"const": HALF}}}, "structured_outputs", "hex escape"),
        ("completions", {"speculative": {"hypothesis": HALF}}, "speculative", "half a character"),
        ("completions", {"speculative": {"method": "ngram", "prompt_lookup_max": HALF}}, "speculative", "half a"),
        ("chat/completions", {"messages": [{"role": "user", "content": HALF}]}, "messages.0.content", "half a"),
        ("chat/completions", {"chat_template_kwargs": {"x": HALF}}, "x", "half of a character, at position 4"),
        ("chat/completions", {"prediction": {"type": "content", "content": HALF}}, "prediction.content", "half a"),
        ("responses", {"input": HALF}, "input", "half a character"),
        ("responses", {"instructions": HALF}, "instructions", "half a character"),
        ("responses", {"metadata": {"a": HALF}}, "metadata", "half a character"),
        ("responses", {"stream": True, "tools": [CUT], "tool_choice": "none"}, "tools.0.parameters", "half a"),
        (
            "responses",
            {"input": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            "with its last event",
        ),
        (
            "responses",
            {"input": "a", "text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "given with text.format",
        ),
        ("responses", {"input": ["a"]}, "input.0", "expected a message, a function_call or"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "input.0", "expected a message"),
        ("responses", {"input": [{"type": None}]}, "input.0.role", "missing"),
        ("chat/completions", {"messages": []}, "messages", "at least 1 item"),
        (
            "chat/completions",
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "given with continue_final_message",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages.0", "content is missing"),
        ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type", "expected one of 'text',"),
        ("chat/completions", {"response_format": {}}, "response_format.type", "is missing"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        ("chat/completions", {"messages": [{"role": "cat"}]}, "messages.0.role", "system"),
        ("chat/completions", {"tools": [TOOL]}, "tools", "names no way of calling tools"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice", "given without tools"),
        (
            "chat/completions",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "there is no tool 'fly'; expected one of look",
        ),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "without logprobs"),
        ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "one"),
        ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages is set"),
    ],
)
def test_a_wrong_request_is_answered_with_the_field(http, path, body, param, words):
    sent = json.dumps({} if body is None else {**NEEDED[path], **body})
    answer = http.post(f"/v1/{path}", content=sent, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert error["message"].isprintable()
    assert (error["code"] == "context_length_exceeded") == ("the context holds 512" in words)


NO_JSON = "the body's Content-Type is 'application/x-www-form-urlencoded'; send application/json"


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b"{", {}, 400, "not JSON"),
        (b"", {}, 400, ""),
        (b"[]", {}, 400, "the body is missing or not a JSON object"),
        (b'"text"', {}, 400, ""),
        (b'{"prompt": NaN}', {}, 400, ""),
        (b'{"prompt": "a", "temperature": NaN}', {}, 400, ""),
        (b"\xff\xfe", {}, 400, ""),
        (b'{"prompt": "' + b"a" * 90_000 + b'\xff"}', {}, 400, ""),
        (rb'{"prompt": "a", "cut \ud83d": 1}', {}, 400, ""),
        (b'{"prompt": "a', {}, 400, "not JSON: Unterminated string starting, after 11 characters"),
        (b"[" * 50_000, {"Content-Encoding": "Identity"}, 400, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", {"Content-Encoding": "identity"}, 400, "a number of too many digits"),
        (b"anything", {"Content-Encoding": "gzip"}, 415, "the body's Content-Encoding is 'gzip'; send it as it is"),
        (b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"}, 400, NO_JSON),  # as curl sends by default
        (b'{"prompt": "' + b"a" * 120_000 + b'"}', {}, 413, ""),
    ],
)
def test_a_body_that_cannot_be_read_is_explained(http, content, headers, status, words):
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"} | headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_a_body_that_does_not_say_how_long_it_is_is_cut_off(http):
    def endless() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(200):
            yield b"a" * 1000

    answer = http.post("/v1/completions", content=endless(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "more than 100000 bytes" in answer.json()["error"]["message"]


def test_other_models_are_refused(client):
    with pytest.raises(openai.NotFoundError, match="model 'gpt-5' is not served; there is 'tiny', 'also'") as caught:
        client.completions.create(model="gpt-5", prompt="a")
    assert caught.value.code == "model_not_found"


def test_an_unforeseen_error_tells_nothing_of_this_machine(http, tiny, monkeypatch, caplog):
    def broken(*_: Any) -> None:
        raise OSError("/secret/path: gone")

    with monkeypatch.context() as patch:
        patch.setattr(tiny.service.engine.frontend.engine, "encode", broken)
        patch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
        answer = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "mine-7"})
    assert "request mine-7 failed" in caplog.text
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


# --- keys, queues, deadlines, clients that leave ----------------------------------------------------------------------


def test_api_keys(folder):
    with served(folder, api_keys=["first", "sécond"]) as running, httpx.Client(base_url=running.url) as http:
        for key, status in (("first", 200), ("sécond", 200), ("firs", 401), ("firstt", 401), (None, 401)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
            assert answer.status_code == status
            assert http.get("/v1/models", headers=headers).status_code == status
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics"):
            assert http.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong").models.list()


def test_a_full_queue_is_refused_with_a_time_to_retry(folder):
    long = {"prompt": "a", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    with served(folder, max_queue=1) as running, httpx.Client(base_url=running.url, timeout=120) as http:
        slots = running.service.engine.slots
        with httpx.Client(base_url=running.url, timeout=120) as others:
            streams = [others.stream("POST", "/v1/completions", json=long) for _ in range(slots + 1)]
            for stream in streams:
                stream.__enter__()
            answer = http.post("/v1/completions", json=long)
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
            for stream in streams:
                stream.__exit__(None, None, None)
        running.idle()
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        many = http.post("/v1/completions", json={"prompt": "a", "n": slots + 2})
        assert many.status_code == 400
        assert f"at most {slots + 1}" in many.json()["error"]["message"]


def test_too_many_outputs_are_refused_before_any_is_prepared(tiny, http, monkeypatch):
    """128 prompts of 128 outputs would be 16,384 grammars: minutes, and gigabytes."""
    prepared: list[object] = []
    monkeypatch.setattr(tiny.service.engine.frontend, "streams", lambda *streams: prepared.append(streams))
    body = {"prompt": ["a"] * 128, "n": 128, "structured_outputs": {"json_object": True}}
    answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert not prepared


def test_a_deadline_ends_a_request_with_its_own_error(http, client):
    body = {"prompt": "a", "max_tokens": 500, "temperature": 0, "ignore_eos": True, "timeout": 0.02}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    extra = {"ignore_eos": True, "timeout": 0.02}
    with pytest.raises(openai.APIError, match=r"did not finish within 0\.02 seconds"):
        list(client.completions.create(model=NAME, prompt="a", max_tokens=500, stream=True, extra_body=extra))


def test_the_servers_own_deadline_holds(folder):
    with served(folder, timeout=0.02) as running, httpx.Client(base_url=running.url, timeout=120) as http:
        body = {"prompt": "a", "max_tokens": 500, "temperature": 0, "ignore_eos": True, "timeout": 100}
        assert http.post("/v1/completions", json=body).status_code == 504


# --- chat templates ---------------------------------------------------------------------------------------------------


def test_a_model_without_a_template_is_named_before_its_tools(bundle):
    with served(bundle("llama-near")) as bare:
        body = {"messages": CHAT, "tools": [TOOL]}
        error = httpx.post(f"{bare.url}/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], "has no chat template" in error["message"]) == ("messages", True)


def test_parts_of_a_message_are_lines_of_a_text(tiny, client):
    parts: Any = [{"type": "text", "text": "one two"}, {"type": "text", "text": "three"}]
    lines: Any = [{"role": "user", "content": "one two\nthree"}]
    told = tiny.answer("/tokenize", messages=[{"role": "user", "content": parts}])
    assert told == tiny.answer("/tokenize", messages=lines)
    chats = [
        client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, **GREEDY).model_dump()
        for messages in (lines, [{"role": "user", "content": parts}])
    ]
    assert chats[0]["choices"] == chats[1]["choices"]
    assert len({chat["usage"]["prompt_tokens"] for chat in chats}) == 1
    answers = [
        client.responses.create(model=NAME, input=inputs, max_output_tokens=8, temperature=0)
        for inputs in (
            "one two\nthree",
            [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}],
        )
    ]
    assert answers[0].output_text == answers[1].output_text
    assert answers[0].usage == answers[1].usage


def test_requests_choose_among_templates(bundle, tmp_path):
    """Tools choose one, a name any; the form in which calls are written is the chosen one's."""
    only_parts = "{% for m in messages %}{% for c in m.content %}{{ c.text }} {% endfor %}{% endfor %}{{ documents }}"
    folder = with_chat_template(bundle("llama-near"), tmp_path / "bundle", tool_use=HERMES, rag=only_parts)
    chat: Any = [{"role": "user", "content": "one two"}]
    with served(folder) as running:
        template = running.service.engine.frontend.engine.chat_template
        encode = running.service.engine.frontend.encode

        def rendered(name: str, variables: dict[str, Any]) -> list[int]:
            return encode(template.render(chat, variables, name=name), add_special_tokens=False)

        tools = {"tools": [TOOL]}
        documents = {"documents": [{"text": "a"}]}

        def prompt_tokens(path: str = "/v1/chat/completions", **body: Any) -> int:
            usage = running.answer(path, **body)["usage"]
            return int(usage["input_tokens" if "responses" in path else "prompt_tokens"])

        def tokenized(**body: Any) -> list[int]:
            return list(running.answer("/tokenize", messages=chat, **body)["tokens"])

        with_tools, with_documents = rendered("tool_use", tools), rendered("rag", documents)
        plain = tokenized()
        assert plain == rendered("default", {})
        assert tokenized(**tools) == with_tools != plain
        assert tokenized(chat_template="rag", **documents) == with_documents
        called = {"tool_choice": "required", "max_tokens": 64, "temperature": 0}
        assert prompt_tokens(messages=chat, **tools, **called) == len(with_tools)
        assert prompt_tokens(messages=chat, max_tokens=1, chat_template="rag", **documents) == len(with_documents)
        tool = {"type": "function", **TOOL["function"]}
        assert prompt_tokens("/v1/responses", input="one two", tools=[tool], max_output_tokens=1) == len(with_tools)
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": chat, "chat_template": "sql"})
        assert answer.status_code == 400
        assert "chat_template is 'sql'; expected one of the model's" in answer.json()["error"]["message"]


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_idle_connections_stay_open_for_longer_than_in_clients_and_proxies(tiny):
    assert tiny.server.config.timeout_keep_alive > 90  # as Go's clients keep theirs; nginx 60, aiohttp 15 seconds


def _stream(url: str, max_tokens: int, events: list[str], begun: threading.Event) -> None:
    # Many, as one would end before the server does.
    body = {"prompt": "a", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True, "n": 32}
    with httpx.Client(base_url=url, timeout=120) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line:
                events.append(line)
                begun.set()


def test_stopping_without_patience_says_that_streams_are_not_finished(folder):
    events: list[str] = []
    begun = threading.Event()
    with served(folder, patience=0.0) as running:
        thread = threading.Thread(target=_stream, args=(running.url, 480, events, begun))
        thread.start()
        assert begun.wait(120)
    thread.join(120)
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert events[-1] == "data: [DONE]"


def test_stopping_finishes_streams_and_refuses_requests(folder, caplog, monkeypatch):
    """On new connections: a port that is closed would say nothing."""
    events: list[str] = []
    begun = threading.Event()
    # A client takes long to make: the stream must not end meanwhile.
    with served(folder, patience=60.0) as running, httpx.Client(headers={"connection": "close"}) as client:
        thread = threading.Thread(target=_stream, args=(running.url, 480, events, begun))
        thread.start()
        assert begun.wait(120)
        caplog.set_level(logging.INFO, "uvicorn.error")
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
        running.server.should_exit = True
        wait_until(lambda: running.service.engine.closed, "it takes requests")
        assert thread.is_alive(), "the stream ended before it was asked"
        ready = client.get(f"{running.url}/ready")
        answer = client.post(f"{running.url}/v1/completions", json={"prompt": "a"})
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert int(answer.headers["retry-after"]) > 0
        assert client.get(f"{running.url}/health").status_code == 200
        assert re.search(r"Waiting at most 60 seconds for \d+ requests? to finish", caplog.text)
    thread.join(120)
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert events[-1] == "data: [DONE]"


def test_bodies_that_still_come_do_not_delay_a_shutdown(folder):
    with served(folder, patience=60.0) as running:
        place = httpx.URL(running.url)
        client = socket.create_connection((place.host, place.port), timeout=60)
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
        began = time.monotonic()
        running.server.should_exit = True
        with client, client.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 503")
    assert time.monotonic() - began < 30


def test_usage_counts_prefix_cache_hits(tiny):
    prompt, other = [5 + at % 11 for at in range(60)], [6 + at % 13 for at in range(40)]

    def cached(path: str, **body: Any) -> int:
        tiny.idle()
        answer = httpx.post(f"{tiny.url}{path}", json={"max_tokens": 2, "temperature": 0, **body}, timeout=60)
        if not body.get("stream"):
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
        return int(json.loads(last[6:])["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("/v1/completions", prompt=prompt) < 5
    assert cached("/v1/completions", prompt=prompt) == 59
    assert cached("/v1/completions", prompt=prompt, stream=True, stream_options={"include_usage": True}) == 59
    # A prompt counts once, however many outputs it has, and what its outputs share among themselves not at all.
    assert cached("/v1/completions", prompt=other, n=2) < 5
    assert cached("/v1/completions", prompt=[other, prompt], n=2) in range(39, 44)  # there is one slot
    words = [{"role": "user", "content": "one two three four five six"}]
    first = cached("/v1/chat/completions", messages=words)
    assert cached("/v1/chat/completions", messages=words) > first
