"""``specexport draw``: every node and every edge of a tree, in well-formed SVG."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specexport.cli import main
from specexport.commands.inspect import svg
from specexport.contract.tree import TokenTree

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "tree", [TokenTree.chain(1), TokenTree.chain(5), TokenTree.load("mc_sim_7b_63")], ids=["root", "chain", "preset"]
)
def test_every_node_has_its_place(tree: TokenTree) -> None:
    root = ElementTree.fromstring(svg(tree))
    nodes = root.findall(f"{SVG}g")
    assert [node.findtext(f"{SVG}text") for node in nodes] == [str(node) for node in range(len(tree))]
    circles = [node.find(f"{SVG}circle") for node in nodes]
    places = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in circles if circle is not None]
    for (x, y), (other_x, other_y) in combinations(places, 2):
        assert abs(x - other_x) >= 24 or abs(y - other_y) >= 24
    assert [circle.attrib["class"] == "first" for circle in circles if circle is not None] == [
        rank == 0 for rank in tree.ranks
    ]
    starts = [path.attrib["d"].partition("c")[0] for path in root.findall(f"{SVG}path")]
    assert starts == [f"M{places[up][0]:g} {places[up][1]:g}" for up in tree.parents[1:]]
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert all(12 <= x <= width - 12 and 12 <= y <= height - 12 for x, y in places)


def test_a_file_and_a_preset_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    assert main(["draw", str(tmp_path / "tree.json"), "-o", str(tmp_path / "tree.svg")]) == 0
    assert "4 nodes with the root, depth 2" in capsys.readouterr().out
    assert (tmp_path / "tree.svg").read_text().count("<circle") == 4
    assert main(["draw", "nothing", "-o", str(tmp_path / "no.svg")]) == 1
    assert not (tmp_path / "no.svg").exists()
