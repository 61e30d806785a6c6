"""Answer jobs with llama.cpp's server, one for each way to decode, as that is fixed at its start.

The decoding time is the server's own, which starts at the first token, after both models have read the prompt.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from http.client import HTTPConnection
from typing import Any

from benchmarks.peers.job import LOOKUP, Decoder, Job, Run, Settings, Way, answer
from benchmarks.peers.setup import LLAMA_CPP, llama_tool

START_SECONDS = 120


class Server:
    """A server that is stopped when this process's input ends."""

    def __init__(self, settings: Settings, way: Way) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [llama_tool("llama-server"), "--port", str(self.port), *arguments(settings, way)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        """Return when the model is loaded."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError, RuntimeError):
                self.request("GET", "/health")
                return
            time.sleep(0.1)
        raise RuntimeError(f"llama-server did not start within {START_SECONDS} s")

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON."""
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {text.decode()}")
        return json.loads(text)


def arguments(settings: Settings, way: Way) -> list[str]:
    """The arguments of a server; its n-gram method is the one that searches for the last few tokens."""
    threads = str(settings.threads)
    chosen = [
        "-m",
        f"{settings.target}/model.gguf",
        "-t",
        threads,
        "-c",
        str(settings.context),
        "-np",
        "1",
        "--cache-ram",
        "0",
    ]
    if settings.precision == "fp32":
        chosen += ["-ctk", "f32", "-ctv", "f32"]
    if way.method == "draft":
        chosen += ["--spec-type", "draft-simple", "-md", f"{settings.draft}/model.gguf", "-td", threads]
        chosen += ["--spec-draft-n-max", str(way.k), "--spec-draft-n-min", "0"]
        if settings.precision == "fp32":
            chosen += ["-ctkd", "f32", "-ctvd", "f32"]
    elif way.method == "ngram":
        chosen += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(LOOKUP)]
        chosen += ["--spec-ngram-simple-size-m", str(way.k)]
    return chosen


def main() -> None:
    """Answer jobs, and stop the servers when they end."""
    servers: dict[Way, Server] = {}

    def load(settings: Settings) -> tuple[Decoder, str]:
        for way in settings.ways:
            servers[way] = Server(settings, way)
        for server in servers.values():
            server.wait()

        def run(job: Job) -> Run:
            start = time.perf_counter()
            done = servers[job.way].request(
                "POST",
                "/completion",
                {
                    "prompt": job.prompt,
                    "n_predict": job.new_tokens,
                    "samplers": ["top_k"],
                    "top_k": 1,
                    "ignore_eos": True,
                    "cache_prompt": False,
                    "return_tokens": True,
                },
            )
            seconds = time.perf_counter() - start
            after_first = len(done["tokens"]) - 1
            steps = after_first - done["timings"].get("draft_n_accepted", 0)
            return Run(
                done["tokens"],
                after_first / done["timings"]["predicted_ms"] * 1e3,
                len(done["tokens"]) / seconds,
                after_first / steps,
                done["timings"]["prompt_ms"] / 1e3,
            )

        return run, f"llama.cpp of llama-cpp-python {LLAMA_CPP}"

    try:
        answer(load)
    finally:
        for server in servers.values():
            server.process.terminate()


if __name__ == "__main__":
    main()
