"""The tables, charts and counts of the documentation are those of the results."""

import argparse
import ast
import inspect
import re
import shlex
from importlib.metadata import entry_points

import pytest

from benchmarks.families import HELP, TITLES, families
from benchmarks.tables import load
from scripts.docs import PAGES, ROOT, TABLES, current
from specexport.cli import parser
from specexport.contract.manifest import FORMAT_VERSION
from specexport.contract.options import options
from specexport.options import ServiceOptions
from specexport.runtime import Engine
from tests.test_families import REFUSED

pytestmark = pytest.mark.exporter

FAMILIES: dict[str, dict[str, str]] = load("families")
NUMBERS = {11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen"}
REFUSED_FAMILIES = {name for name, checks in FAMILIES.items() if "refused" in checks}


@pytest.mark.parametrize(("path", "text"), [pytest.param(*item, id=item[0].name) for item in current().items()])
def test_committed_docs_are_current(path, text):
    assert path.read_text(encoding="utf-8") == text, "run python -m scripts.docs"


def test_every_table_is_on_one_page():
    marks = [name for page in PAGES for name in re.findall(r"<!-- table: (\S+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(marks) == sorted(TABLES)


def test_readme_counts_families_and_methods():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{len(FAMILIES) - len(REFUSED_FAMILIES)} families]" in readme
    methods = len(entry_points(group="specexport.methods"))
    assert f"{NUMBERS[methods]} methods" in readme


def test_documents_name_the_version_of_the_bundle_format():
    page, changes = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/bundle-format.md", "CHANGELOG.md"))
    assert page.startswith(f"# Bundle format, version {FORMAT_VERSION}\n")
    assert f"Bundles have format {FORMAT_VERSION}:" in changes


def _command(words: list[str]) -> argparse.ArgumentParser:
    """The parser of the command that words begin with."""
    command = parser([])
    for word in words:
        actions = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
        if not actions or word not in actions[0].choices:
            break
        command = actions[0].choices[word]
    return command


def test_flags_and_keywords_in_documents_exist():
    unknown: list[str] = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"(?m)^(?:\$ )?specexport ((?:\w+ )+.*-.*)$|`specexport ([^`]+)`", text):
            words = shlex.split("".join(line), comments=True)
            command = _command(words)
            flags = [re.sub("=.*", "", word) for word in words if word.startswith("-")]
            unknown += [f"{page.name}: {word}" for word in flags if word not in command._option_string_actions]
        for name, call in re.findall(r"`(Engine\.load|LLM|AsyncEngine\.open)(\([^`]*?\))", text):
            tree = ast.parse("f" + call.replace("=)", "=0)").replace("…", "..."), mode="eval").body
            assert isinstance(tree, ast.Call)
            keywords = inspect.signature(Engine.load).parameters if name == "Engine.load" else options(ServiceOptions)
            unknown += [f"{page.name}: {name}({key.arg}=)" for key in tree.keywords if key.arg not in keywords]
    assert unknown == []


def test_supported_families_pass_and_refused_ones_are_explained():
    assert FAMILIES.keys() <= families().keys()
    assert {f"{name}, {why}" for why, (name, _) in REFUSED.items()} <= REFUSED_FAMILIES <= HELP.keys()
    for name, checks in FAMILIES.items():
        if name not in REFUSED_FAMILIES:
            assert checks.keys() <= TITLES.keys(), name
            assert checks["fp32"] == checks["greedy"] == "yes", name
