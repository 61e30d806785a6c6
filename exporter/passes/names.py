"""Names weights as the model that transformers loads does, so that they can be looked up there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import onnx_ir as ir
from onnxscript.optimizer import FOLDED_FROM_KEY

_PREFIXES = ("model.", "additions.")
"""What the traced modules put before the names that checkpoints have."""


def name_weights(model: ir.Model, aliases: Mapping[str, str]) -> None:
    """Renames the initializers of a graph that was just traced and optimized.

    Parameters lose what the traced module put before their names. A constant that the optimizer made of one parameter
    (Gemma's norms are 1 + weight) is named after that parameter, with ``.folded`` behind it.

    Args:
        model: changed in place.
        aliases: names in the traced module of parameters that have another one too, which is the one to use.
    """
    for value in list(model.graph.initializers.values()):
        name = _in_checkpoint(aliases.get(value.name or "", value.name)) or _folded(value.meta.get(FOLDED_FROM_KEY, ()))
        if name is not None:
            value.name = _free(model.graph, name)


def joined_name(names: list[str]) -> str:
    """The name of several matrices in one: ``layers.0.mlp.{gate_proj,up_proj}.weight``."""
    parts = [name.split(".") for name in names]
    head = _common(zip(*parts, strict=False))
    tail = _common(zip(*(part[len(head) :][::-1] for part in parts), strict=False))[::-1]
    differing = ",".join(".".join(part[len(head) : len(part) - len(tail)]) for part in parts)
    return ".".join([*head, f"{{{differing}}}", *tail])


def names_in(name: str) -> list[str]:
    """The names of the matrices that one was joined of: undoes :func:`joined_name`."""
    head, brace, rest = name.partition("{")
    differing, _, tail = rest.partition("}")
    return [f"{head}{part}{tail}" for part in differing.split(",")] if brace else [name]


def _common(columns: Iterable[tuple[str, ...]]) -> list[str]:
    """What all names have in common, up to where they begin to differ."""
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]


def _in_checkpoint(name: str | None) -> str | None:
    """A parameter's name in the checkpoint; None for what is no parameter."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name and name.startswith(prefix)), None)


def _folded(sources: Iterable[str]) -> str | None:
    parameters = [name for name in map(_in_checkpoint, sources) if name is not None]
    return f"{parameters[0]}.folded" if len(parameters) == 1 else None


def _free(graph: ir.Graph, name: str) -> str:
    number, free = 1, name
    while free in graph.initializers:
        number += 1
        free = f"{name}.{number}"
    return free
