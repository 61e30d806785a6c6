"""``specexport serve`` as a process, and what its flags say."""

import json
import signal
import socket
import sys

import httpx
import pytest

from benchmarks.__main__ import parser
from benchmarks.serving import server
from tests.serving import with_chat_template
from tests.threads import wait_until

pytestmark = pytest.mark.exporter  # as are the benchmarks, which make models


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a bundle or a model"),
        (["a", "--model", "b"], "give a bundle or a model"),
        (["--served-model-name", "a", "{}"], "--served-model-name takes all words up to the next flag"),
        (["a", "--timeout", "-1"], "--timeout is -1.0; expected a number >= 0"),
        (["a", "--max-queue", "-1"], "--max-queue is -1; expected a whole number >= 0"),
        (["a", "--port", "99999"], "--port is 99999; expected a whole number from 0 to 65535"),
        (["./nowhere"], "no such folder"),
        (["{}", "-tp", "2"], "--tensor-parallel-size is 2, but"),
        (["{}", "--gpu_memory_utilization", "2"], "--gpu-memory-utilization is 2.0; expected a number in (0, 1]"),
        (["{}", "--speculative_config", '{"method": "magic"}'], "method is 'magic'"),
        (["{}", "--max_model_len", "4096"], "--max-model-len is 4096"),
        (["{}", "--precision", "int8"], "--precision was given with a bundle"),
        (["{}", "--api-key", ""], "--api-key is empty"),
        (["{}", "--cors", "https://example.com/"], "--cors is ('https://example.com/',); expected a list of origins"),
        (["{}", "--served-model-name", ""], "--served-model-name is ('',); expected a list, each a text that is not"),
        (["{}", "--replicas", "2"], "--replicas was given without --ray"),
        (["{}", "--ray", "--precision", "int8"], "leave out --precision"),
    ],
)
def test_wrong_flags_are_named(bundle, words, message, cli):
    words = [word.format(bundle("llama-near")) if word == "{}" else word for word in words]
    assert message in cli("serve", *words, status=1 if words == ["./nowhere"] or "magic" in message else 2).err


def test_an_address_that_is_taken_is_named_before_anything_is_loaded(cli):
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        for host, port, reason in (
            ("127.0.0.1", occupied.getsockname()[1], "address already in use"),
            ("192.0.2.1", 0, "cannot assign requested address"),
            ("no.such.host.invalid", 0, ""),
        ):
            line = cli("serve", "nowhere", "--host", host, "--port", port, status=1).err
            assert line.startswith(f"specexport: error: --host is {host} and --port {port}: ")
            assert reason in line.lower()
            assert line.endswith("; choose an address that is free here\n")


def test_without_ray_its_extra_is_named(bundle, monkeypatch, cli):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "specexport.server.ray", raising=False)
    assert "pip install 'specexport[ray]'" in cli("serve", bundle("llama-near"), "--ray", status=1).err


def test_sigterm_finishes_streams(bundle):
    flags = ("-tp", "1", "--seed", "42", "--max_model_len", "256", "--gpu_memory_utilization", "0.8", "--api_key", "k")
    config = '{"num_speculative_tokens": 2, "method": "draft_model"}'
    with server(bundle("llama-near"), *flags, "--no-calibrate", "--speculative_config", config, threads=1) as running:
        headers = {"Authorization": "Bearer k"}
        models = httpx.get(f"{running.url}/v1/models", headers=headers).json()
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("model", 256)
        body = {"prompt": "a", "max_tokens": 240, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            events = list(lines)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_second_ctrl_c_ends_streams(bundle, capfd):
    with server(bundle("llama-near"), "--no-calibrate", threads=1) as running:
        body = {"prompt": "a", "n": 64, "max_tokens": 500, "temperature": 1, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            running.process.send_signal(signal.SIGINT)
            wait_until(lambda: httpx.get(f"{running.url}/ready").status_code == 503, "it does not drain")
            running.process.send_signal(signal.SIGINT)
            assert "shutting_down" in "".join(lines)
    assert "Traceback" not in capfd.readouterr().err


def test_a_short_soak_loses_nothing(bundle, tmp_path):
    """Latencies are the whole soak's to judge, not this one's of seconds."""
    out, folder = tmp_path / "soak.json", with_chat_template(bundle("llama-near-batch"), tmp_path / "bundle")
    words = ["soak", "--bundle", str(folder), "--minutes", "0.2", "--threads", "1", "--json", str(out)]
    arguments = parser().parse_args([*words, "--vanishing", "40", "--slower", "inf", "--growth", "200"])
    assert arguments.main(arguments) == 0
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert figures["failures"] == []
    assert figures["requests"] > 20
    assert {"answered", "answered, streamed", "cancelled by the client", "refused, wrong"} <= set(figures["outcomes"])
    assert {"answered, chat", "answered, schema"} <= set(figures["outcomes"])
    assert figures["crowd"]["refused_at_10x"] > 0
    assert figures["crowd"]["answered_at_10x"] > 0
    assert figures["held_after"] == 0
    assert figures["stopping"] == figures["stopping"] | {"streams": 4, "ended_well": 4, "exit_code": 0}


def test_the_load_benchmark_runs(bundle, tmp_path):
    out = tmp_path / "serve.json"
    words = ["serve", "--bundle", str(bundle("llama-near")), "--requests", "6", "--concurrency", "3", "--threads", "1"]
    arguments = parser().parse_args([*words, "--new-tokens", "16", "--prompt-chars", "40", "--json", str(out)])
    assert arguments.main(arguments) == 0
    fast, plain = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (fast["requests"], plain["requests"]) == (6, 6)
    # The draft is as large as the target, so that it need not pay.
    assert fast["acceptance_length"] >= plain["acceptance_length"] == 1.0
    for row in (fast, plain):
        assert 0 < row["first_p50"] <= row["first_p99"]
        low, high = row["server"]["time_to_first_token_seconds"]
        assert 0 < low <= high
