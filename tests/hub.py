"""A hub on this machine: the endpoints that the hub's own client asks for a model's files, over a folder."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

SHA = "0" * 40


class _Handler(BaseHTTPRequestHandler):
    """``fetched`` has the paths of files that were read, below ``root``: ``owner/name/file``."""

    root: Path
    fetched: set[str]

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, whole: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) > 3:
            folder = self.root.joinpath(*parts[2:4])
            files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
            entries = [{"type": "file", "path": file, "size": 1, "oid": SHA} for file in files]
            about = {"id": "/".join(parts[2:4]), "sha": SHA, "siblings": [{"rfilename": file} for file in files]}
            self._send(json.dumps(entries if parts[4] == "tree" else about).encode(), whole)
            return
        file = "/".join((*parts[:2], *parts[4:]))  # owner/name/resolve/revision/file
        if not (self.root / file).is_file():
            self.send_error(404)
            return
        if whole:
            self.fetched.add(file)
        self._send((self.root / file).read_bytes(), whole)

    def _send(self, content: bytes, whole: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if whole:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(root: Path, cache: Path) -> Iterator[set[str]]:
    """Serves the models ``root/owner/name`` to the hub's client; gives the files that it fetched so far."""
    fetched: set[str] = set()
    handler = type("Handler", (_Handler,), {"root": root, "fetched": fetched})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    real, listing = huggingface_hub.snapshot_download, huggingface_hub.HfApi(endpoint).list_repo_files

    def client(source: str, cache_dir: Path | None = None, **options: Any) -> str:
        return str(real(source, endpoint=endpoint, cache_dir=cache_dir or cache, **options))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(huggingface_hub, "snapshot_download", client)
            patch.setattr(huggingface_hub, "list_repo_files", listing)
            yield fetched
    finally:
        server.shutdown()
        server.server_close()
