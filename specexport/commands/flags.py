"""Declares the options of a struct as flags and reads them; ``--method`` and its short forms."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

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
from specexport.contract.options import REQUIRED, Option, Options, checked, dashed, option, options

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
        names: the options that get a flag; None for all.
        group: heading of all flags, instead of the options' own headings.
        unset: default values in words, by option, if they differ from the struct's.
        help: help texts by option, if they differ from the struct's; they may state a default.
    """
    for name, declared in options(kind).items():
        if (names is None or name in names) and not declared.about.get("hidden"):
            text = (unset or {}).get(name, declared.default_text)
            _add(group_of(parser, group or declared.about.get("group")), declared, help.get(name, declared.help), text)


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


def _draft_tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, or several separated by commas") from None


class _CommonOptions(Options, frozen=True, kw_only=True):
    """Options that the methods share.

    Attributes:
        num_speculative_tokens: draft tokens per step of methods without their own number, as a chain or the best tree
            of that size; the first of several is the default (default: the method's own).
        tree: token tree for methods that fill any tree: a JSON file or the name of a preset; the first is the default
            (default: the method's own).
    """

    num_speculative_tokens: Annotated[tuple[int, ...], option("K[,K...]", parse=_draft_tokens)] = ()
    tree: Annotated[tuple[str, ...], option("FILE_OR_PRESET", repeat=True)] = ()


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares ``--method``, its short forms and their common flags."""
    heading = "methods: the first is the default; requests may choose others by name"
    group = group_of(parser, heading)
    group.add_argument(
        "--method",
        action=_AppendInOrder,
        dest="methods",
        metavar="NAME[:VALUE][,key=value]",
        help=f"{', '.join(known())}; VALUE sets the main key; a key given twice has two values. The flags below are "
        "short forms (default: none; draft tokens are then looked up in the text)",
    )
    for _, flag in _flags():
        how: dict[str, Any] = {"metavar": flag.metavar}
        if flag.key is None:
            how = {"nargs": 0, "const": True}
        elif flag.const is not None:
            how |= {"nargs": "?", "const": flag.const}
        group.add_argument(flag.name, action=_AppendInOrder, dest="methods", help=flag.help, **how)
    add_flags(parser, _CommonOptions, group=heading)


@_usage()
def requested_methods(arguments: argparse.Namespace) -> tuple[MethodOptions, ...]:
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
    for name, value in values:
        method = parse_method(value) if name == "--method" else _short_form(*flags[name], value, last)
        methods[method.name] = method
    return _with_common_options(list(methods.values()), from_flags(_CommonOptions, arguments))


def _short_form(name: str, flag: Flag, value: Any, values: Mapping[str, Any]) -> MethodOptions:
    """The method of a short form, given its value and the ``values`` of flags that belong to it."""
    mapping = {"method": name} | ({} if flag.key is None else {flag.key: value})
    for other, key in (flag.claims or {}).items():
        if other not in values:
            raise BuildError(f"{flag.name} was given without {other}; give both")
        mapping[key] = values[other]
    return read_method(mapping, flag.name, strict=False)


def _with_common_options(methods: Sequence[MethodOptions], common: _CommonOptions) -> tuple[MethodOptions, ...]:
    """The methods with the options that they share."""
    sizes, trees = common.num_speculative_tokens, common.tree
    kinds, names = [method_type(method.name) for method in methods], ", ".join(method.name for method in methods)
    widest = max((kind.branching for kind in kinds), default=0)
    if (sizes or trees) and not methods:
        flag = "--num-speculative-tokens" if sizes else "--tree"
        raise BuildError(f"{flag} was given without a method; nothing would propose those tokens")
    if sizes and all(kind.own_widths for kind in kinds):
        raise BuildError(
            f"--num-speculative-tokens was given, but the methods set it by options of their own ({names})"
        )
    if trees and not widest:
        raise BuildError(f"--tree was given, but no method proposes trees ({names})")
    complete: list[MethodOptions] = []
    for method, kind in zip(methods, kinds, strict=True):
        keys: dict[str, Any] = {"method": method.name, **msgspec.structs.asdict(method)}
        flags = []
        if sizes and not method.sizes and not kind.own_widths:
            keys["num_speculative_tokens"] = sizes if len(sizes) > 1 else sizes[0]
            flags.append("--num-speculative-tokens")
        if trees and kind.branching == widest and not method.trees:
            keys["trees"] = list(trees)
            flags.append("--tree")
        complete.append(read_method(keys, " ".join(flags)) if flags else method)
    return tuple(complete)
