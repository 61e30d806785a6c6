"""A program at a terminal: a pseudo-terminal of a size, keys that are typed, and what is to be read there."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A"
_DEADLINE = 60.0
_SEQUENCES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_=>])")


class Typed:
    """A program that believes that somebody sits at its terminal.

    Attributes:
        raw: all that it wrote, with escape sequences.
        process: it.
    """

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._bytes = b""
        self._seen = 0

    @property
    def raw(self) -> str:
        return self._bytes.decode(errors="replace")

    @property
    def text(self) -> str:
        """What it wrote, without escape sequences, with line ends as programs write them."""
        return _SEQUENCES.sub("", self.raw).replace("\r\n", "\n")

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def expect(self, expected: str) -> str:
        """Waits until it has written a text after what was expected before; gives all up to there."""
        end = time.monotonic() + _DEADLINE
        while expected not in self.text[self._seen :]:
            assert time.monotonic() < end, f"never written: {expected!r}; {self.text[self._seen :]!r}"
            assert self._more(), f"it ended without {expected!r}: {self.text[self._seen :]!r}"
        start = self._seen
        self._seen = self.text.index(expected, start) + len(expected)
        return self.text[start : self._seen]

    def interrupt(self, expected: str) -> None:
        """Types Ctrl-C until it has written a text: readline overlooks a signal just before it waits for a key."""
        last = time.monotonic() + _DEADLINE
        while expected not in self.text[self._seen :] and time.monotonic() < last:
            self.type(CTRL_C)
            end = time.monotonic() + 5.0
            while expected not in self.text[self._seen :] and time.monotonic() < end and self._more():
                pass
            if self.process.poll() is not None:
                break
        self.expect(expected)

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        end = time.monotonic() + _DEADLINE
        while self._more():
            assert time.monotonic() < end, f"it does not end: {self.text[self._seen :]!r}"
        return self.process.wait(_DEADLINE)

    def _more(self) -> bool:
        """Reads what there is, for a moment; False at the end."""
        if not select.select([self._terminal], [], [], 0.1)[0]:
            return True
        try:
            part = os.read(self._terminal, 1 << 16)
        except OSError:  # nobody has the other end any more
            return False
        self._bytes += part
        return bool(part)


def _take_terminal() -> None:
    """Makes standard input the process's terminal, whose Ctrl-C interrupts it even if the tests ignore that."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def typed(words: list[str], *, columns: int = 80, cwd: Path | None = None, **environment: str) -> Iterator[Typed]:
    """Runs ``specexport`` at a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "specexport", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=cwd,
        env=known | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"} | environment,
        preexec_fn=_take_terminal,
    )
    os.close(slave)
    try:
        yield Typed(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(master)
