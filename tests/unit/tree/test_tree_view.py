"""How trees are laid out, spelled, printed and drawn."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eagle_tools.training.tree_search.growth import grow
from eagle_tools.training.tree_search.picture import draw_choices
from eagle_tools.tree.canvas import drawable
from eagle_tools.tree.layout import GAP, breadths, depths
from eagle_tools.tree.picture import draw_cycle
from eagle_tools.tree.record import DraftedTree
from eagle_tools.tree.spelling import visible
from eagle_tools.tree.terminal import console_for, print_cycle

WORDS = {9: " def", 11: " $x$", 12: "\n", 13: "\u5806\u6808", 14: "a" * 40, 99: "\t."}
TREE = DraftedTree((9, 11, 12, 13, 14), (-1, 0, 0, 1, 1), (0.0, -0.5, -1.0, -0.7, -2.5), (0, 1, 3), (11, 13, 99))


@st.composite
def trees(draw) -> list[int]:
    size = draw(st.integers(1, 40))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


@given(trees())
def test_no_two_nodes_of_one_depth_are_closer_than_the_gap_and_siblings_keep_their_order(parents):
    level, across = depths(parents), breadths(parents)
    assert min(across) == 0.0
    for depth in set(level):
        here = [node for node, own in enumerate(level) if own == depth]
        places = sorted(across[node] for node in here)
        assert all(right - left > GAP - 1e-9 for left, right in zip(places, places[1:], strict=False))
    for node in range(len(parents)):
        children = [child for child, parent in enumerate(parents) if parent == node]
        places = [across[child] for child in children]
        assert places == sorted(places)
        if children:
            assert level[children[0]] == level[node] + 1
            assert across[node] == pytest.approx((places[0] + places[-1]) / 2)


def test_a_subtree_moves_under_a_shallow_neighbour():
    assert breadths([-1, 0, 0, 2, 2, 2]) == pytest.approx([0.5, 0.0, 1.0, 0.0, 1.0, 2.0])
    assert breadths([-1]) == [0.0]


def test_what_cannot_be_seen_is_escaped():
    assert visible(" a\n\t\\\u200b\u00e9\U0001f600") == "\u2423a\\n\\t\\\\\\u200b\u00e9\U0001f600"
    assert visible("abcdef", 4) == "abc\u2026"
    assert drawable("a\u2423\u2026\u5806") == "a\u2423\u2026\\u5806"


def test_the_terminal_marks_the_path_and_the_bonus_and_pipes_have_no_colour():
    out = io.StringIO()
    print_cycle(console_for(out), 3, TREE, WORDS.__getitem__)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("cycle 3  4 drafted, 2 accepted + 1 = 3 tokens")
    assert [line.split()[-1] for line in lines if "\u2423def" in line] == ["root"]
    shown = out.getvalue()
    assert "+ \u2423$x$  0.61" in shown
    assert "+ \u5806\u6808  0.82" in shown
    assert "= \\t.  bonus token" in shown
    assert "a" * 40 in shown
    assert "\x1b" not in shown
    coloured = io.StringIO()
    print_cycle(Console(file=coloured, force_terminal=True, color_system="standard"), 3, TREE, WORDS.__getitem__)
    assert "\x1b[1;32m" in coloured.getvalue()


def test_a_cycle_is_drawn_as_png_and_svg(tmp_path):
    paths = draw_cycle(3, TREE, WORDS.__getitem__, tmp_path / "cycle-3")
    assert [path.name for path in paths] == ["cycle-3.png", "cycle-3.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in paths[1].read_text()


def test_a_tree_of_choices_is_drawn(tmp_path):
    accuracies = [[0.6, 0.3, 0.004], [0.5, 0.2, 0.1]]
    choices = [grown.choice for grown in grow(accuracies, 12)]
    paths = draw_choices(choices, accuracies, "title", "subtitle", tmp_path / "tree")
    assert all(path.stat().st_size > 1000 for path in paths)
