"""The registry of methods: the entry points of the group ``specexport.methods`` in all installed packages.

An entry point names a subclass of :class:`Method`, which lies in a module with its proposer. The rest of a method
(:func:`part`) is imported when it is needed, by no other code (``docs/methods.md``).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from specexport.contract.errors import BuildError, SpecExportError, explained
from specexport.contract.methods.base import (
    BuiltMethod,
    Flag,
    Method,
    MethodOptions,
    RankedMethod,
    TextMethod,
    for_bundle,
    method_name,
    not_a_chain,
    verified_widths,
    with_draft,
    with_trees,
)
from specexport.contract.plugins import installed, load
from specexport.contract.tree import TokenTree

__all__ = [  # names of the modules beside this one
    "BuiltMethod",
    "Flag",
    "Method",
    "MethodOptions",
    "RankedMethod",
    "TextMethod",
    "for_bundle",
    "method_name",
    "not_a_chain",
    "verified_widths",
    "with_draft",
    "with_trees",
]

GROUP = "specexport.methods"
_SPLIT_CONFIG = "draft_tensor_parallel_size"
_MTP = re.compile(r"[a-z0-9_]+_mtp")
"""vLLM's names for MTP by family: ``deepseek_mtp``, ``glm4_moe_mtp``, ``qwen3_next_mtp``."""


def known() -> tuple[str, ...]:
    """The names of all methods: this package's, then those that other installed packages add."""
    return tuple(installed(GROUP))


@lru_cache(maxsize=64)
def method_type(name: str) -> type[Method]:
    """The struct of a method's entry in a bundle; see :func:`options_type` for its options.

    Raises:
        SpecExportError: the method is unknown, or the entry point of that name is not a method.
    """
    if name not in known():
        raise SpecExportError(
            f"method is {name!r}; expected one of {', '.join(known())}, or install the package that adds it",
            param="method",
        )
    kind = load(GROUP, name)
    if not isinstance(kind, type) or not issubclass(kind, Method) or method_name(kind) != name:
        raise SpecExportError(
            f"the entry point {name!r} of {GROUP} is {kind!r}; expected a subclass of Method with tag={name!r}"
        )
    if issubclass(kind, TextMethod):  # it works in bundles that do not mention it, so every option needs a default
        needed = next((field.name for field in msgspec.structs.fields(kind) if field.required), None)
        if needed is not None:
            raise SpecExportError(f"method {name!r} needs no graph, so {needed!r} has to have a default; give it one")
    return kind


def options_type(kind: type[Method]) -> type[MethodOptions]:
    """The struct of a method's options."""
    return kind if issubclass(kind, MethodOptions) else kind.options


def text_methods() -> tuple[type[TextMethod], ...]:
    """The methods that need no graph, and so work in every bundle."""
    return tuple(kind for kind in map(method_type, known()) if issubclass(kind, TextMethod))


def module_of(kind: type) -> ModuleType:
    """The module of a method's struct, with ``open_proposer`` and, of a method to train, ``TRAINING``."""
    return sys.modules[kind.__module__]


def part(method: Method | MethodOptions | type[Method], name: str) -> ModuleType | None:
    """Imports a part of a method, such as ``export``: a module of the package that its struct is in.

    A method whose struct is in a module has all its parts there.

    Returns:
        None if there is no such module.
    """
    home = module_of(method if isinstance(method, type) else type(method))
    if not hasattr(home, "__path__"):
        return home
    path = f"{home.__name__}.{name}"
    return importlib.import_module(path) if importlib.util.find_spec(path) is not None else None


def decode_hook(kind: type, content: Any) -> Any:
    """Decodes methods, as msgspec's ``dec_hook``."""
    name = content.get("method") if isinstance(content, dict) else None
    if not isinstance(name, str):
        raise ValueError("expected an object with the key method")
    try:
        return msgspec.convert(content, method_type(name))
    except SpecExportError as error:
        raise ValueError(str(error)) from error
    except msgspec.ValidationError as error:
        # msgspec adds the entry's place to a ValueError, but not to a ValidationError.
        raise ValueError(explained(error)) from error


# --- reading a user's options -----------------------------------------------------------------------------------------
SpeculativeConfig = Mapping[str, Any] | MethodOptions | str | Sequence[Mapping[str, Any] | MethodOptions | str]
"""One method or several, as mappings, JSON, names with options, or options."""


def read_methods(config: SpeculativeConfig) -> tuple[MethodOptions, ...]:
    """The methods of a ``speculative_config``."""
    return tuple(parse_method(entry) if isinstance(entry, str) else read_method(entry) for entry in listed(config))


def listed(config: Any) -> tuple[Mapping[str, Any] | MethodOptions | str, ...]:
    """The entries of a ``speculative_config``; its JSON is decoded."""
    if isinstance(config, str) and config.lstrip()[:1] in ("[", "{"):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError) as error:
            raise BuildError(f"speculative_config: not JSON: {error}", param="speculative_config") from error
    several = (config,) if isinstance(config, (str, Mapping, MethodOptions)) else config
    if not isinstance(several, Sequence) or not all(
        isinstance(entry, (str, Mapping, MethodOptions)) for entry in several
    ):
        raise BuildError(
            f"speculative_config: {config!r} is not an object with the key method, or a list of them",
            param="speculative_config",
        )
    return tuple(several)


def parse_method(text: str) -> MethodOptions:
    """Parses ``NAME``, ``NAME:VALUE``, ``NAME,key=value,...``, or both: ``medusa:heads/,trees=mc_sim_7b_63``.

    VALUE is the value of the method's main key. A colon may precede keys too. A repeated key has several values.
    """
    name, separator, rest = (*re.split("([:,])", text, maxsplit=1), "", "")[:3]
    mapping: dict[str, Any] = {"method": name}
    value: list[str] = []
    for word in rest.split(",") if rest else ():
        key, equals, text_value = word.partition("=")
        if not equals or not re.fullmatch(r"[a-z_]+", key):
            if len(mapping) > 1 or separator == ",":
                raise BuildError(f"--method {text}: {word!r} is not key=value")
            value.append(word)
        elif key in mapping:
            mapping[key] = [*(mapping[key] if isinstance(mapping[key], list) else [mapping[key]]), text_value]
        else:
            mapping[key] = text_value
    if value:
        try:
            mapping.setdefault(options_type(method_type(name)).main, ",".join(value))
        except SpecExportError as error:
            raise BuildError(f"--method {text}: {error}") from error
    return read_method(mapping, f"--method {text}", strict=False)


def read_method(
    config: Mapping[str, Any] | MethodOptions, where: str = "speculative_config", *, strict: bool = True
) -> MethodOptions:
    """Reads a method's options from a mapping. Trees may be names of presets, JSON files or trees.

    Args:
        config: ``method`` and its keys; as in vLLM, ``method`` defaults to ``draft_model`` if there is a ``model``.
        where: the beginning of error messages.
        strict: whether texts are refused for numbers.

    Raises:
        BuildError: a method, a key or a tree is unknown, a key is missing, or a value is of the wrong kind.
    """
    if isinstance(config, MethodOptions):
        return config
    mapping = dict(config)
    if _MTP.fullmatch(str(mapping.get("method"))) and mapping["method"] not in known():
        mapping["method"] = "mtp"
    if mapping.pop(_SPLIT_CONFIG, 1) != 1:
        raise BuildError(f"{where}: {_SPLIT_CONFIG} is {config[_SPLIT_CONFIG]!r}; expected 1, models are not split")
    if mapping.get("method") is None:
        mapping.pop("method", None)
        if mapping.get("model") in ("ngram", "[ngram]"):
            mapping = {"method": "ngram", **{key: value for key, value in mapping.items() if key != "model"}}
        elif "model" in mapping:
            mapping = {"method": "draft_model", **mapping}
        else:
            raise BuildError(f"{where}: method is missing; expected one of {', '.join(known())}")
    try:
        kind = options_type(method_type(str(mapping["method"])))
    except SpecExportError as error:
        raise BuildError(f"{where}: {error}") from error
    if "trees" in mapping:
        mapping["trees"] = _choices(mapping["trees"], where)
    try:
        return msgspec.convert(mapping, kind, strict=strict)
    except msgspec.ValidationError as error:
        keys = ", ".join(kind.__struct_fields__)
        raise BuildError(f"{where}: {explained(error)}; the keys of {method_name(kind)!r} are {keys}") from error


def _choices(trees_option: Any, where: str) -> list[Any]:
    named = [trees_option] if isinstance(trees_option, (str, Path, TokenTree)) else trees_option
    if not isinstance(named, Sequence):
        raise BuildError(f"{where}: trees is {trees_option!r}; expected names of presets, files or trees")
    try:
        trees = [TokenTree.load(choice) if isinstance(choice, (str, Path)) else choice for choice in named]
    except SpecExportError as error:
        raise BuildError(f"{where}: {error}") from error
    return [tree.choices if isinstance(tree, TokenTree) else tree for tree in trees]
