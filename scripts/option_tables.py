"""The documentation's tables of options, from the structs that state them; ``scripts/docs.py`` writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from specexport.contract.options import REQUIRED, Option, Options, options
from specexport.exporter.engines.options import CompileOptions
from specexport.exporter.options import BuildSettings
from specexport.flags import flag
from specexport.options import EngineOptions, ListenOptions
from specexport.runtime import SamplingParams


def _names(kind: type[Options], without: Collection[str] = ()) -> list[str]:
    return [name for name in options(kind) if name not in without]


_ENGINE = _names(EngineOptions, _names(BuildSettings))
TABLES: dict[str, tuple[type[Options], Collection[str], bool]] = {
    "engine": (EngineOptions, _ENGINE, False),
    "build": (EngineOptions, _names(BuildSettings), False),
    "sampling": (SamplingParams, _names(SamplingParams), False),
    "compile": (CompileOptions, _names(CompileOptions, ["backend"]), True),
    "serve": (ListenOptions, _names(ListenOptions, [*_ENGINE, *_names(BuildSettings)]), True),
}
"""Of each table in ``docs/`` its options, and whether they are shown as flags."""


def table(name: str) -> str:
    """A table in Markdown."""
    kind, names, flags = TABLES[name]
    return "\n".join(_rows([option for option in options(kind).values() if option.name in names], flags))


def _rows(shown: list[Option], flags: bool) -> Iterator[str]:
    yield f"| {'flag' if flags else 'option'} | values | default | |"
    yield "|---|---|---|---|"
    for option in shown:
        negated = flags and option.default is True
        words = option.about.get("off", option.help) if negated else option.help
        unset = negated or option.default is REQUIRED or (flags and option.default is False)
        default = "" if unset else option.default_text or str(option.default)
        values = "" if option.kind is bool and flags else option.expected
        yield f"| `{flag(option) if flags else option.name}` | {values} | {default} | {words} |".replace("  ", " ")
