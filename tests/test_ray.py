"""The server on a real Ray of two replicas: routing, a replica that dies, bundles that change, and its scale."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from specexport.contract.errors import BackendError
from specexport.contract.options import options
from specexport.exporter.options import BuildSettings
from specexport.options import ServerOptions
from specexport.runtime import Engine, SamplingParams
from tests.fixtures import Bundles
from tests.serving import free_port, wait_for_server
from tests.threads import JOIN, wait_until

pytest.importorskip("ray", reason="the [ray] extra is not in [dev]: make ray")

PROMPTS = ["one two three", "what", "a b c", "the end of it", "seven", "four five"]
TOKENS = 120
wait = partial(wait_until, every=0.2)  # requests that ask how things are shall be few


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "--replicas is 0"),
        (["--replicas", "3", "--max-replicas", "2"], "max_replicas is 2; expected at least replicas, 3"),
    ],
)
def test_wrong_flags_are_named(bundle, words, message, cli):
    assert message in cli("serve", bundle("llama-near"), "--ray", *words, status=1).err


def test_no_flag_is_ignored():
    from specexport.server.ray import Settings

    refused = {*options(BuildSettings), "tensor_parallel_size"}
    elsewhere = {"model", "api_key", "host", "port", "log_level", "ray"}
    assert options(ServerOptions).keys() - refused - elsewhere <= Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("backend", "arguments", "gpus"),
    [
        ("onnxruntime", {}, 0),
        ("tensorrt", {}, 1),
        ("tensorrt", {"backend": "onnxruntime"}, 0),
        ("onnxruntime", {"backend": "onnxruntime-cuda"}, 1),
        ("tensorrt", {"gpus": 0.5}, 0.5),
    ],
)
def test_a_replica_gets_a_gpu_where_one_runs_the_bundle(backend, arguments, gpus):
    from specexport.server.ray import Settings

    assert Settings(bundle="a", threads=3, **arguments).actor(backend) == {"num_cpus": 3, "num_gpus": gpus}


def test_routing_keys_are_prompt_prefixes():
    from specexport.server.ray import prompt_key

    def key(**body: Any) -> str | None:
        return prompt_key(json.dumps(body).encode())

    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    again = [*chat, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    assert key(prompt="one two") == "one two"
    assert key(messages=chat) == key(messages=again) == key(input=again) != key(messages=again[:1])
    assert key(prompt=[1, 2]) != key(prompt=[1, 3])
    assert (key(prompt=7), key(), prompt_key(b"[]"), prompt_key(b"\xff")) == (None, None, None, None)


async def test_stalled_replicas_are_unhealthy(bundle, monkeypatch):
    from specexport.server.errors import ApiError
    from specexport.server.ray import EngineReplica, Settings

    model = EngineReplica(Settings(bundle=str(bundle("llama-near")), calibrate=False))
    engine = model.engine.frontend.engine
    await model.check_health()

    def refuse(views: object) -> None:
        raise BackendError("the device is lost")

    monkeypatch.setattr(engine._scheduler._program, "step", refuse)
    for _ in range(3):
        with pytest.raises(BackendError, match="the device is lost"):
            async for _chunk in model.engine.generate("a"):
                pass
    with pytest.raises(ApiError, match="the last 3 turns failed"):
        await model.check_health()
    await model.__del__()


async def _chosen(names: list[str], key: str | None) -> list[list[str]]:
    from specexport.server.ray import ForwardedRequest, PrefixRouter

    replicas: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    request: Any = SimpleNamespace(args=[ForwardedRequest(scope={}, body=b"", key=key)])
    ranks = await PrefixRouter.choose_replicas(SimpleNamespace(), replicas, request)
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


async def test_prompts_with_a_common_prefix_go_to_one_replica():
    names = [f"replica{number}" for number in range(8)]
    first = {key: (await _chosen(names, key))[0][0] for key in map(str, range(400))}
    counts = [list(first.values()).count(name) for name in names]
    assert min(counts) > 20, "spread over all of them"
    for key, name in first.items():
        ranks = await _chosen(names[::-1], key)
        assert ranks[0] == [name]
        assert sorted(ranks[0] + ranks[1]) == names
        if name != "replica3":  # which goes, and moves no prompt but its own
            assert (await _chosen([name_ for name_ in names if name_ != "replica3"], key))[0] == [name]
    assert (await _chosen(names, None)) == [names]


# --- a cluster --------------------------------------------------------------------------------------------------------


class Cluster:
    """A Ray with HTTP at a free port."""

    def __init__(self, url: str, address: str) -> None:
        self.url, self.address = url, address

    def deploy(self, bundle: Path, name: str, replicas: int = 2, **arguments: Any) -> None:
        from ray import serve

        from specexport.server.ray import Settings, app

        arguments |= {"bundle": str(bundle), "replicas": replicas, "served_model_name": (name,), "calibrate": False}
        settings = Settings.model_validate(arguments)
        serve.run(app(settings), name="specexport")

    def metric(self, name: str) -> dict[str, float]:
        """A metric of each replica, summed over its other labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        totals: dict[str, float] = {}
        for labels, value in re.findall(rf"^(?:specexport:)?{name}\{{(.*)\}} (.*)$", text, re.MULTILINE):
            replica = dict(re.findall(r'(\w+)="([^"]*)"', labels))["replica"]
            totals[replica] = totals.get(replica, 0.0) + float(value)
        return totals

    def pid(self, replica: str) -> int:
        """The process of a replica."""
        import ray

        actor = ray.get_actor(f"SERVE_REPLICA::specexport#Model#{replica}", namespace="serve")
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    # As many cores as replicas may be there at once while they are exchanged; Ray only counts them.
    context = ray.init(num_cpus=8, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield Cluster(f"http://127.0.0.1:{port}", context.address_info["gcs_address"])
    serve.shutdown()
    ray.shutdown()


def greedy(folder: Path, tokens: int = TOKENS) -> dict[str, str]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with Engine.load(folder, threads=1) as engine:
        return {prompt: engine.generate(prompt, params).text for prompt in PROMPTS}


def ask(url: str, prompt: str, stream: bool, tokens: int = TOKENS) -> tuple[str, str]:
    """The model that answered and the text, or ``error`` and what the client was told."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    if not stream:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=JOIN)
        if answer.status_code != 200:
            return "error", f"{answer.status_code} {answer.text}"
        return answer.json()["model"], answer.json()["choices"][0]["text"]
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=JOIN) as answer:
        if answer.status_code != 200:
            return "error", f"{answer.status_code} {answer.read().decode()}"
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    if events[-1:] != ["[DONE]"]:
        return "error", f"a stream that broke off: {events[-1:]}"
    parts = list(map(json.loads, events[:-1]))
    if "error" in parts[-1]:
        return "error", f"event {parts[-1]}"
    return parts[0]["model"], "".join(part["choices"][0]["text"] for part in parts)


class Load:
    """Clients that ask again and again, half of them streamed, until the block is over."""

    def __init__(self, url: str, clients: int = 6) -> None:
        self._url, self._clients = url, clients
        self._over = threading.Event()
        self.results: list[tuple[str, str, str]] = []
        """Prompt, model or ``error``, text or what was told."""

    def _client(self, number: int) -> None:
        while not self._over.is_set():
            prompt = PROMPTS[(number + len(self.results)) % len(PROMPTS)]
            try:
                self.results.append((prompt, *ask(self._url, prompt, number % 2 == 0)))
            except httpx.HTTPError as error:
                self.results.append((prompt, "error", f"connection: {error!r}"))

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(self._clients)
        self._work = [self._pool.submit(self._client, number) for number in range(self._clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for work in self._work:
            work.result()

    @property
    def failures(self) -> list[str]:
        return [details for _, model, details in self.results if model == "error"]

    def more(self, count: int) -> None:
        least = len(self.results) + count
        wait(lambda: len(self.results) >= least, "requests stand still")


@pytest.fixture(scope="module")
def texts(bundle: Bundles) -> dict[str, dict[str, str]]:
    return {name: greedy(bundle(folder)) for name, folder in MODELS.items()}


MODELS = {"first": "llama-near-batch", "second": "gpt2-tree-batch"}


def right(load: Load, texts: dict[str, dict[str, str]]) -> None:
    """Every answer is what its model says of its prompt."""
    for prompt, model, text in load.results:
        assert model == "error" or text == texts[model][prompt]


@pytest.mark.slow
def test_overload_sends_retry_after_and_leaving_frees_a_slot(cluster, bundle):
    cluster.deploy(bundle(MODELS["first"]), "first", replicas=1, max_queue=2)
    body = {"prompt": PROMPTS[0], "max_tokens": 480, "temperature": 0, "n": 4, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=JOIN) as answer:
        next(answer.iter_lines())
    wait(lambda: sum(cluster.metric("num_requests_running").values()) == 0, "nobody reads what is decoded")

    def one(_: int) -> httpx.Response:
        return httpx.post(f"{cluster.url}/v1/completions", json=body | {"stream": False}, timeout=JOIN)

    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(one, range(30)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < len(answers)
    for answer in refused:
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        assert answer.json()["error"]["code"] == "queue_full"
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=60).text
    assert re.search(r'request_success_total\{finished_reason="abort".*\} 4\.0', metrics)


@pytest.mark.slow
def test_a_replica_that_dies_takes_its_own_requests_with_it(cluster, bundle, texts):
    cluster.deploy(bundle(MODELS["first"]), "first")
    before = cluster.metric("request_success_total")
    assert len(before) == 2
    for _ in range(6):
        assert ask(cluster.url, PROMPTS[0], True) == ("first", texts["first"][PROMPTS[0]])
    added = {name: after - before[name] for name, after in cluster.metric("request_success_total").items()}
    assert sorted(added.values()) == [0, 6], "prompts that begin alike go to one replica"
    processes = {name: cluster.pid(name) for name in added}

    with Load(cluster.url) as load:
        load.more(12)
        # Long, as a model this small may be done before its first tokens have come through.
        body = {"prompt": PROMPTS[0], "max_tokens": 480, "n": 8, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=JOIN) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            running = cluster.metric("num_requests_running")
            os.kill(processes[max(running, key=lambda name: running[name])], signal.SIGKILL)  # the stream alone is 8
            events = list(lines)
        load.more(30)
        wait(lambda: _replicas(cluster) == 2, "no replica in its place")
        load.more(12)
    print(f"the stream that was cut: {len(events)} events, the last {events[-2:]}")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "replica_died"
    assert events[-1] == "data: [DONE]"
    right(load, texts)
    print(f"killed: {len(load.results)} requests, {len(load.failures)} failed: {load.failures}")
    assert len(load.failures) <= 6, "no more than clients"
    for details in load.failures:
        assert "replica_died" in details
        assert "the replica that had this request died; send the request again" in details


@pytest.mark.slow
def test_a_bundle_is_exchanged_without_a_refused_request(cluster, bundle, texts):
    cluster.deploy(bundle(MODELS["first"]), "first")
    with Load(cluster.url) as load:
        load.more(12)
        cluster.deploy(bundle(MODELS["second"]), "second")
        load.more(24)
    right(load, texts)
    answered = [model for _, model, _ in load.results]
    print(f"exchanged: {answered.count('first')} by the old bundle, {answered.count('second')} by the new")
    assert load.failures == []
    assert set(answered) == {"first", "second"}
    assert set(answered[-6:]) == {"second"}


@pytest.mark.slow
def test_a_config_file_scales_with_the_requests_that_wait(cluster, bundle, texts, tmp_path):
    scale = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 1}
    config = {
        "applications": [
            {
                "name": "specexport",
                "import_path": "specexport.server.ray:app",
                "args": {"bundle": str(bundle(MODELS["first"])), "served_model_name": ["first"], "max_replicas": 2}
                | {"calibrate": False},
                "deployments": [
                    {
                        "name": "Model",
                        "autoscaling_config": scale | {"downscale_delay_s": 2, "look_back_period_s": 2},
                        "ray_actor_options": {"num_cpus": 0.5},
                    }
                ],
            }
        ]
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = [sys.executable, "-m", "ray.serve.scripts", "run", str(tmp_path / "config.json"), "--address"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    with subprocess.Popen([*words, cluster.address]) as process:
        try:
            wait(lambda: _replicas(cluster) == 1, "the application does not start")
            with Load(cluster.url, 8) as load:
                wait(lambda: _replicas(cluster) == 2, "no second replica")
                load.more(12)
            wait(lambda: _replicas(cluster) == 1, "the second replica stays")
            right(load, texts)
            assert load.failures == []
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(JOIN)


def _replicas(cluster: Cluster) -> int:
    try:
        return len(cluster.metric("request_success_total"))
    except httpx.HTTPError:
        return 0


@pytest.mark.slow
def test_sigterm_to_the_command_finishes_streams(bundle, texts):
    port = free_port()
    command = [sys.executable, "-m", "specexport", "serve", str(bundle(MODELS["first"])), "--ray", "--replicas", "2"]
    command += ["--port", str(port), "--threads", "1", "--no-calibrate", "--served-model-name", "first"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, "--api-key", "k"]) as process:
        try:
            wait_for_server(process, f"{url}/health")
            assert httpx.get(f"{url}/v1/models", timeout=30).status_code == 401
            headers = {"Authorization": "Bearer k"}
            body = {"prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                process.send_signal(signal.SIGTERM)
                events = list(lines)
            assert events[-1] == "data: [DONE]"
            assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert process.wait(JOIN) == 0
        finally:
            process.kill()
