"""Token trees: built from choices, files and presets, refused with a reason, and drawn in the terminal and as SVG."""

import itertools
import json
import re
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.commands.draw import svg, terminal_tree
from specexport.contract.errors import SpecExportError
from specexport.contract.tree import MAX_NODES, PRESETS, TokenTree


@st.composite
def trees(draw: Any) -> TokenTree:
    return TokenTree((-1, *(draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 24))))))


@given(trees())
def test_mask_depths_children_and_paths_agree(tree):
    for node in range(len(tree)):
        ancestors, at = {node}, node
        while (at := tree.parents[at]) >= 0:
            ancestors.add(at)
        assert set(np.flatnonzero(tree.mask[node]).tolist()) == ancestors
        assert tree.depths[node] == len(ancestors) - 1
        assert all(tree.parents[child] == node for child in tree.children[node])
    assert sorted(node for children in tree.children for node in children) == list(range(1, len(tree)))
    assert [path[-1] for path in tree.leaf_paths] == [n for n in range(len(tree)) if not tree.children[n]]
    assert all(tree.parents[b] == a for path in tree.leaf_paths for a, b in itertools.pairwise(path))


@given(trees())
def test_choices_make_the_same_tree_again(tree):
    again = TokenTree.from_choices(tree.choices)
    assert sorted(again.choices) == sorted(tree.choices)
    assert TokenTree.from_choices(again.choices) == again


def test_choices_are_ordered_by_depth_and_rank_behind_the_path_of_the_first():
    tree = TokenTree.from_choices([[2, 0], [0], [2], [0, 1], [0, 0]])
    assert tree.choices == ((0,), (0, 0), (2,), (0, 1), (2, 0))
    assert tree.parents == (-1, 0, 1, 0, 1, 3)
    assert tree.ranks == (0, 0, 0, 2, 1, 0)


def test_a_chain_is_the_tree_with_one_leaf():
    assert TokenTree.chain(4) == TokenTree.from_choices([[0], [0, 0], [0, 0, 0]])
    assert TokenTree.chain(4).leaf_paths == ((0, 1, 2, 3),)


def test_the_published_tree_has_the_shape_its_authors_give():
    tree = TokenTree.load("mc_sim_7b_63")
    assert len(tree) == 64
    assert np.bincount(tree.depths).tolist() == [1, 10, 28, 23, 2]


@pytest.mark.parametrize("name", PRESETS)
def test_published_trees_are_whole(name):
    """A rank is only there with those below it, as in every tree that was searched by probability."""
    tree = TokenTree.load(name)
    assert len(tree) == 64
    for children in tree.children:
        assert [tree.ranks[child] for child in children] == list(range(len(children)))


@pytest.mark.parametrize(
    "content", [[[0], [1], [0, 0]], {"choices": [[0], [1], [0, 0]]}, {"parents": [-1, 0, 1, 0]}], ids=str
)
def test_files_hold_choices_or_parents(content, tmp_path):
    (tmp_path / "tree.json").write_text(json.dumps(content))
    assert TokenTree.load(tmp_path / "tree.json") == TokenTree((-1, 0, 1, 0))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[[0], [0, 0, 1]]", r"\[0, 0, 1\] is listed without \[0, 0\]"),
        ("[[0], [0]]", r"\[0\] is given twice"),
        ("[[0], []]", r"\[\] is not a path"),
        ("[[-1]]", r"\[-1\] is not a path"),
        ('[["a"]]', "is a text; expected a whole number"),
        ('{"nodes": []}', "it is an object; expected a list"),
        ('{"parents": [-1, 2, 0]}', "node 1 .* parent 2"),
        ('{"parents": [0]}', "node 0 .* parent 0"),
        ("[[0]", "JSON is malformed|truncated"),
        ('{"\udcff": 1}', "expected a list of choices"),  # not UTF-8
        pytest.param("[" * 100_000, "expected a list of choices", id="deep"),
        (json.dumps([[rank] for rank in range(MAX_NODES)]), f"1 to {MAX_NODES} nodes"),
    ],
)
def test_files_that_hold_no_tree_are_refused(content, reason, tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(SpecExportError, match=f"tree.json.*({reason})"):
        TokenTree.load(path)


def test_a_name_that_is_neither_file_nor_preset_is_refused():
    with pytest.raises(SpecExportError, match=r"no such file, and no preset .*mc_sim_7b_63"):
        TokenTree.load("mc_sim_8b")


@given(trees())
def test_drawings_show_every_node_once_below_its_parent(tree):
    first, *lines = terminal_tree(tree).splitlines()
    assert first == "0  last token"
    path, seen = [0], [0]
    for line in lines:
        match = re.fullmatch(r"((?:│   |    )*)(?:├── |└── )(\d+)  rank (\d+)", line)
        node, depth = int(match[2]), 1 + len(match[1]) // 4
        assert (tree.parents[node], tree.ranks[node]) == (path[depth - 1], int(match[3]))
        path[depth:] = [node]
        seen.append(node)
    assert sorted(seen) == list(range(len(tree)))


def test_inspect_draws_trees(cli):
    assert "64 nodes with the root, depth 4, 42 paths" in cli("inspect", "mc_sim_7b_63", "--tree").out
    assert "no such file" in cli("inspect", "nothing.json", "--tree", status=1).err
    for flag in ("--hashes", "--json"):
        assert f"{flag} was given with --tree" in cli("inspect", "mc_sim_7b_63", "--tree", flag, status=2).err


# --- drawn as SVG -----------------------------------------------------------------------------------------------------


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "tree", [TokenTree.chain(1), TokenTree.chain(5), TokenTree.load("mc_sim_7b_63")], ids=["root", "chain", "preset"]
)
def test_every_node_has_its_place(tree):
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


def test_a_file_and_a_preset_are_drawn(tmp_path, cli):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    assert "4 nodes with the root, depth 2" in cli("draw", tmp_path / "tree.json", "-o", tmp_path / "tree.svg").out
    assert cli("draw", tmp_path / "tree.json", "-o", "-").out == (tmp_path / "tree.svg").read_text()
    assert (tmp_path / "tree.svg").read_text().count("<circle") == 4
    cli("draw", "nothing", "-o", tmp_path / "no.svg", status=1)
    assert not (tmp_path / "no.svg").exists()
