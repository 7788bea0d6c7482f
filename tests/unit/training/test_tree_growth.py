"""The tree of largest expected length, and trees that use no measurement."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_server.speculation.static_tree import checked
from eagle_tools.training.tree_search.growth import (
    comb_tree,
    expected_tokens,
    grow,
    level_tree,
    wide_tree,
    worth_of,
)

DEPTH, RANKS = 3, 2
ALL = [ranks for depth in range(1, DEPTH + 1) for ranks in itertools.product(range(RANKS), repeat=depth)]


def closed(nodes) -> bool:
    return all(len(node) == 1 or node[:-1] in nodes for node in nodes)


def best_by_trying_all(accuracies, count: int) -> float:
    return max(expected_tokens(accuracies, nodes) for nodes in itertools.combinations(ALL, count) if closed(set(nodes)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.floats(0.01, 1.0), min_size=RANKS, max_size=RANKS), min_size=DEPTH, max_size=DEPTH))
def test_no_tree_of_its_size_is_expected_to_emit_more(accuracies):
    for count in range(1, 6):
        nodes = [grown.choice for grown in grow(accuracies, count)]
        assert checked(nodes) == tuple(nodes)
        assert expected_tokens(accuracies, nodes) == pytest.approx(best_by_trying_all(accuracies, count))


def test_a_rank_that_is_better_than_the_one_before_it_comes_first():
    grown = grow([[0.2, 0.5], [0.9, 0.1]], 3)
    assert [g.choice for g in grown] == [(1,), (1, 0), (0,)]
    assert [g.worth for g in grown] == pytest.approx([0.5, 0.45, 0.2])


def test_every_beginning_of_the_list_is_a_tree_and_worthless_nodes_are_left_out():
    accuracies = [[0.6, 0.3, 0.0], [0.5, 0.0, 0.0]]
    nodes = [grown.choice for grown in grow(accuracies, 100)]
    assert nodes == [(0,), (1,), (0, 0), (1, 0)]
    assert all(closed(set(nodes[:count])) for count in range(len(nodes)))
    assert [g.choice for g in grow(accuracies, 100, steps=1)] == [(0,), (1,)]
    assert worth_of(accuracies, (0, 0)) == pytest.approx(0.3)
    assert worth_of(accuracies, (0, 0, 0)) == 0.0


def test_ties_go_to_the_shallower_node_and_to_the_lower_rank():
    assert [g.choice for g in grow([[1.0, 1.0], [1.0, 1.0]], 4)] == [(0,), (1,), (0, 0), (0, 1)]


@pytest.mark.parametrize("count", [4, 17, 60])
def test_the_wide_tree_has_whole_families(count):
    accuracies = [[0.5, 0.2, 0.1, 0.05]] * 3
    nodes = checked(wide_tree(accuracies, count))
    assert len(nodes) <= count
    assert {node[:-1]: 0 for node in nodes}.keys() == {node[:-1] for node in nodes if node[-1] == 3}
    assert max(map(len, nodes)) <= 3


@pytest.mark.parametrize(("nodes", "steps"), [(1, 1), (5, 5), (16, 3), (23, 5), (64, 4)])
def test_trees_without_measurement_have_the_requested_size(nodes, steps):
    for tree in (level_tree(nodes, steps, 8), comb_tree(nodes, steps)):
        assert len(checked(tree)) == nodes
        assert max(map(len, tree)) <= steps


def test_full_levels_and_combs():
    assert level_tree(6, 2, 8) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert set(comb_tree(4, 2)) == {(0,), (1,), (0, 0), (0, 1)}
