"""Chat messages into prompt text, by the model's own Jinja templates."""

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
from specexport.contract.manifest import DEFAULT_TEMPLATE
from specexport.contract.values import is_sequence, require_text, shown

Message = Mapping[str, Any]
"""``role`` and ``content`` (text, or parts of text), and whatever else the template knows: what JSON can say."""
TOOL_USE = "tool_use"
"""Name of the template that is used where there are tools, if the model has it."""
SECONDS = 5.0
"""Most that a conversation may take."""
_STARTING = 60.0
_TEXTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that hold text."""
_PROGRAM = Path(__file__).with_name("chat_process.py")


class ChatTemplate:
    """A model's chat template, or several by name, run as transformers runs them.

    They come with the bundle, so they are not trusted: Jinja's sandbox keeps them from Python's internals, and a
    process of their own, which starts with the first conversation, bounds its time and its memory. Safe to use from
    several threads.
    """

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = {DEFAULT_TEMPLATE: sources} if isinstance(sources, str) else dict(sources)
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def source(self, name: str | None = None, *, tools: bool = False) -> str:
        """The template of a name, or the one for conversations with or without tools.

        Raises:
            RequestError: there is no such template.
        """
        return self._sources[self._chosen(name, tools)]

    def _chosen(self, name: str | None, tools: bool) -> str:
        usual = (TOOL_USE, DEFAULT_TEMPLATE) if tools else (DEFAULT_TEMPLATE,)
        for known in usual if name is None else (name,):
            if known in self._sources:
                return known
        there = ", ".join(sorted(self._sources))
        raise RequestError(
            f"chat_template is {name!r}; expected one of the model's: {there}"
            if name is not None
            else f"chat_template: the model has several and none is the default; name one of {there}",
            param="chat_template",
        )

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        name: str | None = None,
    ) -> str:
        """The prompt's text, special tokens included.

        A template gets each message's content in the form that it reads: text, or parts ``{"type": "text", "text":
        ...}``, which are joined by line ends where it reads text alone.

        Args:
            messages: the conversation.
            variables: others that the template knows. As requests name them, they are never a call's arguments.
            add_generation_prompt: whether what introduces the model's answer comes last.
            name: of the template; None for ``tool_use`` where the variables have ``tools`` and there is such a
                template, else ``default``.

        Raises:
            RequestError: there is no such template, it refuses the messages, fails on them or takes too long, a message
                is no text, or a variable has a name that is taken.
            BundleError: it is not a template.
        """
        if not is_sequence(messages):
            raise RequestError(
                f"messages is {shown(messages)}; expected a list of mappings with role and content", param="messages"
            )
        others = dict(variables or {})
        chosen = self._chosen(name, others.get("tools") is not None)
        if not messages:
            raise RequestError("messages: there are none; expected one or more", param="messages")
        given = {
            **self._special_tokens,
            "messages": [_plain(at, message) for at, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = json.dumps([chosen, given, others])
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages: not what JSON can say: {error}", param="messages") from error
        _require_texts({"messages": given["messages"], **others}, "", None)
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
        if _said(process, json.dumps(self._sources), _STARTING) is None:
            raise RequestError(f"messages: {sys.executable} does not run the chat template's process", param="messages")
        return process


def _plain(at: int, message: Message) -> dict[str, Any]:
    """A message without what is None, as transformers has it, and whose parts are those that templates know.

    Raises:
        RequestError: it is no mapping, or has a part that is no text.
    """
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages.{at} is {type(message).__name__}; expected a mapping with role and content", param="messages"
        )
    known = {name: value for name, value in message.items() if value is not None}
    if isinstance(content := known.get("content", ""), (list, tuple)):
        known["content"] = [_part(f"messages.{at}.content.{index}", part) for index, part in enumerate(content)]
    elif not isinstance(content, str):
        raise RequestError(
            f"messages.{at}.content is {shown(content)}; expected a text, or a list of parts", param="messages"
        )
    return known


def _require_texts(value: Any, place: str, param: str | None) -> None:
    """Refuses half characters anywhere in what JSON can say."""
    if isinstance(value, str):
        require_text(value, place, param)
    elif isinstance(value, (Mapping, list, tuple)):
        for key, held in value.items() if isinstance(value, Mapping) else enumerate(value):
            inside = f"{place}.{key}" if place else str(key)
            _require_texts(held, inside, param or inside)
            _require_texts(key, f"a key of {place or 'chat_template_kwargs'}", param)


def _part(place: str, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return {**part, "type": "text"}
    expected = "{'type': 'text', 'text': '...'}; models read text alone here"
    raise RequestError(f"{place}: a part of the type {str(kind)[:50]!r}; expected {expected}", param="messages")


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
