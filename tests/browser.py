"""A headless Chromium, driven over its DevTools protocol's pipe: JSON messages that end with a zero byte."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_DEADLINE = 60.0


class Browser:
    """One tab of a browser.

    Attributes:
        asked: the URLs it asked for.
        complaints: what it logged as errors: exceptions, what its content security policy blocked, failed loads.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._ids = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.asked: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a command of the protocol answers."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._back, 1 << 16)
            assert part, "the browser ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        return message

    def open(self, url: str) -> None:
        """Goes to a page and waits until it is there."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + _DEADLINE
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}; {self.complaints}"
            time.sleep(0.05)

    def press(self, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
        """Presses a key; ``code`` is its virtual key code, ``modifiers`` 2 for Ctrl and 8 for Shift."""
        for kind in ("keyDown", "keyUp"):
            details = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            self.call("Input.dispatchKeyEvent", **details, **({"text": text} if kind == "keyDown" and text else {}))

    def hover(self, selector: str) -> None:
        """Moves the mouse onto an element."""
        script = (
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.scrollIntoView(); "
            "const box = one.getClientRects()[0]; return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        x, y = self.run(script)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shape(self, width: int, height: int, *, mobile: bool = False, dark: bool = False) -> None:
        """Gives the page a size, in CSS pixels, and the colours its reader prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[colours])

    def screenshot(self) -> bytes:
        """What is to be seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A headless Chromium with a new profile."""
    assert CHROMIUM is not None
    (read, to), (back, write) = os.pipe(), os.pipe()

    def pipes() -> None:  # the protocol's are 3 and 4; ours may have these numbers themselves
        spare = [os.dup2(pipe, 60 + at) for at, pipe in enumerate((read, write))]
        for at, pipe in enumerate(spare):
            os.dup2(pipe, 3 + at)

    flags = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars", "no-first-run")
    words = [CHROMIUM, *(f"--{flag}" for flag in flags), "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    nothing: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(words, preexec_fn=pipes, close_fds=False, **nothing)
    os.close(read)
    os.close(write)
    try:
        window = Browser(to, back)
        yield window
        with contextlib.suppress(AssertionError, OSError):  # it may be gone before it answers
            window.call("Browser.close")
    finally:
        os.close(to)
        os.close(back)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
