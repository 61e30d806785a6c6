"""Requests of every kind, each with a method and without: speculation changes nothing but time."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from tests.serving import HERMES, Served, served, with_chat_template

EOS = 1
"""That of ``tests.checkpoints``, which needs torch."""

BUNDLES = ("qwen3-lookup", "llama-near")
"""A draft that is the target and every look-up; a draft that is right now and then."""
PLAIN = {"num_speculative_tokens": 0}
Body = dict[str, Any]

# --- requests ---------------------------------------------------------------------------------------------------------

TOKENS = st.integers(3, 299)
TEXTS = st.lists(
    st.sampled_from(["one", "two", "three", "the", "of", "a", "{", '"a"', "é", "🙂"]), min_size=1, max_size=12
)
PROMPTS = st.one_of(
    TEXTS.map(" ".join),
    st.lists(TOKENS, min_size=1, max_size=8).flatmap(
        lambda part: st.integers(1, 5).map(lambda times: part * times)  # so that there is something to look up
    ),
)
VALUES = st.sampled_from(
    [{"const": 1}, {"enum": ["x", "y"]}, {"type": "boolean"}, {"type": "null"}, {"type": "integer"}]
)
SCHEMAS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=3).map(
    lambda fields: {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
)
BOUNDS = st.one_of(
    SCHEMAS.map(lambda schema: {"json": schema}),
    st.lists(st.text("abc é", min_size=1, max_size=6), min_size=1, max_size=4, unique=True).map(
        lambda words: {"choice": words}
    ),
    st.sampled_from(["[ab]{1,6}", "(one|two)+", "a*b", "[0-9]{3}", "(x|xy|xyz)"]).map(lambda text: {"regex": text}),
    st.sampled_from(['start: "a" | "b" start', 'start: item+\nitem: "x" | "yz"']).map(lambda text: {"grammar": text}),
    st.just({"json_object": True}),
)
TOOLS = st.lists(st.sampled_from(["f", "look_up"]), min_size=1, max_size=2, unique=True).flatmap(
    lambda names: SCHEMAS.map(
        lambda schema: [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    )
)


def optional(**fields: Any) -> Any:
    """Some of these fields; few, as most of them change each other's effect."""
    chosen = st.sets(st.sampled_from(sorted(fields)), max_size=4)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))


SAMPLING = optional(
    min_tokens=st.integers(0, 6),
    stop=st.lists(st.text('aeinorst 1"}', min_size=1, max_size=2), min_size=1, max_size=3),
    stop_token_ids=st.lists(TOKENS, min_size=1, max_size=20),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(
        st.one_of(st.just(EOS), TOKENS).map(str), st.sampled_from([-100.0, -2.0, 0.5, 3.0, 100.0]), max_size=4
    ),
    repetition_penalty=st.sampled_from([0.8, 1.1, 1.5, 3.0]),
    frequency_penalty=st.sampled_from([-2.0, -0.5, 0.5, 2.0]),
    presence_penalty=st.sampled_from([-2.0, 0.5, 2.0]),
    seed=st.integers(0, 9),
    n=st.integers(1, 2),
    skip_special_tokens=st.booleans(),
    stream=st.booleans(),
)


@st.composite
def requests(draw: Any) -> tuple[str, Body]:
    """A path and a body without a word on speculation."""
    body: Body = {"temperature": draw(st.sampled_from([0, 0, 0, 1.0])), **draw(SAMPLING)}
    most = draw(st.integers(1, 32))
    bound = draw(st.none() | BOUNDS)
    if draw(st.booleans()):
        body |= {"prompt": draw(PROMPTS), "max_tokens": most, "logprobs": draw(st.none() | st.integers(0, 3))}
        path = "/v1/completions"
    else:
        words = draw(st.lists(TEXTS.map(" ".join), min_size=1, max_size=3))
        messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(words)]
        body |= {"messages": messages, "max_tokens": most}
        if (others := draw(st.none() | st.integers(0, 3))) is not None:
            body |= {"logprobs": True, "top_logprobs": others}
        if draw(st.booleans()):
            body["tools"] = draw(TOOLS)
            body["tool_choice"] = draw(st.sampled_from(["auto", "required", "none"]))
            bound = None
        path = "/v1/chat/completions"
    if bound is not None:
        body["structured_outputs"] = bound
        body |= {name: default for name, default in (("min_tokens", 0), ("ignore_eos", False)) if name in body}
    return path, body


# --- answers ----------------------------------------------------------------------------------------------------------


def answered(http: httpx.Client, path: str, body: Body) -> tuple[int, Any]:
    """The status, and what the choices say: all that is told but for names that are drawn and counts of tokens."""
    answer = http.post(path, json=body)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    if not body.get("stream"):
        return 200, _without_ids(answer.json()["choices"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    document: dict[int, Any] = {}
    for choice in (choice for event in events for choice in event.get("choices", [{"index": -1, "error": event}])):
        held = document.setdefault(choice["index"], {"text": "", "reason": None, "logprobs": [], "calls": ""})
        delta = choice.get("delta", choice)
        held["text"] += delta.get("text") or delta.get("content") or ""
        held["calls"] += "".join(
            (call["function"].get("name") or "") + call["function"]["arguments"]
            for call in delta.get("tool_calls") or []
        )
        held["reason"] = choice.get("finish_reason") or choice.get("error") or held["reason"]
        scores = choice.get("logprobs") or {}
        # A chunk is a step's tokens, so that how they are parted into chunks is speculation's.
        held["logprobs"] += scores.get("content") or list(
            zip(scores.get("tokens", []), scores.get("token_logprobs", []), scores.get("top_logprobs", []), strict=True)
        )
    return 200, document


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(part) for name, part in value.items() if name != "id"}
    return [_without_ids(part) for part in value] if isinstance(value, list) else value


def text_of(path: str, body: Body, message: Any) -> str:
    """What the first choice says."""
    if body.get("stream"):
        return str(message[0]["text"])
    return str((message[0]["text"] if path == "/v1/completions" else message[0]["message"]["content"]) or "")


@pytest.fixture(scope="module")
def servers(
    bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Served, list[Body]]]]:
    """By bundle: a server, and every way in which a request may speculate there."""
    with contextlib.ExitStack() as stack:
        results = {}
        for name in BUNDLES:
            folder = with_chat_template(bundle(name), tmp_path_factory.mktemp("speculation") / name, HERMES)
            server = stack.enter_context(served(folder))
            methods = httpx.get(f"{server.url}/v1/models").json()["data"][0]["methods"]
            sizes = [(method["name"], size) for method in methods for size in method["num_speculative_tokens"]]
            results[name] = server, [{"method": name, "num_speculative_tokens": size} for name, size in sizes]
        yield results


@pytest.mark.parametrize("name", BUNDLES)
def test_speculation_changes_nothing_but_time(fuzz, servers, name):
    server, ways = servers[name]
    with httpx.Client(base_url=server.url, timeout=120) as http:

        def check(arguments: tuple[tuple[str, Body], int]) -> str:
            (path, body), way = arguments
            status, plain = answered(http, path, {**body, "speculative": PLAIN})
            assert status in (200, 400), plain
            chosen = ways[way % (len(ways) + 1)] if way % (len(ways) + 1) < len(ways) else None
            if chosen is not None:
                fast = {**body, "speculative": chosen}
            elif status == 200 and (expected := text_of(path, body, plain)):
                fast = {**body, "speculative": {"hypothesis": expected}}
            else:
                fast = body
            answer_status, text = answered(http, path, fast)
            assert answer_status == status, (path, body, chosen, plain, text)
            if status == 200 and body["temperature"]:
                return "sampled"  # by other noise: that the distribution is the same is tested elsewhere
            assert text == plain, (path, body, chosen)
            kind = "tools" if "tools" in body else "constrained" if "structured_outputs" in body else "free"
            return f"equal, {kind}" if status == 200 else "refused alike"

        fuzz(f"speculation, {name}", st.tuples(requests(), st.integers(0, 99)), check, 30)
        server.idle()
