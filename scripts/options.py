"""Write the tables of options in docs/ from the structs that state them: ``python -m scripts.options``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from specexport.contract.options import REQUIRED, Option, Options, options
from specexport.exporter.engines.options import CompileOptions
from specexport.exporter.options import BuildSettings
from specexport.flags import flag
from specexport.options import EngineOptions
from specexport.runtime import SamplingParams
from specexport.server.options import ListenOptions

DOCS = Path(__file__).parent.parent / "docs"
_MARK = re.compile(
    r"(<!-- options: (\w+), written by scripts/options\.py -->\n\n).*?(\n\n<!-- options end -->)", re.DOTALL
)


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
        default = "" if negated or option.default is REQUIRED else option.default_text or str(option.default)
        values = "" if option.kind is bool and flags else option.expected
        yield f"| `{flag(option) if flags else option.name}` | {values} | {default} | {words} |".replace("  ", " ")


def with_tables(page: str) -> str:
    """A page with the tables between its marks written again."""
    return _MARK.sub(lambda mark: f"{mark[1]}{table(mark[2])}{mark[3]}", page)


def pages() -> Iterator[Path]:
    """The pages with tables."""
    return (path for path in sorted(DOCS.glob("*.md")) if _MARK.search(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    for path in pages():
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
