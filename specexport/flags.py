"""Structs of options as flags of the command line, and back."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from specexport.contract.options import REQUIRED, Option, Options, checked, options

O = TypeVar("O", bound=Options)


def add_flags(
    parser: argparse.ArgumentParser,
    kind: type[Options],
    names: Collection[str] | None = None,
    *,
    group: str | None = None,
    unset: Mapping[str, str] | None = None,
    **help: str,
) -> None:
    """Declares a flag for each option, under its heading. A flag that is left out is not in the namespace.

    Args:
        parser: the command's.
        kind: the options.
        names: those that get a flag; None for all.
        group: a heading for all of them, instead of those of the options.
        unset: what some of them are without their flag, where that is not the options' default.
        help: another help for some of them, perhaps with another default.
    """
    for name, option in options(kind).items():
        if (names is None or name in names) and not option.about.get("hidden"):
            text = (unset or {}).get(name, option.default_text)
            _add(group_of(parser, group or option.about.get("group")), option, help.get(name, option.help), text)


def flag_values(kind: type[Options], arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line sets."""
    return {name: getattr(arguments, name) for name in options(kind) if hasattr(arguments, name)}


def from_flags(kind: type[O], arguments: argparse.Namespace, **others: Any) -> O:
    """The options that a command line asks for; ``others`` are fields without a flag.

    Raises:
        SpecExportError: a value is out of range; names the flag.
    """
    values = {**flag_values(kind, arguments), **others}
    check_flags(kind, values)
    return kind(**values)


def check_flags(kind: type[Options], values: Mapping[str, Any]) -> None:
    """Checks values of flags, for errors that name the flag.

    Raises:
        SpecExportError: one is out of range.
    """
    defaults = {name: option.default for name, option in options(kind).items()}
    checked(kind, {**defaults, **values}, lambda name: flag(options(kind)[name]))


def flag(option: Option) -> str:
    """The name of an option on the command line."""
    if option.about.get("positional"):
        return str(option.about["metavar"])
    return f"--{'no-' if option.default is True else ''}{option.name.replace('_', '-')}"


def group_of(parser: argparse.ArgumentParser, heading: str | None) -> argparse._ActionsContainer:
    """A parser's group of a heading, which may have a text behind a colon."""
    if heading is None:
        return parser
    title, _, text = heading.partition(": ")
    existing = (group for group in parser._action_groups if group.title == title)
    return next(existing, None) or parser.add_argument_group(title, text or None)


def _add(group: argparse._ActionsContainer, option: Option, help: str, default: str) -> None:
    about, required = option.about, option.default is REQUIRED
    how: dict[str, Any] = {"default": argparse.SUPPRESS}
    if option.kind is bool:
        how |= {"action": "store_false" if option.default else "store_true"}
        help = about.get("off", help) if option.default else help
    else:
        how |= {"type": about.get("parse", str if option.kind is object else option.kind), "metavar": about["metavar"]}
        if option.choices and about["metavar"] is None:
            how["choices"] = option.choices
        elif option.choices:
            help += f": {', '.join(map(str, option.choices))}"
        if option.several and "parse" not in about:
            how |= {"action": "append"} if about.get("repeat") else {"nargs": "+"}
        if about.get("repeat"):
            help += "; repeatable"
        help += f" (default: {default})" if default and not required and "(default" not in help else ""
    how["help"] = help.replace("%", "%%")
    if about.get("positional"):
        how |= {} if required or option.several else {"nargs": "?"}
        group.add_argument(option.name, **how)
        return
    how |= {"dest": option.name, "required": required}
    group.add_argument(*filter(None, (about.get("short"), flag(option))), **how)
