"""Declares the options of a struct as flags and reads them; ``--method`` and its short forms."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.methods import (
    Flag,
    MethodOptions,
    known,
    method_type,
    options_type,
    parse_method,
    read_method,
)
from specexport.contract.options import REQUIRED, Option, Options, checked, dashed, options

O = TypeVar("O", bound=Options)
_Values = list[tuple[str, Any]]
"""``--method`` and its short forms with their values, in the order of the command line; the first is the default."""


class UsageError(SpecExportError):
    """A flag has a wrong value; ends the command with status 2, like argparse's errors."""


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """Turns errors about options into usage errors."""
    try:
        yield
    except SpecExportError as error:
        raise UsageError(str(error), param=error.param) from error


def add_flags(
    parser: argparse.ArgumentParser,
    kind: type[Options],
    names: Collection[str] | None = None,
    *,
    group: str | None = None,
    unset: Mapping[str, str] | None = None,
    **help: str,
) -> None:
    """Declares a flag for each option, under its heading. Flags that are not given are not in the namespace.

    Args:
        parser: the command's parser.
        kind: the struct of options.
        names: the options that get a flag; None for all.
        group: heading of all flags, instead of the options' own headings.
        unset: default values in words, by option, if they differ from the struct's.
        help: help texts by option, if they differ from the struct's; they may state a default.
    """
    for name, option in options(kind).items():
        if (names is None or name in names) and not option.about.get("hidden"):
            text = (unset or {}).get(name, option.default_text)
            _add(group_of(parser, group or option.about.get("group")), option, help.get(name, option.help), text)


def flag_values(
    kind: type[Options], arguments: argparse.Namespace, names: Collection[str] | None = None
) -> dict[str, Any]:
    """The options that the command line sets, of all or of ``names``."""
    declared = options(kind)
    chosen = declared.keys() if names is None else declared.keys() & names
    values = {name: getattr(arguments, name) for name in declared if name in chosen and hasattr(arguments, name)}
    with _usage():
        checked(kind, values, lambda name: flag(declared[name]))
    return values


def from_flags(kind: type[O], arguments: argparse.Namespace, **others: Any) -> O:
    """The options that a command line asks for; ``others`` are fields without a flag."""
    values = flag_values(kind, arguments, options(kind).keys() - others.keys())
    with _usage():
        return kind(**values, **others)


def flag(option: Option) -> str:
    """The name of an option on the command line."""
    if option.about.get("positional"):
        return str(option.about["metavar"])
    return dashed(f"no_{option.name}" if option.default is True else option.name)


def group_of(parser: argparse.ArgumentParser, heading: str | None) -> argparse._ActionsContainer:
    """The parser's group with a heading, created if needed; a description may follow the heading after a colon."""
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
        parse = about.get("parse", str if option.kind is object else option.kind)
        how |= {"type": _usage()(parse) if "parse" in about else parse, "metavar": about["metavar"]}
        if option.choices and about["metavar"] is None:
            how["choices"] = option.choices
        elif option.choices:
            help += f": {', '.join(map(str, option.choices))}"
        if option.several and "parse" not in about:
            how |= {"action": "append"} if about.get("repeat") else {"nargs": "+"}
        if about.get("once"):
            how["action"] = _Once
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


class _Once(argparse.Action):
    """Stores a value and refuses a second one; argparse would silently drop the first."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise argparse.ArgumentError(self, "it was given twice; give it once")
        setattr(namespace, self.dest, values)


class _AppendInOrder(argparse.Action):
    """Appends the flag with its value, so that different flags keep their order."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        earlier: _Values = list(getattr(namespace, self.dest) or ())
        namespace.__dict__[self.dest] = [*earlier, (self.option_strings[0], self.const if values == [] else values)]


def _flags() -> list[tuple[str, Flag]]:
    return [(name, flag) for name in known() if (flag := options_type(method_type(name)).flag) is not None]


def add_method_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares ``--method``, its short forms and their common flags; returns their group."""
    group = parser.add_argument_group("methods", "the first is the default; requests may choose others by name")
    group.add_argument(
        "--method",
        action=_AppendInOrder,
        dest="methods",
        metavar="NAME[:VALUE][,key=value]",
        help=f"{', '.join(known())}; VALUE sets the main key; a key given twice has two values. The flags below are "
        "short forms (default: none; draft tokens are then looked up in the text)",
    )
    for _, flag in _flags():
        if flag.key is None:
            group.add_argument(flag.name, action=_AppendInOrder, dest="methods", nargs=0, const=True, help=flag.help)
        else:
            optional: dict[str, Any] = {"nargs": "?", "const": flag.const} if flag.const is not None else {}
            group.add_argument(
                flag.name, action=_AppendInOrder, dest="methods", metavar=flag.metavar, help=flag.help, **optional
            )
    group.add_argument(
        "--num-speculative-tokens",
        type=_draft_tokens,
        metavar="K[,K...]",
        help="draft tokens per step of methods without their own number, as a chain or the best tree of that size; the "
        "first of several is the default (default: the method's own)",
    )
    group.add_argument(
        "--tree",
        action="append",
        default=[],
        metavar="FILE_OR_PRESET",
        help="token tree for methods that fill any tree: a JSON file or the name of a preset; repeatable, the first is "
        "the default (default: the method's own)",
    )
    return group


@_usage()
def asked_methods(arguments: argparse.Namespace) -> tuple[MethodOptions, ...]:
    """The methods that a command line asks for."""
    flags = {flag.name: (name, flag) for name, flag in _flags()}
    last = dict(arguments.methods or ())
    claimed = {other for option in last if option in flags for other in flags[option][1].claims or {}}
    values = [(option, value) for option, value in arguments.methods or () if option not in claimed]
    named = [value.partition(":")[0] for option, value in values if option == "--method"]
    short = [flags[option][0] for option, _ in values if option in flags]
    if repeated := next((name for name in named if named.count(name) > 1 or name in short), None):
        raise BuildError(
            f"--method {repeated}: it was given twice; give all its keys at once, {repeated}:key=value,..."
        )
    methods: dict[str, MethodOptions] = {}
    for option, value in values:
        method = parse_method(value) if option == "--method" else _short_form(*flags[option], value, last)
        methods[method.name] = method
    return _with_common_options(list(methods.values()), arguments.num_speculative_tokens, arguments.tree)


def _short_form(name: str, flag: Flag, value: Any, values: Mapping[str, Any]) -> MethodOptions:
    """The method of a short form, given its value and the ``values`` of flags that belong to it."""
    mapping = {"method": name} | ({} if flag.key is None else {flag.key: value})
    for other, key in (flag.claims or {}).items():
        if other not in values:
            raise BuildError(f"{flag.name} was given without {other}; give both")
        mapping[key] = values[other]
    return read_method(mapping, flag.name, strict=False)


def _with_common_options(
    methods: Sequence[MethodOptions], sizes: tuple[int, ...] | None, trees: Sequence[str]
) -> tuple[MethodOptions, ...]:
    """The methods with ``--num-speculative-tokens`` and ``--tree``."""
    if (sizes or trees) and not methods:
        flag = "--num-speculative-tokens" if sizes else "--tree"
        raise BuildError(f"{flag} was given without a method; nothing would propose those tokens")
    if sizes and all(method_type(method.name).own_widths for method in methods):
        raise BuildError(
            "--num-speculative-tokens was given, but the methods set it by options of their own "
            f"({', '.join(m.name for m in methods)})"
        )
    complete: list[MethodOptions] = []
    widest = max((method_type(method.name).branching for method in methods), default=0)
    if trees and not widest:
        raise BuildError(f"--tree was given, but no method proposes trees ({', '.join(m.name for m in methods)})")
    for method in methods:
        mapping: dict[str, Any] = {}
        if sizes and not method.sizes and not method_type(method.name).own_widths:
            mapping["num_speculative_tokens"] = sizes if len(sizes) > 1 else sizes[0]
        if trees and method_type(method.name).branching == widest and not method.trees:
            mapping["trees"] = list(trees)
        complete.append(_with_keys(method, mapping))
    return tuple(complete)


def _with_keys(method: MethodOptions, keys: dict[str, Any]) -> MethodOptions:
    """The method with the values of flags for several methods."""
    if not keys:
        return method
    flags = {"num_speculative_tokens": "--num-speculative-tokens", "trees": "--tree"}
    where = " ".join(flag for key, flag in flags.items() if key in keys)
    return read_method({"method": method.name, **msgspec.structs.asdict(method), **keys}, where)


def _draft_tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, or several separated by commas") from None
