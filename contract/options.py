"""Options as structs: each field declares an option's type, range and default; its help is in the class docstring.

Flags (``specexport.commands.flags``), the keywords of functions, the fields of requests and the tables in ``docs/``
follow from these fields, and every value is checked against them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Signature, cleandoc, signature
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.values import plain_deep, shown

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
REQUIRED: Any = msgspec.NODEFAULT
_LIMITS = ("ge", "gt", "le", "lt", "min_length")
_DOCUMENTED = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


def option(metavar: str | None = None, **about: Any) -> Meta:
    """The metadata of a field in ``Annotated``; its help is in the class docstring.

    Args:
        metavar: the value's name in ``--help``.
        about: limits as in ``msgspec.Meta``, ``ge``, ``gt``, ``le`` and ``lt`` of numbers and ``min_length`` of texts;
            ``group``, the heading in ``--help``; ``short``, such as ``-o``; ``off``, the help of ``--no-NAME`` if the
            default is true; ``positional``; ``repeat``, for a flag that is repeated instead of taking several values;
            ``once``, for a flag that must not be repeated; ``parse``, a function that reads the flag's text;
            ``expected``, the allowed values in words, if the type says too little; ``hidden``, for an option without a
            flag; and ``unchecked``, for an option that is checked where it is used.
    """
    return Meta(extra={"metavar": metavar, **about})


@dataclass(frozen=True)
class Option:
    """An option, as its field declares it.

    Attributes:
        kind: its type, without None: ``int``, ``float``, ``bool``, ``str``, ``Path`` or ``object``; for a list, the
            type of its elements.
        default: :data:`REQUIRED` if there is none.
        default_text: the default in words; empty if there is none, or if it is a truth value.
        expected: the allowed values in words.
        about: the other arguments of :func:`option`.
    """

    name: str
    help: str
    kind: type
    several: bool
    choices: tuple[Any, ...]
    default: Any
    default_text: str
    expected: str
    about: Mapping[str, Any]

    @property
    def sentence(self) -> str:
        """The help, with the default."""
        return self.help + (f" (default: {self.default_text})" if self.default_text else "")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all options. Numbers may be NumPy's or torch's, and paths may be texts.

    Raises:
        SpecExportError: a value is of the wrong kind or out of range; names it.
    """

    @classmethod
    def refusal(cls, message: str, name: str) -> SpecExportError:
        """The error for a wrong value."""
        return BuildError(message, param=name)

    @classmethod
    def from_keywords(cls, *args: Any, **values: Any) -> Self:
        """Creates the options from a caller's arguments, whose names may be wrong."""
        unknown = next((name for name in values if name not in cls.__struct_fields__), None)
        if unknown is not None:
            raise cls.refusal(
                f"{unknown} is not an option; expected some of {', '.join(cls.__struct_fields__)}", unknown
            )
        return cls(*args, **values)

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        for name, value in checked(type(self), values).items():
            if value is not values[name]:
                msgspec.structs.force_setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Checks options against each other."""


def dashed(name: str) -> str:
    """The flag of an option: ``--batch-size`` for ``batch_size``."""
    return f"--{name.replace('_', '-')}"


def checked(kind: type[Options], values: Mapping[str, Any], spelled: Callable[[str], str] = str) -> dict[str, Any]:
    """Converts values to the types of their options; ``spelled`` maps an option's name to its spelling in errors."""
    converted = {}
    for name, value in values.items():
        option, plain = options(kind)[name], value
        try:
            plain = plain_deep(value)
            converted[name] = msgspec.convert(plain, option.about["type"], dec_hook=_path)
            if isinstance(converted[name], float) and not math.isfinite(converted[name]):
                raise ValueError
        except ValueError as error:
            raise kind.refusal(f"{spelled(name)} is {shown(plain)}; expected {option.expected}", name) from error
    return converted


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, (str, PathLike)):
        return Path(value)
    raise ValueError


@lru_cache(maxsize=64)
def options(kind: type[Options]) -> dict[str, Option]:
    """The options of a struct, by field."""
    hints, help = get_type_hints(kind, include_extras=True), dict[str, str]()
    for parent in reversed(kind.__mro__):
        documented = cleandoc(parent.__doc__ or "")  # whose indentation Python keeps up to 3.12
        help |= {name: " ".join(text.split()).rstrip(".") for name, text in _DOCUMENTED.findall(documented)}
    described = {}
    for field in msgspec.structs.fields(kind):
        about = dict((_meta(hints[field.name]) or option()).extra or {})
        limits = {limit: value for limit, value in about.items() if limit in _LIMITS}
        hint = _limited(hints[field.name], limits)
        default = field.default if field.default_factory is REQUIRED else field.default_factory()
        text, _, stated = help.get(field.name, "").partition(" (default: ")
        silent = default is REQUIRED or isinstance(default, bool) or default in (None, ())
        stated = stated.removesuffix(")") or ("" if silent else str(default).strip("(),"))
        words = about.get("expected") or expected(hint)
        shape, checked_as = _shape(hints[field.name]), Any if about.get("unchecked") else hint
        described[field.name] = Option(field.name, text, *shape, default, stated, words, about | {"type": checked_as})
    return described


def _meta(hint: Any) -> Meta | None:
    metas = getattr(hint, "__metadata__", ())
    return next((meta for meta in metas if isinstance(meta, Meta) and meta.extra is not None), None)


def _alternatives(bare: Any) -> tuple[Any, ...]:
    """The types of a union without None; empty if it is not a union."""
    union = get_origin(bare) in (Union, UnionType)
    return tuple(part for part in get_args(bare) if part is not NoneType) if union else ()


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _limited(hint: Any, limits: dict[str, Any]) -> Any:
    """A type without its option's metadata, with limits for its numbers or texts."""
    bare, metas = _bare(hint), [meta for meta in getattr(hint, "__metadata__", ()) if meta is not _meta(hint)]
    if get_origin(bare) in (Union, UnionType):
        return Union[tuple(_limited(part, limits) for part in get_args(bare))]  # noqa: UP007
    if get_origin(bare) is tuple and limits:
        return tuple[_limited(get_args(bare)[0], limits), ...]  # type: ignore[misc]
    if limits and bare is str if "min_length" in limits else limits and bare in (int, float):
        metas.append(Meta(**limits))
    for meta in metas:
        bare = Annotated[bare, meta]
    return bare


def _shape(hint: Any) -> tuple[type, bool, tuple[Any, ...]]:
    """The ``kind``, ``several`` and ``choices`` of a type; see :class:`Option`."""
    bare = _bare(hint)
    if parts := _alternatives(bare):
        shapes = list(map(_shape, parts))
        return shapes[0] if len(shapes) == 1 else (object, False, ())
    if get_origin(bare) is Literal:
        return type(get_args(bare)[0]), False, get_args(bare)
    if get_origin(bare) is tuple:
        kind, _, choices = _shape(get_args(bare)[0])
        return kind, True, choices
    return (bare if bare in _NOUNS else object), False, ()


def expected(hint: Any) -> str:
    """The allowed values of a type, in words."""
    bare = _bare(hint)
    origin, args = get_origin(bare), get_args(bare)
    if parts := _alternatives(bare):
        return " or ".join(dict.fromkeys(map(expected, parts)))
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if len(args) == 2 and origin is not tuple:
        return f"a mapping of {expected(args[0])} to {expected(args[1])}"
    if args:
        return f"a list, each {expected(args[0])}"
    ranges = (_range(bare, meta) for meta in getattr(hint, "__metadata__", ()))
    return _NOUNS.get(bare, getattr(bare, "__name__", "a value")) + "".join(ranges)


def _range(kind: type, meta: Any) -> str:
    if not isinstance(meta, Meta):
        return ""
    if meta.min_length:
        return " that is not empty"
    low = meta.ge if meta.ge is not None else meta.gt
    high = meta.le if meta.le is not None else meta.lt
    if low is not None and high is not None:
        opening, closing = "[("[meta.ge is None], "])"[meta.le is None]
        return f" in {opening}{low:g}, {high:g}{closing}" if kind is float else f" from {low} to {high}"
    if low is not None:
        return f" {'>' if meta.ge is None else '>='} {low}"
    return "" if high is None else f" {'<' if meta.le is None else '<='} {high}"


def keywords(kind: Callable[P, Any]) -> Callable[[Callable[Concatenate[S, ...], R]], Callable[Concatenate[S, P], R]]:
    """Declares that a method takes the fields of ``kind``, for type checkers, editors and ``help()``."""

    def declared(function: Callable[Concatenate[S, ...], R]) -> Callable[Concatenate[S, P], R]:
        first, *_ = signature(function).parameters.values()
        hints = get_type_hints(kind)
        fields = (field.replace(annotation=hints[name]) for name, field in signature(kind).parameters.items())
        function.__signature__ = Signature([first, *fields])  # type: ignore[attr-defined]
        lines = (f"    {option.name}: {option.sentence}" for option in options(cast(Any, kind)).values())
        function.__doc__ = "\n".join([function.__doc__ or "", "", "Args:", *lines])
        return function

    return declared
