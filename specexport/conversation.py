"""A conversation: turns, of which a model reads as many of the last ones as its context holds."""

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
    """Turns with a model, put into words by its chat template. The prefix cache keeps what was read for earlier turns.

    Where the turns outgrow the context, the model stops reading the first ones. The prompt then begins elsewhere and is
    read anew, so they are left out until it takes half of the context: the next turns find it in the cache again.

    Attributes:
        frontend: answers.
        params: how it samples.
        speculative: how it speculates; None for the frontend's default.
        system: the system prompt; empty for none.
        turns: questions and their answers.
        unread: how many of the first turns the model does not read any more.

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
        """All of it."""
        return self._messages(0)

    def instruct(self, system: str) -> None:
        """Sets the system prompt, for the answers that follow.

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
        """Forgets the turns, not the system prompt."""
        self.turns.clear()
        self.unread = 0

    def stream(self, question: str) -> Stream:
        """The answer to a question; :meth:`add` makes both a turn.

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
        """The tokens of what the model reads, and how many turns it does not."""
        context = self.frontend.max_model_len
        limit = context - min(context // 4, self.params.max_tokens or context)  # leaves an answer some room
        last = len(self.turns) - 1
        for unread in range(self.unread, len(self.turns)):
            with contextlib.suppress(ContextLengthError):
                tokens = self.frontend.chat_tokens(self._messages(unread, question))
                if len(tokens) <= (limit if unread in (self.unread, last) else context // 2):
                    return tokens, unread
        return self.frontend.chat_tokens(self._messages(last + 1, question)), last + 1

    def _messages(self, unread: int, question: str | None = None) -> list[Message]:
        said = [("system", self.system)] if self.system else []
        for asked, answer in self.turns[unread:]:
            said += [("user", asked), ("assistant", answer)]
        said += [] if question is None else [("user", question)]
        return [{"role": role, "content": content} for role, content in said]
