"""Renders chat messages as prompt text, by the model's Jinja templates."""

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
"""``role``, ``content`` (text, or parts of text) and other keys that the template reads; serializable as JSON."""
TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, if the model has one."""
SECONDS = 5.0
"""Time limit of rendering a conversation."""
_START_SECONDS = 60.0
"""Time limit of starting the process."""
_TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of a message's parts that hold text."""
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG"
"""Where a message is continued; transformers' word, which some templates know."""
_PROGRAM = Path(__file__).with_name("chat_process.py")


class ChatTemplate:
    """A model's chat template, or several by name, rendered as transformers renders them.

    Templates come with the bundle and are not trusted: Jinja's sandbox keeps them from Python's internals, and a
    separate process, which starts with the first conversation, bounds their time and memory. Threads may share it.
    """

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = {DEFAULT_TEMPLATE: sources} if isinstance(sources, str) else dict(sources)
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def source(self, name: str | None = None, *, tools: bool = False) -> str:
        """The template of this name, by default the one for conversations with or without tools.

        Raises:
            RequestError: there is no such template.
        """
        return self._sources[self._template_name(name, tools)]

    def _template_name(self, name: str | None, tools: bool) -> str:
        defaults = (TOOL_USE, DEFAULT_TEMPLATE) if tools else (DEFAULT_TEMPLATE,)
        for candidate in defaults if name is None else (name,):
            if candidate in self._sources:
                return candidate
        names = ", ".join(sorted(self._sources))
        raise RequestError(
            f"chat_template is {name!r}; expected one of the model's: {names}"
            if name is not None
            else f"chat_template: the model has several and none is the default; name one of {names}",
            param="chat_template",
        )

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        name: str | None = None,
    ) -> str:
        """Renders a conversation as the prompt's text, including special tokens.

        A message's content is passed in a form that the template reads: text, or parts ``{"type": "text", "text":
        ...}``, which are joined by line breaks if it reads text only. If it does not read the arguments of calls as
        objects, they are passed as JSON. Later system messages that it drops join the first one.

        Args:
            messages: the conversation.
            variables: further variables of the template; a mapping, as requests choose their names.
            add_generation_prompt: whether the prompt ends with the introduction of the model's answer.
            continue_final_message: whether the prompt ends within the last message, for the model to continue it, and
                without that introduction.
            name: the template's name; None for ``tool_use`` if the variables have ``tools`` and the model has such a
                template, else ``default``.

        Raises:
            RequestError: there is no such template; it refuses the messages, fails on them or takes too long; a message
                is not text; or a variable has a reserved name.
            BundleError: the template is not valid Jinja.
        """
        if not is_sequence(messages):
            raise RequestError(
                f"messages is {shown(messages)}; expected a list of mappings with role and content", param="messages"
            )
        extra = dict(variables or {})
        template = self._template_name(name, extra.get("tools") is not None)
        if not messages:
            raise RequestError("messages: there are none; expected one or more", param="messages")
        readable = [_readable_message(at, message) for at, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(readable[-1])
        reserved = {
            **self._special_tokens,
            "messages": readable,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            line = json.dumps([template, reserved, extra])
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages: cannot be written as JSON: {error}", param="messages") from error
        _require_texts({"messages": readable, **extra}, "", None)
        with self._lock:
            match self._exchange(line):
                case {"text": str(text)}:
                    return _until_mark(text) if continue_final_message else text
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

    def _exchange(self, line: str) -> Any:
        """Sends a line to the process, starting it if need be; returns its reply, or None if it had to be ended."""
        if self._process is not None and self._process.poll() is not None:  # the system ended it meanwhile
            _end(self._process)
            self._process = None
        if self._process is None:
            self._process = self._start()
        reply = _reply(self._process, line, SECONDS)
        if reply is None:
            self._process = None
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C must not end it
            )
        except OSError as error:
            raise RequestError(
                f"messages: the chat template's process cannot start: {error}", param="messages"
            ) from error
        weakref.finalize(self, _end, process)
        if _reply(process, json.dumps(self._sources), _START_SECONDS) is None:
            raise RequestError(f"messages: {sys.executable} does not run the chat template's process", param="messages")
        return process


def _readable_message(at: int, message: Message) -> dict[str, Any]:
    """Removes a message's null fields, as transformers does, and converts its parts to the form that templates read."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages.{at} is {type(message).__name__}; expected a mapping with role and content", param="messages"
        )
    fields = {name: value for name, value in message.items() if value is not None}
    if isinstance(content := fields.get("content", ""), (list, tuple)):
        fields["content"] = [_text_part(f"messages.{at}.content.{index}", part) for index, part in enumerate(content)]
    elif not isinstance(content, str):
        raise RequestError(
            f"messages.{at}.content is {shown(content)}; expected a text, or a list of parts", param="messages"
        )
    return fields


def _mark_end(message: dict[str, Any]) -> None:
    """Appends a mark to a message's text, and a blank that shows whether the template trims.

    Raises:
        RequestError: the message has no text.
    """
    content = message.get("content")
    if not content:
        raise RequestError(
            "continue_final_message: the last message has no content to continue", param="continue_final_message"
        )
    if isinstance(content, str):
        message["content"] = f"{content}{_END_MARK} "
    else:
        message["content"] = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_END_MARK} "}]


def _until_mark(text: str) -> str:
    """A conversation up to the mark, without white space before it if the template trims texts.

    Raises:
        RequestError: the template leaves the last message out.
    """
    before, found, after = text.rpartition(_END_MARK)
    if not found:
        raise RequestError(
            "continue_final_message: the model's chat template leaves the last message out",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _require_texts(value: Any, place: str, param: str | None) -> None:
    """Refuses lone surrogates anywhere in a JSON value."""
    if isinstance(value, str):
        require_text(value, place, param)
    elif isinstance(value, (Mapping, list, tuple)):
        for key, element in value.items() if isinstance(value, Mapping) else enumerate(value):
            path = f"{place}.{key}" if place else str(key)
            _require_texts(element, path, param or path)
            _require_texts(key, f"a key of {place or 'chat_template_kwargs'}", param)


def _text_part(place: str, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
        return {**part, "type": "text"}
    expected = "{'type': 'text', 'text': '...'}; models read text alone here"
    raise RequestError(f"{place}: a part of the type {str(kind)[:50]!r}; expected {expected}", param="messages")


def _reply(process: subprocess.Popen[bytes], line: str, seconds: float) -> Any:
    """Sends a line; returns the reply, or None if there is none in time, after ending the process."""
    assert process.stdin is not None
    assert process.stdout is not None
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    try:
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
            if reply.endswith(b"\n"):
                return json.loads(reply)
    finally:
        limit.cancel()
    _end(process)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):
        process.communicate()
