"""Acceptance by depth and rank, counted only for nodes that were tried."""

from __future__ import annotations

import torch

from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import build_tree
from eagle_tools.training.tree_search.counts import RankCounts
from eagle_tools.tree.record import DraftedTree, drafted_trees

#        0: root
#   1: a      2: b      3: c
#   4 5 6     7
#   8
MADE_UP = DraftedTree(
    tokens=(9, 11, 12, 13, 14, 15, 16, 17, 18),
    parents=(-1, 0, 0, 0, 1, 1, 1, 2, 4),
    scores=(0.0, *[None] * 8),
    path=(0, 1, 6),
    emitted=(11, 16, 99),
)


def test_children_of_accepted_parents_are_tried_and_no_others():
    counts = RankCounts(steps=3, ranks=3)
    counts.add([MADE_UP])
    assert counts.tried == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert counts.hits == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert counts.leaves == [0, 0, 1]  # node 6 was accepted and has nothing below
    assert (counts.cycles, counts.emitted) == (1, 3)


def test_a_parent_with_fewer_children_tries_fewer_ranks():
    counts = RankCounts(steps=3, ranks=2)
    refused = DraftedTree(MADE_UP.tokens, MADE_UP.parents, MADE_UP.scores, path=(0,), emitted=(98,))
    second = DraftedTree(MADE_UP.tokens, MADE_UP.parents, MADE_UP.scores, path=(0, 2), emitted=(12, 97))
    counts.add([refused, second])
    assert counts.tried == [[2, 2], [1, 0], [0, 0]]
    assert counts.hits == [[0, 1], [0, 0], [0, 0]]
    assert counts.accuracies(least=1) == [[0.0, 0.5], [0.0, 0.0], [0.0, 0.0]]
    assert counts.accuracies(least=2) == [[0.0, 0.5], [0.0, 0.0], [0.0, 0.0]]
    assert counts.accuracies(least=3) == [[0.0, 0.0]] * 3


def test_siblings_are_ranked_by_score_where_there_are_scores():
    tree = DraftedTree((9, 11, 12), (-1, 0, 0), (0.0, -2.0, -1.0), path=(0, 2), emitted=(12, 5))
    counts = RankCounts(steps=1, ranks=2)
    counts.add([tree])
    assert counts.hits == [[1, 0]]


def accepted(path: list[list[int]], tokens: list[list[int]]) -> Accepted:
    nothing = torch.zeros(len(path), dtype=torch.int64)
    return Accepted(torch.tensor(path), nothing, torch.tensor(tokens), nothing, nothing.bool(), nothing.float())


def test_padding_of_trees_and_of_the_batch_is_left_out():
    tokens = torch.tensor([[5, -1, 6, -1], [7, 8, 9, 4], [1, 1, 1, 1]])
    parents = torch.tensor([[0, 0, 1, 0], [0, 0, 2, 3], [0, 0, 0, 0]])
    tree = build_tree(torch.tensor([1, 2, 3]), torch.tensor([4, 4, 1]), tokens, parents, 3)
    outcome = accepted(
        [[0, 1, 3, -1], [0, -1, -1, -1], [0, -1, -1, -1]], [[5, 6, 2, -1], [3, -1, -1, -1], [0, -1, -1, -1]]
    )
    first, second = drafted_trees(tree, outcome, requests=2)
    assert first.tokens == (1, 5, 6)
    assert first.parents == (-1, 0, 1)
    assert first.path == (0, 1, 2)
    assert first.emitted == (5, 6, 2)
    assert second.tokens == (2, 7, 8, 9, 4)
    assert second.parents == (-1, 0, 0, 2, 3)
    assert second.bonus == 3
    assert second.chance(1) is None


def test_chances_are_those_given_the_parent():
    tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 1]])
    scores = torch.tensor([[0.5, 0.25, 0.1]]).log()
    tree = build_tree(torch.tensor([1]), torch.tensor([4]), tokens, parents, 2, scores)
    [found] = drafted_trees(tree, accepted([[0, 1, -1]], [[5, 3, -1]]), requests=1)
    assert found.parents == (-1, 0, 0, 1)
    chances = [found.chance(node) for node in range(4)]
    assert chances[0] is None
    assert [round(chance, 5) for chance in chances[1:] if chance is not None] == [0.5, 0.25, 0.2]
    assert found.children() == [[1, 2], [3], [], []]
