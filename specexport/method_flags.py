"""``--method`` and the flags that stand for it, as the registry of methods makes them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from specexport.contract.errors import BuildError
from specexport.contract.methods import (
    Flag,
    MethodOptions,
    known,
    method_type,
    options_type,
    parse_method,
    read_method,
)

_Given = list[tuple[str, Any]]
"""What of ``--method`` and the flags was given, with its value, in order: the first method is the default."""


class _Remember(argparse.Action):
    """Keeps a flag and its value in the order of the command line."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        given: _Given = list(getattr(namespace, self.dest) or ())
        namespace.__dict__[self.dest] = [*given, (self.option_strings[0], self.const if values == [] else values)]


def _flags() -> list[tuple[str, Flag]]:
    """Every flag with the name of its method."""
    return [(name, flag) for name in known() for flag in options_type(method_type(name)).flags]


def add_method_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares ``--method``, the flags that stand for it, and what they share, in a group, which is returned."""
    group = parser.add_argument_group("methods", "the first is the default; requests may choose the others by name")
    group.add_argument(
        "--method",
        action=_Remember,
        dest="methods",
        metavar="NAME[:VALUE][,key=value]",
        help=f"{', '.join(known())}; VALUE is that of the main key; a key given twice has two values. The flags below "
        "are short forms (default: none, plain decoding)",
    )
    for _, flag in _flags():
        if flag.key is None:
            group.add_argument(flag.name, action=_Remember, dest="methods", nargs=0, const=True, help=flag.help)
        else:
            optional: dict[str, Any] = {"nargs": "?", "const": flag.const} if flag.const is not None else {}
            group.add_argument(
                flag.name, action=_Remember, dest="methods", metavar=flag.metavar, help=flag.help, **optional
            )
    group.add_argument(
        "--num-speculative-tokens",
        type=_draft_tokens,
        metavar="K[,K...]",
        help="draft tokens a step of every method without a number of its own: a chain, or its best tree of that size; "
        "of several the first is the default (default: the method's own)",
    )
    group.add_argument(
        "--tree",
        action="append",
        default=[],
        metavar="FILE_OR_PRESET",
        help="token tree to verify, for the methods that fill any tree: JSON or a preset's name; repeatable, the first "
        "is the default (default: the method's own)",
    )
    return group


def asked_methods(arguments: argparse.Namespace) -> tuple[MethodOptions, ...]:
    """The methods a command line asks for.

    Raises:
        BuildError: a flag is there without the one it belongs to, or a method's options are wrong.
    """
    given: _Given = list(arguments.methods or ())
    claimed = {
        other for _, flag in _flags() for other in flag.claims or {} if any(option == flag.name for option, _ in given)
    }
    spelled = [value.partition(":")[0] for option, value in given if option == "--method"]
    beside = [name for name, flag in _flags() for option, _ in given if option == flag.name and option not in claimed]
    if doubled := next((name for name in spelled if spelled.count(name) > 1 or name in beside), None):
        raise BuildError(f"--method {doubled}: it was given twice; give all its keys at once, {doubled}:key=value,...")
    found: dict[str, MethodOptions] = {}
    for option, value in given:
        if option == "--method":
            method = parse_method(value)
        elif option in claimed:
            continue
        else:
            name, flag = next((name, flag) for name, flag in _flags() if flag.name == option)
            mapping = {"method": name} | ({} if flag.key is None else {flag.key: value})
            for other, key in (flag.claims or {}).items():
                said = [value for option, value in given if option == other]
                if not said:
                    raise BuildError(f"{option} was given without {other}, which it is for")
                mapping[key] = said[-1]
            method = read_method(mapping, option, strict=False)
        found[method.name] = method
    return _shared(list(found.values()), arguments.num_speculative_tokens, arguments.tree)


def _shared(
    methods: Sequence[MethodOptions], sizes: tuple[int, ...] | None, trees: Sequence[str]
) -> tuple[MethodOptions, ...]:
    """Gives the methods the options that are shared by all."""
    if (sizes or trees) and not methods:
        flag = "--num-speculative-tokens" if sizes else "--tree"
        raise BuildError(f"{flag} was given without a method; nothing would propose those tokens")
    if sizes and all(method_type(method.name).own_widths for method in methods):
        raise BuildError(
            f"--num-speculative-tokens was given, but the steps of {', '.join(m.name for m in methods)} follow from "
            "other options"
        )
    made: list[MethodOptions] = []
    widest = max((method_type(method.name).branching for method in methods), default=0)
    if trees and not widest:
        raise BuildError(f"--tree was given, but {', '.join(m.name for m in methods)} propose no trees")
    for method in methods:
        mapping: dict[str, Any] = {}
        if sizes and not method.sizes and not method_type(method.name).own_widths:
            mapping["num_speculative_tokens"] = sizes if len(sizes) > 1 else sizes[0]
        if trees and method_type(method.name).branching == widest and not method.trees:
            mapping["trees"] = list(trees)
        made.append(changed(method, mapping))
    return tuple(made)


def changed(method: MethodOptions, keys: dict[str, Any]) -> MethodOptions:
    """A method with other values of some keys."""
    if not keys:
        return method
    return read_method({"method": method.name, **msgspec.structs.asdict(method), **keys})


def _draft_tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number or several with commas between") from None
