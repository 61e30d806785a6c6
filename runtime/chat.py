"""Chat messages into prompt text, by the model's own Jinja template."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specexport.contract.errors import BundleError, RequestError
from specexport.runtime.values import is_sequence, shown

Message = Mapping[str, Any]
"""``role`` and ``content`` (text), and whatever else the template knows: what JSON can say."""
SECONDS = 5.0
"""Most that a conversation may take."""
_STARTING = 60.0
_PROGRAM = Path(__file__).with_name("chat_process.py")


class ChatTemplate:
    """A model's chat template, run as transformers runs it.

    It comes with the bundle, so it is not trusted: Jinja's sandbox keeps it from Python's internals, and a process of
    its own, which starts with the first conversation, bounds its time and its memory. Safe to use from several threads.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, special tokens included.

        Args:
            messages: the conversation.
            variables: others that the template knows. As requests name them, they are never a call's arguments.
            add_generation_prompt: whether what introduces the model's answer comes last.

        Raises:
            RequestError: the template refuses the messages, fails on them or takes too long, or a variable has a name
                that is taken.
            BundleError: it is not a template.
        """
        if not is_sequence(messages) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError(
                f"messages is {shown(messages)}; expected a list of mappings with role and content", param="messages"
            )
        given = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = json.dumps([given, dict(variables or {})])
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages: not what JSON can say: {error}", param="messages") from error
        with self._lock:
            match self._answer(line):
                case {"text": str(text)}:
                    return text
                case {"taken": name}:
                    raise RequestError(
                        f"chat_template_kwargs: {name} is set already, and is not a request's to set; leave it out",
                        param="chat_template_kwargs",
                    )
                case {"invalid": why}:
                    raise BundleError(f"the chat template is not valid Jinja: {why}")
                case {"refused": why}:
                    raise RequestError(f"messages: the model's chat template refuses them: {why}", param="messages")
                case {"failed": why}:
                    raise RequestError(f"messages: the model's chat template fails on them: {why}", param="messages")
        raise RequestError(
            f"messages: the model's chat template does not end within {SECONDS:g} seconds on them, or takes too much "
            "memory; it was stopped",
            param="messages",
        )

    def _answer(self, line: str) -> Any:
        """What the process says to a line; None where it said nothing, and was ended."""
        if self._process is None:
            self._process = self._started()
        said = _said(self._process, line, SECONDS)
        if said is None:
            self._process = None
        return said

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for us alone
            )
        except OSError as error:
            raise RequestError(f"messages: no process for the chat template: {error}", param="messages") from error
        weakref.finalize(self, _end, process)
        if _said(process, json.dumps(self.source), _STARTING) is None:
            raise RequestError(f"messages: {sys.executable} does not run the chat template's process", param="messages")
        return process


def _said(process: subprocess.Popen[bytes], line: str, seconds: float) -> Any:
    """A process' answer to a line; it is ended if that takes longer."""
    assert process.stdin is not None
    assert process.stdout is not None
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    try:
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if answer.endswith(b"\n"):
                return json.loads(answer)
    finally:
        limit.cancel()
    _end(process)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, whatever it is doing."""
    process.kill()
    with contextlib.suppress(OSError):
        process.communicate()
