"""Make docs/page.png and docs/page-chat.png: the server's page with the demo's bundle and with a chat model's."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.serving import server
from specexport.cli import HelpFormatter
from tests.browser import Browser, browser

_PROMPT = 'class Server:\n    """Handle requests."""\n\n    def __init__(self, host, port):\n'
_QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers.")
_DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Serves the bundles in turn and takes screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--demo", type=Path, default=Path("build/demo-draft-model"), metavar="BUNDLE", help="bundle of scripts/demo.py"
    )
    parser.add_argument("--chat", type=Path, default=Path("build/chat"), metavar="BUNDLE", help="bundle of 'make chat'")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="name of the chat model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as window:
        with server(arguments.demo, "--served-model-name", "demo-target", threads=2) as running:
            _open(window, running.url, 960, 1090)
            window.run("find('settings').open = false; find('prompt').rows = 5; find('beside').click()")
            window.run("find('max-tokens').value = 56; find('drafts').value = 4")
            _ask(window, _PROMPT)
            window.run("document.querySelector('.step:nth-child(4)').click()")
            (_DOCS / "page.png").write_bytes(window.screenshot())
        with server(arguments.chat, "--served-model-name", arguments.name, threads=2) as running:
            _open(window, running.url, 960, 980)
            window.run("find('temperature').value = 0")
            for question in _QUESTIONS:
                _ask(window, question)
            (_DOCS / "page-chat.png").write_bytes(window.screenshot())


def _open(window: Browser, url: str, width: int, height: int) -> None:
    window.shape(width, height)
    window.open(f"{url}/")
    window.until("find('model').textContent.includes('context of')")


def _ask(window: Browser, text: str) -> None:
    window.run(f"find('prompt').value = {json.dumps(text)}; find('run').click()")
    window.until("!aborter && find('status').textContent.startsWith('Done')")


if __name__ == "__main__":
    main()
