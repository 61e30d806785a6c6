"""Write the tables and charts of the documentation from results and declarations: ``python -m scripts.docs``.

A page marks the place of a table with ``<!-- table: NAME -->`` and ``<!-- end of table -->``; :data:`TABLES` says where
each comes from. What stands between the marks is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gguf import GGML_QUANT_SIZES

from benchmarks import tables
from scripts import clients, families, option_tables, tensor_tables
from specexport.exporter.checkpoints.gguf.tensors import KEPT
from specexport.exporter.checkpoints.settings import SETTINGS
from specexport.server.tools import call_format
from tests import tool_families

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n\n).*?(\n\n<!-- end of table -->)", re.DOTALL)


def settings() -> str:
    """What becomes of a checkpoint's settings."""
    rows = [
        (setting.file, ", ".join(f"`{key}`" for key in setting.keys), setting.handling, setting.note)
        for setting in SETTINGS
    ]
    return tables.markdown(("file", "settings", "handling", ""), rows)


def gguf_types() -> str:
    """How each block type of GGUF is kept, and its bits a weight in the file and in a bundle."""
    names = {
        "half": "fp16 scales",
        "half, offset": "fp16 scales and offsets",
        "two levels": "scales in two levels",
        "two levels, offset": "scales and offsets in two levels",
    }
    rows = []
    for kind, block in KEPT.items():
        weights, size = GGML_QUANT_SIZES[kind]
        factor = 16 / block.group if block.scales.startswith("half") else 8 / block.group + 16 / 256
        factors = 2 if block.scales.endswith("offset") else 1
        bits = int(block.kind.removeprefix("int")) + factors * factor
        rows.append((kind.name, block.kind, names[block.scales], f"{8 * size / weights:.4g}", f"{bits:.4g}"))
    rows += [("F16, BF16, F32", "the same", "", "", ""), ("others", "int8, rounded again; `build` warns", "", "", "")]
    return tables.markdown(("type", "kept as", "with", "bits in the file", "bits in the bundle"), rows)


def tools() -> str:
    """The tool support of each family of models."""
    rows = []
    for family in tool_families.FAMILIES:
        supported = call_format(family.template) is not None
        form = family.form if supported else "its template knows no tools; JSON"
        rows.append((family.name, form, "works" if supported else "refused", "work"))
    return tables.markdown(("family", "a call", "`auto`", "`required`, a named tool"), rows)


def client_checks() -> str:
    """The checks of OpenAI's clients, as scripts/clients.py last ran them."""
    checks = json.loads(clients.RESULTS.read_text(encoding="utf-8"))
    rows = [(check["client"], check["version"], check["check"], check["result"]) for check in checks]
    return tables.markdown(("client", "version", "check", ""), rows)


TABLES: dict[str, Callable[[], str]] = {
    "auto": tables.auto,
    "batches": tables.batches,
    "bench": tables.bench,
    "clients": client_checks,
    "decode-costs": tables.decode_costs,
    "decode-speed": tables.decode_speed,
    "engines": tables.engines,
    "families": lambda: families.table(json.loads(families.RESULTS.read_text(encoding="utf-8"))),
    "gguf-types": gguf_types,
    "lookup": tables.lookup,
    "losslessness": tables.losslessness,
    "machines": tables.machines,
    "methods": tables.methods,
    "precision": tables.precision,
    "real-models": tables.real_models,
    "real-sizes": tables.real_sizes,
    "serve": tables.serve,
    "settings": settings,
    "soak": tables.soak,
    "split-targets": tables.split_targets,
    "tools": tools,
    "opening": tables.opening,
    "prompts": tables.prompts,
    "verify-costs": tables.verify_costs,
    **{f"options-{name}": partial(option_tables.table, name) for name in option_tables.TABLES},
    **{f"tensors-{name}": partial(tensor_tables.table, name) for name in tensor_tables.TABLES},
}
CHARTS: dict[Path, Callable[[], str]] = {ROOT / "docs" / "speed.svg": tables.real_models_chart}


def current() -> dict[Path, str]:
    """The content that each page with tables, and each chart, should have.

    Raises:
        KeyError: a page names a table that is not in :data:`TABLES`.
    """
    files = {path: chart() for path, chart in CHARTS.items()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files[page] = _TABLE.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}{mark[3]}", text)
    return files


def main() -> None:
    """Writes the files that are not current, and names them."""
    for path, text in current().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
