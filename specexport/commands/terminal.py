"""A terminal, or a pipe, for chats: reads messages, and writes answers and notices."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specexport.contract.errors import RequestError
from specexport.contract.folders import write_file
from specexport.contract.values import require_text
from specexport.tables import Styled, Table, understands_escapes, uses_colours

_PROMPT, _CONTINUED = "> ", ". "
_BLOCK = '"""'
_HISTORY_SIZE = 1000
"""Maximum number of messages in the history."""
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Visible symbols for control characters: a model's output must not move the cursor or set the window's title."""

Read = Callable[[str], str]
"""Shows a prompt and reads a line or several. Raises EOFError at the end of the input."""
Remember = Callable[[str], None]
"""Adds a message to the history that arrow keys show."""


def read_message(read: Read) -> str:
    r"""Reads a message: the input up to Enter, all lines between two \"\"\", or lines continued by backslashes.

    Raises:
        EOFError: the input has ended.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    text = read(_PROMPT)
    with contextlib.suppress(EOFError):  # the next read raises it again
        if text.lstrip().startswith(_BLOCK):
            text = text.lstrip().removeprefix(_BLOCK)
            while _BLOCK not in text:
                text += "\n" + read(_CONTINUED)
            return text.replace(_BLOCK, "").strip("\n")
        while text.endswith("\\"):
            text = text[:-1] + "\n"
            text += read(_CONTINUED)
    return text


def from_standard_input(read: Callable[[], str]) -> str:
    """Reads text from standard input."""
    try:
        text = read()
    except UnicodeDecodeError as error:
        byte, encoding = error.object[error.start], error.encoding.upper()
        raise RequestError(
            f"standard input: the byte 0x{byte:02x} is not {encoding}; send text in {encoding}"
        ) from error
    require_text(text, "standard input")
    return text


class Terminal:
    """A terminal for a conversation. Answers go to standard output, everything else to standard error.

    Attributes:
        interactive: whether messages are typed; otherwise they are lines of a pipe or a file.

    Args:
        history: file that stores messages for later sessions; None for none.
        words: completions at the start of a message.
    """

    def __init__(self, history: Path | None = None, words: Sequence[str] = ()) -> None:
        self.interactive = sys.stdin.isatty()
        self.underlines = understands_escapes() and sys.stdout.isatty()
        self._coloured = uses_colours(sys.stderr)
        self._plain = sys.stdout.isatty()
        self._read: Read = _read_pipe
        if self.interactive:
            self._history = _History(history)
            editable = self.underlines and importlib.util.find_spec("prompt_toolkit") is not None
            earlier = self._history.messages
            self._read, self._remember = _editor(earlier, words) if editable else _line_reader(earlier)
            if self.underlines and not editable:
                self.notice("A line editor with completion comes with: pip install 'specexport[chat]'")

    def message(self) -> str:
        """The next message, which joins the history as a whole if it was typed."""
        text = read_message(self._read)
        if self.interactive and text.strip():
            self._remember(text)
            self._history.add(text)
        return text

    def write(self, text: str, *, underlined: bool = False) -> None:
        """Writes a part of an answer."""
        shown = text.translate(_VISIBLE) if self._plain else text
        if underlined and shown:
            shown = f"\x1b[4m{shown}\x1b[24m" if self.underlines else f"[{shown}]"
        sys.stdout.write(shown)
        sys.stdout.flush()

    def notice(self, *parts: str | Styled | Table) -> None:
        """Writes anything but answers, to standard error."""
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
        for part in parts:
            shown = Styled(part, "dim") if isinstance(part, str) else part
            print(shown.render(width, self._coloured), file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def interrupting(self, stop: Callable[[], object]) -> Iterator[Callable[[], bool]]:
        """Makes Ctrl-C call ``stop`` if messages are typed; yields a function that tells whether it was pressed."""
        pressed = False

        def press(*_: object) -> None:
            nonlocal pressed
            pressed = True
            stop()

        before: Any = signal.signal(signal.SIGINT, press) if self.interactive else None
        try:
            yield lambda: pressed
        finally:
            if self.interactive:
                signal.signal(signal.SIGINT, before)


class _History:
    """The messages of earlier sessions, in a file with a JSON string per line that only the user can read."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.messages: list[str] = []
        if path is None:
            return
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = path.read_text(encoding="utf-8").splitlines()
            for line in lines[-_HISTORY_SIZE:]:
                with contextlib.suppress(ValueError):  # an incomplete line, after a full disk
                    self.messages.append(str(json.loads(line)))
            if len(lines) > 2 * _HISTORY_SIZE:
                write_file(path, "".join(f"{line}\n" for line in lines[-_HISTORY_SIZE:]).encode())

    def add(self, message: str) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # a session works without its history
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(file, "a", encoding="utf-8") as written:
                written.write(json.dumps(message) + "\n")


def _read_pipe(_: str) -> str:
    line = from_standard_input(sys.stdin.readline)
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def _line_reader(earlier: Sequence[str]) -> tuple[Read, Remember]:
    """Python's ``input``, with readline if it is available, and what adds a message to readline's history."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(False)  # it would add the lines of a message one by one

    def remember(message: str) -> None:
        with contextlib.suppress(ImportError, UnicodeEncodeError):  # in a locale without the message's characters
            import readline

            readline.add_history(message)

    for message in earlier:
        remember(message)

    def read(prompt: str) -> str:
        if not sys.stdout.isatty():  # input() would write the prompt to standard output
            print(prompt, end="", file=sys.stderr, flush=True)
            return _read_pipe(prompt)
        try:
            return input(prompt)
        except KeyboardInterrupt:
            print()
            raise

    return read, remember


def _editor(earlier: Sequence[str], words: Sequence[str]) -> tuple[Read, Remember]:
    """prompt_toolkit's editor: Enter sends, Alt-Enter begins a line, Ctrl-C clears the input; and its history."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    class Messages(InMemoryHistory):
        """Whole messages, instead of each input."""

        def append_string(self, string: str) -> None:
            """Ignores an input, which may be a line of a message."""

        def remember(self, message: str) -> None:
            super().append_string(message)

    history = Messages(earlier)
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=history,
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
        key_bindings=keys,
        multiline=True,
        prompt_continuation=_CONTINUED,
    )

    @keys.add("c-c", filter=Condition(lambda: bool(session.default_buffer.text)))
    def _clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return session.prompt, history.remember
