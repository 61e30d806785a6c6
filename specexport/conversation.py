"""A conversation: the model reads as many of the last turns as its context holds."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from specexport.contract.errors import ContextLengthError, RequestError
from specexport.frontend import Frontend
from specexport.runtime import SamplingParams, Stream
from specexport.runtime.chat import Message
from specexport.runtime.speculative import Speculative


@dataclass
class Conversation:
    """Turns with a model, formatted by its chat template. The prefix cache keeps the rows of earlier turns.

    When the turns outgrow the context, the first ones are left out. The prompt then has another prefix and is read
    again, so as many are left out as halve it: the following turns can use the cache again.

    Attributes:
        frontend: the model.
        params: its sampling parameters.
        speculative: how it speculates; None for the frontend's default.
        system: the system prompt; empty for none.
        turns: questions and their answers.
        unread: number of first turns that the model no longer reads.

    Raises:
        RequestError: the model has no chat template, or it refuses the system prompt.
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
        """All messages."""
        return self._messages(0)

    def instruct(self, system: str) -> None:
        """Sets the system prompt, for the following answers.

        Raises:
            RequestError: the chat template refuses it.
        """
        before, self.system = self.system, system
        try:
            self.frontend.chat_tokens(self._messages(len(self.turns), "?"))
        except RequestError:
            self.system = before
            raise

    def reset(self) -> None:
        """Removes the turns, not the system prompt."""
        self.turns.clear()
        self.unread = 0

    def stream(self, question: str) -> Stream:
        """Streams the answer to a question; :meth:`add` appends both as a turn.

        Raises:
            ContextLengthError: the context does not even hold the question.
            RequestError: the chat template refuses it, or a parameter cannot be honoured.
        """
        prompt, unread = self._prompt(question)
        (stream,) = self.frontend.streams(prompt, self.params, self.speculative)
        self.unread = unread
        return stream

    def add(self, question: str, answer: str) -> None:
        """Adds a turn."""
        self.turns.append((question, answer))

    def _prompt(self, question: str) -> tuple[list[int], int]:
        """The prompt's tokens, and the number of turns that are left out."""
        context = self.frontend.max_model_len
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
