"""The methods, a file each, by name. Packages add theirs as entry points of the group ``specexport.methods``.

An entry point names a subclass of :class:`Method`, whose ``proposer`` and ``exporter`` say where the rest of it is:
nothing but these three rooms knows a method (``docs/methods.md``).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.methods.base import (
    Flag,
    Method,
    RankedMethod,
    TextMethod,
    for_bundle,
    method_name,
    not_a_chain,
    verified_widths,
    with_trees,
)
from specexport.contract.tree import TokenTree

__all__ = [
    "Flag",
    "Method",
    "RankedMethod",
    "TextMethod",
    "decode_hook",
    "for_bundle",
    "known",
    "listed",
    "method_name",
    "method_type",
    "not_a_chain",
    "parse_method",
    "part",
    "read_method",
    "read_methods",
    "text_methods",
    "verified_widths",
    "with_trees",
]

GROUP = "specexport.methods"
_SPLIT_CONFIG = "draft_tensor_parallel_size"
_MTP = re.compile(r"[a-z0-9_]+_mtp")
"""What vLLM calls MTP by family: ``deepseek_mtp``, ``glm4_moe_mtp``, ``qwen3_next_mtp``."""


@lru_cache(maxsize=1)
def _entries() -> dict[str, EntryPoint]:
    """What installed packages offer; looking takes 20 ms and more."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@lru_cache(maxsize=1)
def known() -> tuple[str, ...]:
    """The names of all methods: those of this package, then those that other installed packages add."""
    own = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    return (*own, *sorted(name for name in _entries() if name not in own))


@lru_cache(maxsize=64)
def method_type(name: str) -> type[Method]:
    """What a method's options and its entry in the manifest are.

    Raises:
        SpecExportError: it is unknown, or what a package offers under its name is no method.
    """
    if name not in known():
        raise SpecExportError(
            f"method is {name!r}; expected one of {', '.join(known())}, or install the package that adds it"
        )
    entry = _entries().get(name)
    own = any(module.name == name for module in pkgutil.iter_modules(__path__))
    found: Any
    if own:
        module = importlib.import_module(f"{__name__}.{name}")
        kinds = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Method))
        found = next((kind for kind in kinds if kind.__struct_config__.tag == name), None)
    else:
        assert entry is not None
        try:
            found = entry.load()
        except Exception as error:  # a third party's package may raise anything
            raise SpecExportError(
                f"the entry point {name!r} of {GROUP} cannot be loaded: {type(error).__name__}: {error}; repair or "
                "uninstall its package"
            ) from error
    if not isinstance(found, type) or not issubclass(found, Method) or method_name(found) != name:
        raise SpecExportError(
            f"the entry point {name!r} of {GROUP} is {found!r}; expected a subclass of Method with tag={name!r}"
        )
    if issubclass(found, TextMethod):  # it works in bundles that do not name it, so every option needs a default
        needed = next((field.name for field in msgspec.structs.fields(found) if field.required), None)
        if needed is not None:
            raise SpecExportError(f"method {name!r} needs no graph, so {needed!r} has to have a default; give it one")
    return found


def text_methods() -> tuple[type[TextMethod], ...]:
    """Those that need no graph, and so work in every bundle."""
    return tuple(kind for kind in map(method_type, known()) if issubclass(kind, TextMethod))


def part(method: Method | type[Method], room: str) -> ModuleType:
    """A method's module in another room: ``proposer``, with ``open_proposer``, or ``exporter``, with ``EXPORTER``."""
    rooms = {"proposer": "specexport.runtime.proposers", "exporter": "specexport.exporter.methods"}
    kind = method if isinstance(method, type) else type(method)
    return importlib.import_module(getattr(kind, room) or f"{rooms[room]}.{method_name(kind)}")


def decode_hook(kind: type, given: Any) -> Any:
    """What makes msgspec read methods: to be given as ``dec_hook``."""
    name = given.get("method") if isinstance(given, dict) else None
    if not isinstance(name, str):
        raise ValueError("expected an object with the key method")
    try:
        return msgspec.convert(given, method_type(name))
    except SpecExportError as error:
        raise ValueError(str(error)) from error
    except msgspec.ValidationError as error:
        # msgspec adds where the entry is; a ValidationError it would hand on as it is.
        raise ValueError(str(error).replace(" - at `$.", " in its `")) from error


# --- as users write it ------------------------------------------------------------------------------------------------


def read_methods(
    given: Mapping[str, Any] | Method | str | Sequence[Mapping[str, Any] | Method | str],
) -> tuple[Method, ...]:
    """The methods of a ``speculative_config``: one mapping, its JSON, or several.

    Raises:
        BuildError: see :func:`read_method`.
    """
    return tuple(parse_method(one) if isinstance(one, str) else read_method(one) for one in listed(given))


def listed(given: Any) -> tuple[Mapping[str, Any] | Method | str, ...]:
    """The entries of a ``speculative_config``, which may be one of them, several, or their JSON.

    Raises:
        BuildError: it is none of these.
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise BuildError(f"speculative_config: not JSON: {error}") from error
    several = (given,) if isinstance(given, (str, Mapping, Method)) else given
    if not isinstance(several, Sequence) or not all(isinstance(one, (str, Mapping, Method)) for one in several):
        raise BuildError(f"speculative_config: {given!r} is no object with the key method, nor a list of such")
    return tuple(several)


def parse_method(text: str) -> Method:
    """``NAME``, ``NAME:VALUE``, ``NAME:key=value,...``, or both: ``medusa:heads/,trees=mc_sim_7b_63``.

    VALUE is that of the method's main key. A key that is given more than once has several values.

    Raises:
        BuildError: see :func:`read_method`.
    """
    name, _, rest = text.partition(":")
    mapping: dict[str, Any] = {"method": name}
    value: list[str] = []
    for word in rest.split(",") if rest else ():
        key, equals, said = word.partition("=")
        if not equals or not re.fullmatch(r"[a-z_]+", key):
            if len(mapping) > 1:
                raise BuildError(f"--method {text}: {word!r} is not key=value")
            value.append(word)
        elif key in mapping:
            mapping[key] = [*(mapping[key] if isinstance(mapping[key], list) else [mapping[key]]), said]
        else:
            mapping[key] = said
    if value:
        try:
            mapping.setdefault(method_type(name).main, ",".join(value))
        except SpecExportError as error:
            raise BuildError(f"--method {text}: {error}") from error
    return read_method(mapping, f"--method {text}", strict=False)


def read_method(given: Mapping[str, Any] | Method, where: str = "speculative_config", *, strict: bool = True) -> Method:
    """The method that a mapping asks for. Trees may be names of presets, JSON files or trees.

    Args:
        given: keys of the method, with ``method``; as in vLLM, a model alone is that of ``draft_model``.
        where: what errors begin with.
        strict: whether numbers have to be numbers, or may be texts.

    Raises:
        BuildError: it names a method, a key or a tree that is not known, or a value of the wrong kind.
    """
    if isinstance(given, Method):
        return given
    mapping = dict(given)
    if _MTP.fullmatch(str(mapping.get("method"))) and mapping["method"] not in known():
        mapping["method"] = "mtp"
    if mapping.pop(_SPLIT_CONFIG, 1) != 1:
        raise BuildError(f"{where}: {_SPLIT_CONFIG} is {given[_SPLIT_CONFIG]!r}; expected 1, models are not split")
    if mapping.get("method") is None:
        mapping.pop("method", None)
        if mapping.get("model") in ("ngram", "[ngram]"):
            mapping = {"method": "ngram", **{key: value for key, value in mapping.items() if key != "model"}}
        elif "model" in mapping:
            mapping = {"method": "draft_model", **mapping}
        else:
            raise BuildError(f"{where}: method is missing; expected one of {', '.join(known())}")
    try:
        kind = method_type(str(mapping["method"]))
    except SpecExportError as error:
        raise BuildError(f"{where}: {error}") from error
    keys = [key for key in kind.__struct_fields__ if key not in kind.built]
    unknown = next((key for key in mapping if key not in ("method", *keys)), None)
    if unknown is not None:
        raise BuildError(
            f"{where}: {unknown!r} is no key of method {method_name(kind)!r}; expected some of {', '.join(keys)}"
        )
    if "trees" in mapping:
        mapping["trees"] = _choices(mapping["trees"], where)
    try:
        return msgspec.convert(mapping, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise BuildError(f"{where}: {error}") from error


def _choices(given: Any, where: str) -> list[Any]:
    """Trees as choices, whatever they are given as."""
    named = [given] if isinstance(given, (str, Path, TokenTree)) else given
    if not isinstance(named, Sequence):
        raise BuildError(f"{where}: trees is {given!r}; expected names of presets, files or trees")
    try:
        trees = [TokenTree.load(one) if isinstance(one, (str, Path)) else one for one in named]
    except SpecExportError as error:
        raise BuildError(f"{where}: {error}") from error
    return [tree.choices if isinstance(tree, TokenTree) else tree for tree in trees]
