"""The server under what should not come but does: long prompts, crowds, and clients that vanish."""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures import Bundles
from tests.serving import NAME, Served, served, with_chat_template
from tests.threads import wait_until

LONG = {"prompt": "a", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
TEXT = "the quick brown fox " * 195_000
HANG = 4.0
"""Seconds that may be computed, in any thread, until /health is answered; what is refused here took eight."""


@pytest.fixture(scope="module")
def folder(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(bundle("llama-near"), tmp_path_factory.mktemp("loaded") / "bundle")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Served]:
    with served(folder) as server:
        yield server


@contextmanager
def watch(url: str) -> Iterator[list[float]]:
    """Asks /health all the time, and gathers how much was computed before each answer, however busy the machine is."""
    took: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not ended.is_set():
                began = time.process_time()
                assert http.get("/health").status_code == 200
                took.append(time.process_time() - began)
                time.sleep(0.002)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join(60)


def long_requests() -> Iterator[tuple[str, bytes, str]]:
    """Requests that took seconds to refuse: path, body, and what the refusal says."""
    messages = [{"role": "user", "content": TEXT}]
    yield "/v1/completions", json.dumps({"prompt": TEXT}).encode(), "context_length_exceeded"
    yield "/v1/completions", json.dumps({"prompt": ["a", TEXT]}).encode(), "context_length_exceeded"
    yield "/v1/chat/completions", json.dumps({"messages": messages}).encode(), "context_length_exceeded"
    yield "/tokenize", json.dumps({"prompt": TEXT}).encode(), "context_length_exceeded"
    yield "/tokenize", json.dumps({"messages": messages}).encode(), "context_length_exceeded"
    expected = {"messages": [{"role": "user", "content": "a"}], "prediction": {"type": "content", "content": TEXT}}
    yield "/v1/chat/completions", json.dumps(expected).encode(), "context_length_exceeded"
    yield "/v1/completions", b'{"prompt": [' + b"1," * 3_900_000 + b"1]}", "body_too_complex"
    yield "/v1/completions", b'{"prompt": [' + b"-1," * 50_000 + b"1]}", "greater_than_equal"
    yield "/v1/completions", b'{"prompt": [' + b'"",' * 50_000 + b'""]}', "int_type"
    yield "/v1/completions", b"{" + b'"x":1,' * 1_000_000 + b'"prompt": "a"}', "body_too_complex"
    yield "/v1/chat/completions", b'{"messages": [' + b'{"role":"cat"},' * 5_000 + b"{}]}", "literal_error"
    yield "/v1/completions", b'{"prompt": "' + b"\\u0061" * 1_300_000 + b'"}', "context_length_exceeded"
    yield "/v1/completions", b"\xff" * 4_000_000, "invalid_json"


def test_health_answers_while_long_requests_come(running):
    with watch(running.url) as took, httpx.Client(base_url=running.url, timeout=120) as http:
        for path, body, code in long_requests():
            answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, (path, body[:40], answer.text[:200])
            assert answer.json()["error"]["code"] == code, (path, body[:40], answer.text[:200])
            assert len(answer.text) < 1000
    assert max(took) < HANG
    running.idle()


def test_health_answers_while_long_answers_are_written(running):
    body = {**LONG, "n": 8, "logprobs": 20, "echo": True}
    with watch(running.url) as took:
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200
    choices = answer.json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [401] * 8
    assert max(took) < HANG


def test_a_long_body_that_is_mostly_text_is_read(running):
    """Commas, colons and brackets count outside of texts only."""
    text = '{"a": [1, 2, "\\\\"]}, ' * 15_000
    body = {"messages": [{"role": "user", "content": "a"}], "user": "u", "chat_template_kwargs": {"unused": text}}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={**body, "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200, answer.text[:200]


def post_head(url: str, size: int) -> socket.socket:
    """Begins a request with a body of so many bytes."""
    host, _, port = url.removeprefix("http://").partition(":")
    result = socket.create_connection((host, int(port)), timeout=60)
    result.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        "".encode()
    )
    return result


def test_large_bodies_are_in_hand_up_to_a_bound(folder):
    size = 12 << 20

    def refused(server: Served) -> bytes:
        with post_head(server.url, size) as another:
            another.settimeout(0.2)
            with suppress(TimeoutError):
                return another.recv(10_000)
        return b""

    with served(folder, max_body_bytes=size) as server:
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(post_head(server.url, size)).sendall(b" " * (size - 1))
            answer = wait_until(lambda: refused(server), "a third body is read")
            assert answer.startswith(b"HTTP/1.1 429")
            assert b"retry-after: 1" in answer
            small = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)
            assert small.status_code == 200
        wait_until(lambda: not refused(server), "what vanished clients had sent is still counted")


def sent(url: str, body: dict[str, Any], version: str = "1.1", held: bool = False) -> socket.socket:
    """Sends a whole request, whose connection the client would keep; ``held``: together with what follows."""
    content = json.dumps(body).encode()
    result = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)
    result.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, held)
    head = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
    result.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
    return result


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_is_answered(running, stream):
    with sent(running.url, LONG | {"max_tokens": 40, "stream": stream}, held=True) as client:
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as file:
            interim, answer = file.read().split(b"\r\n\r\n", 1)
    assert interim == b"HTTP/1.1 100 Continue"
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in answer
    assert b'"finish_reason":"length"' in answer


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_is_not_computed_for(running, version, stream):
    engine, metrics = running.service.engine, running.service.metrics.registry
    labels = {"model_name": NAME, "finished_reason": "abort"}

    def aborted() -> float:
        return metrics.get_sample_value("specexport:request_success_total", labels) or 0.0

    before = aborted()
    with sent(running.url, LONG | {"n": 8, "stream": stream}, version):
        wait_until(lambda: engine.running, "the request is not taken")
    running.idle()
    wait_until(lambda: aborted() == before + 8, "the request went on")


def test_unknown_endpoints_are_answered_with_those_there_are(running):
    known = "POST /v1/completions, POST /v1/chat/completions, POST /v1/responses, POST /tokenize, GET /health"
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 405),  # where the page is
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
    ):
        answer = httpx.request(method, f"{running.url}{path}")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (status, "invalid_request_error", "unknown_url")
        assert error["message"].startswith(f"there is no {method} {path}; there are GET /v1/models, ")
        assert known in error["message"]
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD"}


def test_full_queues_refuse_before_reading_the_body(folder):
    with served(folder, max_queue=0) as crowded, ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=crowded.url, timeout=60))
        for _ in range(crowded.service.engine.slots):
            stack.enter_context(http.stream("POST", "/v1/completions", json={**LONG, "stream": True}))
        with post_head(crowded.url, 1 << 20) as late:
            assert late.recv(100).startswith(b"HTTP/1.1 429")
        with served(folder, api_keys=["key"]) as locked, post_head(locked.url, 1 << 20) as stranger:
            assert stranger.recv(100).startswith(b"HTTP/1.1 401")


def test_small_switch_intervals_lose_no_request(bundle):
    """Threads change places a thousand times as often as they usually do."""
    before = sys.getswitchinterval()
    expected: dict[int, str] = {}
    with (
        served(bundle("llama-near-batch"), max_queue=64) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):

        def ask(index: int) -> None:
            kind = index % 5
            body: dict[str, Any] = {"prompt": [5 + index % 3, 60], "max_tokens": 24, "temperature": 0}
            if kind == 0:
                with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                    assert answer.status_code == 200
                    next(answer.iter_lines())
                return
            if kind == 1:
                answer = http.post("/v1/completions", json={**LONG, "timeout": 0.02})
                assert answer.status_code in (200, 504), answer.text
                return
            answer = http.post("/v1/completions", json={**body, "n": kind - 1})
            assert answer.status_code == 200, answer.text
            for choice in answer.json()["choices"]:
                assert expected.setdefault(index % 3, choice["text"]) == choice["text"]

        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(16) as threads:
                list(threads.map(ask, range(150)))
        finally:
            sys.setswitchinterval(before)
        server.idle()
        refused = server.service.metrics.registry.get_sample_value
        assert refused("specexport:requests_refused_total", {"model_name": "tiny", "status": "500"}) is None
