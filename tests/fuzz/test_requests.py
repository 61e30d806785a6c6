"""Requests, harmed: each is answered or refused in OpenAI's shape, and the server is as it was before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from tests.fuzz.mutations import edits, harmed_bytes, harmed_json
from tests.serving import Served, served, with_chat_template

_MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "one"}]}]
_SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 3}}}
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "one two", "max_tokens": 4, "n": 2, "stop": ["e"], "logprobs": 2, "echo": True, "seed": 1},
        {"prompt": [[5, 6], [7]], "temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "stop_token_ids": [1]},
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "include_speculation": True},
        {"prompt": "a", "speculative": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
        {"prompt": "a", "speculative": {"method": "suffix"}, "timeout": 0.1, "user": "u", "ignore_eos": True},
        {"prompt": "a", "speculative": {"hypothesis": [5, 6, 7], "hypothesis_entropy": 0.5}},
    ],
    "/v1/chat/completions": [
        {"messages": _MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 3, "stream": True},
        {"messages": _MESSAGES, "chat_template_kwargs": {"self": 1, "tools": [{"a": None}]}, "max_tokens": 1},
        {
            "messages": _MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
        },
        {"messages": _MESSAGES, "response_format": {"type": "json_object"}, "max_completion_tokens": 5},
        {"messages": _MESSAGES, "prediction": {"type": "content", "content": "one two"}, "tools": [], "model": "tiny"},
    ],
    "/tokenize": [{"prompt": "one two", "add_special_tokens": False}, {"messages": _MESSAGES}],
}
PATHS = st.sampled_from([*sorted(SEEDS) * 5, "/v1/models", "/v1/nothing"])
KNOWN = {200, 400, 404, 405, 413, 429, 504}


@pytest.fixture(scope="module")
def running(bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = with_chat_template(bundle("llama-near"), tmp_path_factory.mktemp("requests") / "bundle")
    # Requests for many tokens are cut short, as otherwise they were all that is tried.
    with served(folder, timeout=0.2) as server:
        yield server


def _check(http: httpx.Client, path: str, body: bytes) -> str:
    """What became of a body; asserts that it is what the API promises."""
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in KNOWN, (path, body[:300], answer.text[:300])
    if answer.status_code == 200:
        return "answered"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"], (path, body[:300])
    assert len(error["message"]) < 600, (path, body[:300])
    assert "Traceback" not in error["message"]
    return f"refused with {answer.status_code}"


def _seeded(path: str, number: int) -> Any:
    seeds = SEEDS.get(path, SEEDS["/tokenize"])
    return seeds[number % len(seeds)]


@pytest.mark.parametrize(
    "harm",
    [harmed_json, lambda seed, done: harmed_bytes(httpx.Request("POST", "http://a", json=seed).content, done)],
    ids=["json", "bytes"],
)
def test_requests(fuzz, running, harm):
    with httpx.Client(base_url=running.url, timeout=60) as http:
        fuzz(
            "requests",
            st.tuples(PATHS, st.integers(0, 99), edits),
            lambda arguments: _check(http, arguments[0], harm(_seeded(arguments[0], arguments[1]), arguments[2])),
            150,
        )
        running.idle()
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_variables_of_a_chat_template(fuzz, running):
    known = (
        "self",
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "range",
        "loop",
        "args",
        "kwargs",
        "context",
    )
    names = st.sampled_from(known) | st.text(max_size=8)
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    )
    with httpx.Client(base_url=running.url, timeout=60) as http:

        def check(arguments: dict[str, Any]) -> str:
            body = {"messages": _MESSAGES, "max_tokens": 1, "chat_template_kwargs": arguments}
            return _check(http, "/v1/chat/completions", httpx.Request("POST", "http://a", json=body).content)

        fuzz("template variables", st.dictionaries(names, values, max_size=4), check, 60)
