"""``specexport chat``: a conversation at a terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from specexport.commands import SAMPLING, add_engine, add_sampling, add_speculation, engine_flags, speculation
from specexport.commands.flags import add_flags, flag_values, from_flags
from specexport.commands.run import describe
from specexport.commands.terminal import Terminal
from specexport.contract.errors import ContextLengthError, RequestError, SpecExportError
from specexport.contract.folders import expanded, write_file
from specexport.contract.options import Options, option
from specexport.contract.values import counted
from specexport.frontend import Frontend
from specexport.runtime import SamplingParams, Stats, Stream
from specexport.runtime.chat import Message
from specexport.runtime.machine import cache_folder
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.tables import Styled, Table

_AUTO, _PLAIN = "auto", "plain"
"""Names of the default and of plain decoding in ``/method``."""
_COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?$", re.DOTALL)
"""Commands; messages that begin with a path or a space are none."""


@dataclass
class Conversation:
    """A conversation with a model, formatted by its chat template. The prefix cache keeps the rows of earlier turns.

    When the conversation outgrows the context, its first turns are left out. The prompt then has another prefix and is
    read again, so enough turns are left out to halve it: later turns can then use the cache again.

    Attributes:
        speculative: how to speculate; None for the frontend's default.
        unread: number of first turns that the model no longer reads.
    """

    frontend: Frontend
    params: SamplingParams
    speculative: Speculative | None = None
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    unread: int = 0

    def __post_init__(self) -> None:
        self.instruct(self.system)

    @property
    def messages(self) -> list[Message]:
        return self._messages(0)

    def instruct(self, system: str) -> None:
        """Sets the system prompt of the following answers, unless the chat template refuses it."""
        before, self.system = self.system, system
        try:
            self.frontend.chat_tokens(self._messages(len(self.turns), "?"))
        except RequestError:
            self.system = before
            raise

    def reset(self) -> None:
        """Removes the turns, but not the system prompt."""
        self.turns.clear()
        self.unread = 0

    def stream(self, question: str) -> Stream:
        """Streams the answer to a question; :meth:`add` appends both as a turn."""
        prompt, unread = self._prompt(question)
        (stream,) = self.frontend.streams(prompt, self.params, self.speculative)
        self.unread = unread
        return stream

    def add(self, question: str, answer: str) -> None:
        self.turns.append((question, answer))

    def _prompt(self, question: str) -> tuple[list[int], int]:
        """The tokens of the prompt, and the number of turns that it leaves out."""
        context = self.frontend.engine.max_model_len
        limit = context - min(context // 4, self.params.max_tokens or context)  # room for an answer
        last = len(self.turns) - 1
        for unread in range(self.unread, len(self.turns)):
            with contextlib.suppress(ContextLengthError):
                tokens = self.frontend.chat_tokens(self._messages(unread, question))
                if len(tokens) <= (limit if unread in (self.unread, last) else context // 2):
                    return tokens, unread
        return self.frontend.chat_tokens(self._messages(last + 1, question)), last + 1

    def _messages(self, unread: int, question: str | None = None) -> list[Message]:
        messages = [("system", self.system)] if self.system else []
        for earlier, answer in self.turns[unread:]:
            messages += [("user", earlier), ("assistant", answer)]
        messages += [] if question is None else [("user", question)]
        return [{"role": role, "content": content} for role, content in messages]


class _ChatOptions(Options, frozen=True, kw_only=True):
    """Options of ``specexport chat``.

    Attributes:
        system: system prompt (default: the template's own).
        show_drafts: underline accepted draft tokens, or put them into [brackets] without a terminal.
    """

    system: Annotated[str, option("TEXT")] = ""
    show_drafts: bool = False


def chat_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport chat``."""
    add_flags(parser, _ChatOptions)
    add_sampling(
        parser,
        length="the rest of the context",
        seed="determines the seeds of answers, the same in each session; see 'specexport run --help' (default: new "
        "seeds)",
    )
    add_speculation(parser)
    add_engine(parser)


def chat_command(arguments: argparse.Namespace) -> int:
    """Chat with a model that has a chat template.

    The speed is shown after each answer. Ctrl-C stops an answer, Ctrl-D leaves; /help lists the commands.
    In a pipe or a file, each line is a message, and so are several lines between triple double quotes; answers go to
    standard output, all else to standard error. 'run --chat' reads all of standard input as one message.

    Examples:
        specexport chat qwen3/ --system "You are a terse expert." --show-drafts
        specexport chat Qwen/Qwen3-0.6B --precision int8
        specexport chat qwen3/ < questions.txt
    """
    command, keys, options = from_flags(_ChatOptions, arguments), speculation(arguments), engine_flags(arguments)
    with closing(Frontend.open_for_chat(**options)) as frontend:
        params = frontend.engine.params(None, **flag_values(SamplingParams, arguments, SAMPLING))
        chosen = frontend.speculation(keys)
        frontend.streams([0], params, chosen)  # refuses invalid parameters before the first message
        conversation = Conversation(frontend, params, chosen, command.system)
        folder = cache_folder()
        history = None if folder is None else folder / "chat-history.jsonl"
        terminal = Terminal(history, [f"/{name}" for name in Session.commands])
        Session(conversation, terminal, command.show_drafts).run()
    return 0


class Session:
    """A conversation at a terminal.

    Attributes:
        commands: the methods of slash commands, by name. Docstrings begin with the argument of those that take one, the
            rest of the message.
    """

    def __init__(self, conversation: Conversation, terminal: Terminal, show_drafts: bool = False) -> None:
        self._conversation = conversation
        self._frontend = conversation.frontend
        self._context = self._frontend.engine.max_model_len
        self._terminal = terminal
        self._show_drafts = show_drafts
        self._method = _label(conversation.speculative or self._frontend.speculative)
        self._answers: dict[str, list[Stats]] = {}  # by method
        self._last: Stats | None = None
        self._saved: set[Path] = set()
        self._stopped = False  # by Ctrl-C; the next Ctrl-C leaves

    def run(self) -> None:
        """Reads messages and answers them until the user leaves."""
        if self._terminal.interactive:
            self._terminal.notice(
                f"{self._frontend.name}, context of {self._context} tokens. /help lists commands, Ctrl-D leaves."
            )
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Reads and handles a message; False to leave."""
        terminal = self._terminal
        try:
            message = terminal.message()
            self._stopped = False
            return self._handle(message)
        except EOFError:
            if terminal.interactive:
                print()
            return False
        except KeyboardInterrupt:
            if self._stopped or not terminal.interactive:
                raise
            terminal.notice("Ctrl-C again leaves, and so does Ctrl-D.")
            self._stopped = True
        except SpecExportError as error:
            if not terminal.interactive:
                raise
            terminal.notice(Styled(f"error: {error}", "red"))
        return True

    def _handle(self, message: str) -> bool:
        """Answers a message or runs a command; False to leave."""
        if not message.strip():
            return True
        command = _COMMAND.match(message.rstrip())
        if command is None:
            self._answer(message)
            return True
        name, argument = command[1], (command[2] or "").strip()
        called = "quit" if name in ("exit", "bye") else name
        if called not in self.commands:
            raise RequestError(f"/{name}: no such command; /help lists them, and a space before the slash sends it")
        takes, _ = _usage(self.commands[called])
        if argument and not takes:
            raise RequestError(f"/{name} {argument}: expected /{name} alone; a space before the slash sends it")
        self.commands[called](self, *([argument] if takes else []))
        return called != "quit"

    def _answer(self, question: str) -> None:
        unread = self._conversation.unread
        stream = self._conversation.stream(question)
        if self._conversation.unread > unread:
            self._terminal.notice(
                f"The conversation has outgrown the context of {self._context} tokens: the model no "
                f"longer reads its first {counted(self._conversation.unread, 'turn')}. /reset starts over."
            )
        parts: list[str] = []
        reason = None
        with self._terminal.interrupting(stream.cancel) as interrupted, stream:
            for chunk in stream:
                drafted = len(chunk.verified.path) if self._show_drafts and chunk.verified is not None else 0
                for at, piece in enumerate(chunk.pieces if drafted else [chunk.text]):
                    self._terminal.write(piece, underlined=at < drafted)
                parts.append(chunk.text)
                reason = chunk.finish_reason
        self._terminal.write("\n")
        self._conversation.add(question, "".join(parts))
        self._last = stream.stats
        self._answers.setdefault(self._method, []).append(stream.stats)
        if reason == "length":
            self._terminal.notice(self._length_notice(stream.stats))
        self._terminal.notice(("Stopped. " if interrupted() else "") + _speed(stream.stats))
        self._stopped = interrupted()

    def _length_notice(self, stats: Stats) -> str:
        if stats.output_tokens == self._conversation.params.max_tokens:
            return f"The answer ends here as it may have {counted(stats.output_tokens, 'token')} (--max-tokens)."
        return (
            f"The answer ends here as the context of {self._context} tokens is full. With the next "
            "message the model reads the last turns only; /reset starts over."
        )

    def _help(self) -> None:
        """List the commands and keys."""
        table = Table()
        for name, command in self.commands.items():
            takes, does = _usage(command)
            table.add_row(f"/{name} {takes}".rstrip(), does)
        table.add_row(
            '""" … """', "Send several lines as one message; a backslash at the end of a line continues it, too."
        )
        table.add_row("Ctrl-C", "Stop the answer; at the prompt, twice, leave. Ctrl-D leaves at once.")
        self._terminal.notice(table)

    def _system(self, text: str) -> None:
        """[TEXT]: Show the system prompt, or set it for the next answers; "" for none."""
        if text:
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
            self._conversation.instruct(text[1:-1] if quoted else text)
        self._terminal.notice(f"System prompt: {self._conversation.system or 'none but what the template may have'}")

    def _reset(self) -> None:
        """Forget the conversation, but not the system prompt."""
        self._conversation.reset()
        self._terminal.notice("The conversation starts over.")

    def _stats(self) -> None:
        """Show the costs of the last answer and how full the context is."""
        if self._last is None:
            self._terminal.notice("There is no answer yet.")
            return
        engine = self._frontend.engine
        self._terminal.notice(
            describe(self._last, engine),
            f"context     {self._last.prompt_tokens + self._last.output_tokens} of {self._context} "
            f"tokens; {counted(len(self._conversation.turns), 'turn')}, {self._conversation.unread} no longer read",
        )

    def _choose_method(self, name: str) -> None:
        """[NAME]: Choose a method of speculation, or list the methods with their speeds."""
        methods = self._frontend.engine.methods
        offered = [_AUTO, _PLAIN, *(name for name, method in methods.items() if not method.takes_hypothesis)]
        if name and name not in offered:
            raise RequestError(f"/method {name}: expected one of {', '.join(offered)}")
        if name:
            self._method = name
            special = {_AUTO: self._frontend.speculative, _PLAIN: PLAIN}
            self._conversation.speculative = special.get(name) or Speculative(method=name)
            self._terminal.notice(f"Method: {name}")
            return
        table = Table(columns=("", "method", "tokens/s", "tokens a step"), align="llr")
        for name in offered:
            stats = sum(self._answers.get(name, ()), Stats())
            speed = f"{stats.tokens_per_second:.1f}" if stats.decode_seconds else "–"
            length = f"{stats.acceptance_length:.2f}" if stats.steps else "–"
            table.add_row("*" if name == self._method else "", name, speed, length)
        self._terminal.notice(table)

    def _save(self, name: str) -> None:
        """FILE: Write the conversation as JSON, with messages as in OpenAI's API."""
        if not name:
            raise RequestError("/save: no file; expected /save FILE")
        if name[0] == name[-1] in ('"', "'"):  # as in a shell
            name = name[1:-1]
        path = expanded(name, RequestError)
        text = json.dumps({"messages": self._conversation.messages}, ensure_ascii=False, indent=2)
        try:
            foreign = path.exists() and path.resolve() not in self._saved
            if not foreign:
                write_file(path, f"{text}\n".encode())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise RequestError(f"/save {name}: {reason or error}; name another file") from error
        if foreign:
            raise RequestError(f"/save {name}: it exists already; name another file")
        self._saved.add(path.resolve())
        self._terminal.notice(f"Saved {counted(len(self._conversation.turns), 'turn')} to {path}")

    def _quit(self) -> None:
        """Leave."""

    commands: dict[str, Callable[..., None]] = {  # noqa: RUF012
        "system": _system,
        "method": _choose_method,
        "stats": _stats,
        "reset": _reset,
        "save": _save,
        "help": _help,
        "quit": _quit,
    }


def _usage(command: Callable[..., None]) -> tuple[str, str]:
    """The argument that a command takes, or nothing, and what it does."""
    takes, colon, does = (command.__doc__ or "").partition(": ")
    return (takes, does) if colon else ("", takes)


def _label(chosen: Speculative) -> str:
    return _PLAIN if chosen.plain else chosen.method or _AUTO


def _speed(stats: Stats) -> str:
    """The speed and acceptance of an answer, in words."""
    text = f"{counted(stats.output_tokens, 'token')} at {stats.tokens_per_second:.1f} a second"
    if not stats.drafted:
        return f"{text}, none of them drafted."
    return (
        f"{text}, {stats.acceptance_length:.2f} a step: {stats.accepted} of {stats.drafted} draft tokens were accepted."
    )
