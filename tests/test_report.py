"""Reports of ``bench``, ``tune`` and ``verify``: what was measured, in pages that ask for nothing."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from shutil import copytree
from typing import Any
from xml.etree import ElementTree

import pytest

from specexport.commands import report
from specexport.contract.reading import read_manifest
from specexport.tables import Styled, Table
from tests.browser import CHROMIUM, browser
from tests.fixtures import Bundles

HOSTILE = "<img src=x onerror=alert(1)>&\"'[/b]"
_EMPTY = ("meta", "img", "link", "br")


class Page(HTMLParser):
    """A page's tables as texts by row, its pictures' texts, and its elements; each has to be closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tables: list[list[list[str]]] = []
        self.pictures: list[list[str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        elif tag == "svg":
            self.pictures.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] in (["td"], ["th"]):
            self.tables[-1][-1][-1] += data
        elif "svg" in self._open and self._open[-1] in ("text", "title"):
            self.pictures[-1].append(data)

    def asks_for_nothing(self) -> None:
        """It names no resource, and would not be allowed to load one."""
        assert ("http-equiv", "Content-Security-Policy") in [pair for _, had in self.elements for pair in had.items()]
        assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in self.elements}
        for _, had in self.elements:
            assert not {"src", "href", "srcset", "xlink:href"} & had.keys()
            assert not any(name.startswith("on") for name in had)
        left = self.source.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not any(word in left for word in ("http://", "https://", "url(", "@import"))


@pytest.fixture
def hostile(bundle: Bundles, tmp_path: Path) -> Bundles:
    """Gives a copy of a bundle in a folder whose name would be markup."""
    return lambda name: copytree(bundle(name), tmp_path / HOSTILE.replace("/", "."))


def test_bench(hostile, tmp_path, cli):
    folder, page = hostile("qwen3-lookup"), tmp_path / "bench.html"
    data = tmp_path / "data.jsonl"
    words = "one two three one two three one two"
    data.write_text(json.dumps({"workload": HOSTILE, "text": words, "hypothesis": " three one two"}))
    request = ["bench", str(folder), "--methods", "draft_model,ngram,hypothesis", "--data", str(data), "-n", "12"]
    rows = cli(*request, "--json", "--plot", page).json["rows"]
    page_parts = Page(page)
    page_parts.asks_for_nothing()
    table, *_ = page_parts.tables
    assert table[0][3] == HOSTILE
    results = [row["workloads"][HOSTILE] for row in rows]
    plain, *others = [row[3] for row in table[1:]]
    assert re.fullmatch(r"\d+ tokens/s", plain)
    assert others == [f"{result_['tokens_per_step']:.2f}, {result_['speed_up']:.2f}x" for result_ in results]
    for texts, name in zip(page_parts.pictures, ("speed_up", "tokens_per_step"), strict=False):
        assert HOSTILE in texts
        for row, result in zip(rows, results, strict=True):
            assert texts[texts.index(row["method"]) + 1] == f"{result[name]:.4g}"
    trees = [method.token_trees()[0] for method in read_manifest(folder).methods]
    assert [sum(text.startswith("node ") for text in texts) for texts in page_parts.pictures[2:]] == list(
        map(len, trees)
    )
    assert "onerror" in cli(*request, "--plot", page).out


def test_tune_tree(hostile, tmp_path, cli):
    folder, page = hostile("qwen3-medusa"), tmp_path / "tune.html"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"the {word} of all words and more"}) + "\n" for word in "abcdef"))
    words = ["tune", "tree", str(folder), "--data", str(data), "--max-nodes", "6", "-n", "24"]
    output = cli(*words, "--threads", "1", "--dry-run", "--json", "--plot", page).json
    page_parts = Page(page)
    page_parts.asks_for_nothing()
    by_size = sorted(output["trees"], key=lambda first: len(first["choices"]))
    assert [row[0] for row in page_parts.tables[0][1:]] == [str(1 + len(first["choices"])) for first in by_size]
    assert [row[5] for row in page_parts.tables[0][1:]] == [f"{first['tokens_per_second']:.1f}" for first in by_size]
    speed, tokens, cost, tree, *_ = page_parts.pictures
    for first in by_size:
        nodes = 1 + len(first["choices"])
        assert f"medusa: {first['tokens_per_second']:.4g} at {nodes}" in speed
        assert f"medusa: {first['tokens_per_step']:.4g} at {nodes}" in tokens
        assert f"whole step: {first['step_ms']:.4g} at {nodes}" in cost
    best = output["trees"][0]
    assert f"plain: {best['tokens_per_second'] / best['speed_up']:.4g}" in speed
    assert sum(text.startswith("node ") for text in tree) == 1 + len(best["choices"])


def test_tune_batch(bundle, tmp_path, cli):
    page = tmp_path / "batch.html"
    words = ["tune", "batch", str(bundle("qwen3-lookup")), "--threads", "1", "--seconds", "0.2"]
    curve = cli(*words, "--json", "--plot", page).json
    page_parts = Page(page)
    page_parts.asks_for_nothing()
    charts = [curve["steps"], *(cost["propose"] for cost in curve["methods"])]
    assert len(charts) > 1
    for costs, table, picture in zip(charts, page_parts.tables, page_parts.pictures, strict=False):
        assert table[1][1:] == [f"{cost['seconds'] * 1e3:.2f}" for cost in costs if cost["batch"] == 1]
        for cost in costs:
            slots = f"{cost['batch']} slot{'s' if cost['batch'] > 1 else ''}"
            assert f"{slots}: {cost['seconds'] * 1e3:.4g} at {cost['tokens']}" in picture


@pytest.mark.exporter
def test_verify(hostile, tmp_path, cli):
    folder, page = hostile("qwen3-medusa"), tmp_path / "verify.html"
    words = ["verify", str(folder), "-n", "8", "--json", "--report", str(page)]
    output = cli(*words).json
    page_parts = Page(page)
    page_parts.asks_for_nothing()
    assert page_parts.tables[0][1:] == [
        [check["name"], check["result"], check["sentence"]] for check in output["checks"]
    ]
    numbers = {(row[0], row[1].replace(" ", "_")): float(row[2]) for row in page_parts.tables[1][1:]}
    measured = {(check["name"], name): value for check in output["checks"] for name, value in check["numbers"].items()}
    assert numbers == pytest.approx(measured, rel=1e-5)
    assert "verdict: passed" in page_parts.source
    assert len(page_parts.pictures) == 2
    # A bundle with nothing to read has a report too, which says so.
    (folder / "specexport.json").write_text(f'{{"{HOSTILE[:12]}": 1}}')
    output = cli(*words, status=1).json
    page_parts = Page(page)
    page_parts.asks_for_nothing()
    assert page_parts.tables[0][1] == ["files", "failed", output["checks"][0]["sentence"]]
    assert page_parts.pictures == []


def test_a_report_that_cannot_be_written_costs_no_time(bundle, tmp_path, monkeypatch, cli):
    refused, access = tmp_path / "refused.html", os.access
    monkeypatch.setattr(
        "specexport.commands.report.os.access", lambda path, mode: path != tmp_path and access(path, mode)
    )
    printed = cli("bench", bundle("qwen3-lookup"), "--plot", refused, status=2)
    assert f"--plot is {refused}, which cannot be written; expected" in printed.err
    for path in (tmp_path, tmp_path / "none" / "report.html"):
        output = cli("bench", bundle("qwen3-lookup"), "--plot", path, status=2)
        assert f"--plot is {path}; expected a file to write" in output.err
        assert output.out == ""


def test_terminal_output_is_shown(tmp_path):
    table = Table("a < b", ("name", "value"), "lr")
    table.add_row(Styled("x", "bold red"), "1\n2")
    report.write(tmp_path / "page.html", HOSTILE, [table, "", Styled("done", "green")])
    page = Page(tmp_path / "page.html")
    page.asks_for_nothing()
    assert page.tables == [[["name", "value"], ["x", "1\n2"]]]
    for element in (("td", "left bold red"), ("td", "right "), ("p", "green")):
        assert (element[0], {"class": element[1]}) in page.elements
    assert "<caption>a &lt; b</caption>" in page.source


@pytest.mark.parametrize("largest", [0.0, 1e-7, 0.3, 1.0, 7.0, 123456.0])
def test_charts_hold_their_points(largest):
    line = [(1.0, largest / 3), (2.0, largest / 2), (9.0, largest)]
    drawn = ElementTree.fromstring(report.lines("x", "y", {f"line {n}": line for n in range(7)}, ("level", largest)))
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    svg = "{http://www.w3.org/2000/svg}"
    dots = [(float(element.get("cx")), float(element.get("cy"))) for element in drawn.iter(f"{svg}circle")]
    assert len(dots) == 21
    assert all(0 < x < width and 0 < y < height for x, y in dots)
    assert dots[0][0] < dots[1][0] < dots[2][0]
    assert dots[2][1] <= dots[1][1] <= dots[0][1]
    elements = [element for element in drawn.iter(f"{svg}text") if element.get("class") == "tick end"]
    ticks = [float(element.text) for element in elements if ":" not in element.text]
    assert ticks[0] == 0
    assert ticks[-1] >= largest
    assert 3 <= len(ticks) <= 7
    bars: Any = ElementTree.fromstring(report.bars("x", {"": {"a": largest, "b": float("nan")}}, ("one", largest / 2)))
    (bar,) = bars.iter(f"{svg}rect")
    assert 0 <= float(bar.get("width")) <= 640 - 160


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_it_and_asks_for_nothing_more(tmp_path):
    chart = report.lines("nodes", "tokens/s", {HOSTILE: [(1, 2), (3, 4)]}, (HOSTILE, 3))
    parts = [
        HOSTILE,
        report.Figure(HOSTILE, chart),
        report.Figure("bars", report.bars(HOSTILE, {HOSTILE: {HOSTILE: 1}})),
    ]
    page = tmp_path / "page.html"
    report.write(page, HOSTILE, parts)
    with browser(tmp_path / "profile") as window:
        window.shape(400, 700, mobile=True)
        window.open(page.as_uri())
        assert window.run("document.title") == HOSTILE
        assert window.run("document.images.length") == 0
        assert window.run("document.documentElement.scrollWidth") <= 400  # wide parts scroll by themselves
        light = window.run("getComputedStyle(document.body).backgroundColor")
        window.shape(1000, 700, dark=True)
        assert window.run("getComputedStyle(document.body).backgroundColor") != light
        assert window.asked == [page.as_uri()]
        assert window.complaints == []
