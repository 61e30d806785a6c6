"""``specexport serve`` in a separate process, for load benchmarks."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

_START = 120.0


class Process:
    """A running server.

    Attributes:
        url: its address.
        process: its process.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.process = process

    def metrics(self) -> dict[str, float]:
        """The values of ``/metrics`` by name and labels, without our prefix and the model's name."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        values: dict[str, float] = {}
        for line in text.splitlines():
            if line[:1] != "#":
                name, _, value = line.rpartition(" ")
                plain = re.sub(r'model_name="[^"]*",?', "", name.removeprefix("specexport:")).replace("{}", "")
                values[plain.replace(",}", "}")] = float(value)
        return values


@contextmanager
def server(bundle: Path, *flags: str, threads: int) -> Iterator[Process]:
    """Serves a bundle on a free port, and stops as an operator would.

    Raises:
        RuntimeError: it does not start, or does not stop on a signal.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specexport", "serve", str(bundle), "--port", str(port)]
    command += ["--threads", str(threads), "--served-model-name", "model", "--log-level", "warning", *flags]
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _until_ready(url, process)
            yield Process(url, process)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            if process.wait(120):
                raise RuntimeError(f"the server ended with {process.returncode}; expected 0")
        finally:
            process.kill()


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError("the server did not start")


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of the values for this share."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
