"""A real server over a tiny bundle, for the tests of it."""

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from specexport.async_engine import AsyncEngine
from specexport.server.app import Server, create_app
from specexport.server.service import Service
from tests.manifests import put, relist
from tests.threads import JOIN, wait_until

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
HERMES = (
    "{% if tools %}calls in <tool_call>\n{% for t in tools %}{{ t.function.name }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A template that knows tools as Hermes' and Qwen's do, but names them alone, as the context is short."""
NAME = "tiny"


def with_chat_template(bundle: Path, place: Path, template: str = TEMPLATE, **named: str) -> Path:
    """A copy of a bundle whose model has a chat template, and perhaps others by name."""
    folder = shutil.copytree(bundle, place)
    files = {name: f"tokenizer/{name}.jinja" for name in ("chat_template", *named)}
    for name, source in {"chat_template": template, **named}.items():
        (folder / files[name]).write_text(source, encoding="utf-8")
    put(folder, "tokenizer.templates", {"default": files["chat_template"]} | {name: files[name] for name in named})
    put(folder, "tokenizer.special_tokens", {"bos_token": "<s>", "eos_token": "</s>"})
    relist(folder, *files.values())
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for_server(process: subprocess.Popen[bytes], url: str) -> None:
    """Waits until a command answers."""

    def answers() -> bool:
        assert process.poll() is None, "it has ended"
        try:
            return httpx.get(url, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, f"{url} is not answered")


class Served:
    """A server that runs.

    Attributes:
        server: uvicorn's.
        service: what it serves.
        url: where.
    """

    def __init__(self, server: Server, service: Service) -> None:
        self.server = server
        self.service = service
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def answer(self, path: str, **body: Any) -> Any:
        """What a request is answered with, unless it is an error."""
        answer = httpx.post(self.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        with httpx.stream("POST", self.url + path, json=body, timeout=120) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert answer.status_code == 200, lines
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def idle(self) -> None:
        """Waits until no request holds a slot or waits for one."""
        engine = self.service.engine
        wait_until(lambda: engine.running + engine.waiting == 0, "a slot is not freed")


@contextmanager
def served(
    bundle: Path,
    *,
    max_queue: int = 128,
    timeout: float | None = None,
    patience: float = 20.0,
    around: Callable[[Any], Any] = lambda app: app,
    **app: Any,
) -> Iterator[Served]:
    """Serves a bundle on a free port; ``around`` may put an application around the server's."""
    engine = AsyncEngine.open(bundle=bundle, threads=1, max_queue=max_queue, calibrate=False)
    service = Service(engine, (NAME, "also"), timeout)
    settings = {"host": "127.0.0.1", "port": 0, "log_level": "warning"}
    server = Server(around(create_app(service, **app)), engine, shutdown_timeout=patience, **settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), "the server does not start")
    assert server.started
    try:
        yield Served(server, service)
    finally:
        server.should_exit = True
        thread.join(JOIN)
        assert not thread.is_alive(), "the server does not stop"
