"""The tables, charts and counts of the documentation are those of the results."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from scripts.docs import PAGES, ROOT, TABLES, current
from scripts.families import HELP, RESULTS, TITLES, families
from specexport.contract.manifest import FORMAT_VERSION
from tests.test_families import REFUSED

pytestmark = pytest.mark.exporter

FAMILIES: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))
NUMBERS = {11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen"}
REFUSED_FAMILIES = {name for name, checks in FAMILIES.items() if "refused" in checks}


@pytest.mark.parametrize(("path", "text"), [pytest.param(*item, id=item[0].name) for item in current().items()])
def test_committed_docs_are_current(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run python -m scripts.docs"


def test_every_table_is_on_one_page() -> None:
    marks = [name for page in PAGES for name in re.findall(r"<!-- table: (\S+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(marks) == sorted(TABLES)


def test_readme_counts_families_and_methods() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{len(FAMILIES) - len(REFUSED_FAMILIES)} families]" in readme
    methods = len(entry_points(group="specexport.methods"))
    assert f"{NUMBERS[methods]} methods" in readme


def test_documents_name_the_version_of_the_bundle_format() -> None:
    page, changes = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/bundle-format.md", "CHANGELOG.md"))
    assert page.startswith(f"# Bundle format, version {FORMAT_VERSION}\n")
    assert f"Bundles have format {FORMAT_VERSION}:" in changes


def test_supported_families_pass_and_refused_ones_are_explained() -> None:
    assert FAMILIES.keys() <= families().keys()
    assert {f"{name}, {why}" for why, (name, _) in REFUSED.items()} <= REFUSED_FAMILIES <= HELP.keys()
    for name, checks in FAMILIES.items():
        if name not in REFUSED_FAMILIES:
            assert checks.keys() <= TITLES.keys(), name
            assert checks["fp32"] == checks["greedy"] == "yes", name
