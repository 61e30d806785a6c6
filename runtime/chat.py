"""Chat messages into prompt text, by the model's own Jinja template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from specexport.contract.errors import BundleError, RequestError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
"""``role`` and ``content`` (text), and whatever else the template knows."""


class ChatTemplate:
    """A model's chat template, run as transformers runs it.

    It comes with the bundle, so it is not trusted: Jinja's sandbox keeps it from Python's internals.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

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
            RequestError: the template refuses the messages or fails on them, or a variable has a name that is taken.
            BundleError: it is not a template.
        """
        import jinja2

        given = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        others = variables or {}
        taken = next((name for name in others if name in given or name in self._compiled.environment.globals), None)
        if taken is not None:
            raise RequestError(
                f"chat_template_kwargs: {taken} is set already, and is not a request's to set; leave it out",
                param="chat_template_kwargs",
            )
        try:
            return self._compiled.render({**others, **given})
        except jinja2.TemplateError as error:
            raise RequestError(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, ArithmeticError, OverflowError, RecursionError) as error:
            raise RequestError(
                f"messages: the model's chat template fails on them: {error}", param="messages"
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        # Imported here: only chats need it.
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """``{% generation %}`` marks the model's own words for training; here it changes nothing."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(f"the chat template is not valid Jinja: line {error.lineno}: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
