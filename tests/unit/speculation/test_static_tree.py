"""Static trees for EAGLE heads: the bias as in vLLM, and which nodes each draft step feeds."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_server.speculation.static_tree import Choices, parse_choices, static_tree, tree_attention_bias

CPU = torch.device("cpu")


@st.composite
def trees(draw: st.DrawFn) -> Choices:
    """Up to 12 nodes, each a child of the root or of an earlier node. Children need not have the lowest ranks."""
    nodes: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 12))):
        above = draw(st.sampled_from([(), *nodes]))
        node = (*above, draw(st.integers(0, 3)))
        if node not in nodes:
            nodes.append(node)
    return tuple(nodes)


def test_the_bias_of_a_written_tree() -> None:
    bias = tree_attention_bias(parse_choices("[(0,), (0, 0), (1,)]"))
    x = -math.inf
    assert bias.tolist() == [[0, x, x, x], [0, 0, x, x], [0, x, 0, x], [0, 0, x, 0]]


def test_unequal_children_are_fed_level_by_level() -> None:
    tree = static_tree(parse_choices("[(0,), (1,), (2,), (0, 0), (0, 2), (2, 1), (2, 1, 0)]"), CPU)
    assert (tree.size, tree.topk, tree.window, tree.rows) == (7, 3, 3, (2, 1))
    first, second, third = tree.levels
    assert [level.picks.tolist() for level in tree.levels] == [[0, 1, 2], [0, 2, 4], [0]]
    assert (first.fed.tolist(), first.parents.tolist()) == ([0, 2], [0, 0])
    assert (second.fed.tolist(), second.parents.tolist()) == ([2], [1])
    assert third.fed.tolist() == []
    assert first.sees.tolist() == [[True, False, False], [False, True, False]]
    assert second.sees.tolist() == [[False, True, True]]
    assert tree.parents.tolist() == [0, 0, 0, 1, 1, 3, 6]


@given(trees())
def test_every_node_is_found_among_the_children_of_its_parent(choices: Choices) -> None:
    """If tokens are the nodes' names, drafting level by level gives each node its own name, in the order of the
    bias."""
    tree = static_tree(choices, CPU)
    nodes = sorted(choices, key=lambda node: (len(node), node))
    fed: list[tuple[int, ...]] = [()]
    slots, found = [], []
    for level in tree.levels:
        children = [(*node, rank) for node in fed for rank in range(tree.topk)]
        here = [children[i] for i in level.picks.tolist()]
        assert [fed[i] for i in level.parents.tolist()] == [here[i][:-1] for i in level.fed.tolist()]
        fed = [here[i] for i in level.fed.tolist()]
        slots += fed
        found += here
        for row, node in zip(level.sees.tolist(), fed, strict=True):
            seen = [slot for slot, sees in zip(slots, row, strict=False) if sees]
            assert seen == [node[:depth] for depth in range(1, len(node) + 1)]
    assert found == nodes
    assert len(slots) == tree.window
    assert [(*nodes, ())[p - 1] for p in tree.parents.tolist()] == [node[:-1] for node in nodes]
    visible = tree_attention_bias(choices) == 0
    assert visible.sum(1).tolist() == [1, *(len(node) + 1 for node in nodes)]
