"""Candidates: ties, NaN and the nodes of the next draft step."""

from __future__ import annotations

import torch

from eagle_server.attention.spec_info import DraftWindow, EagleDraftInput
from eagle_server.ops.tree.candidates import Children
from tests.support.drafts import Pool, example_pool, scored


def selected(first: Children, second: Children, count: int) -> list[int]:
    """The tokens of the tree of the best candidates."""
    return Pool([first, second], []).tree(count).tokens[0, 1:].tolist()


def test_ties_go_to_the_lower_number_so_that_parents_stay() -> None:
    """A child with probability 1 ties with its parent. The parent has the lower number and comes first."""
    first = scored(torch.tensor([[1, 2]]), torch.tensor([[-1.0, -1.0]]))
    second = scored(torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[-1.0, -1.0], [-1.0, -1.0]]]))
    found = [selected(first, second, count) for count in (1, 2, 3, 5)]
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5]]


def test_nan_scores_come_last() -> None:
    nan = float("nan")
    first = scored(torch.tensor([[1, 2]]), torch.tensor([[nan, -5.0]]))
    second = scored(torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[nan, nan], [-6.0, nan]]]))
    assert selected(first, second, 2) == [2, 5]
    assert selected(first, second, 4) == [1, 2, 3, 5]


def test_there_are_no_more_nodes_than_candidates() -> None:
    first = scored(torch.tensor([[1, 2]]), torch.tensor([[-1.0, -2.0]]))
    assert Pool([first], []).tree(5).tokens.tolist() == [[77, 1, 2]]


def test_a_node_inherits_its_parents_lineage_and_no_one_elses() -> None:
    """In the worked example both nodes of level 2 descend from column 0."""
    _, second = example_pool()
    assert second.topk_index.tolist() == [[21, 22]]
    assert second.ancestor_mask.tolist() == [[[True, False, True, False], [True, False, False, True]]]


def test_a_nodes_feedback_is_its_parents() -> None:
    window = DraftWindow.of(2, 4, torch.device("cpu"))
    frontier = EagleDraftInput.first(torch.zeros(1, 2), torch.zeros(1, 2).long(), torch.zeros(2, 1), window)
    scores = torch.tensor([[[-9.0, -8.0], [-1.0, -2.0]]])
    following, chosen = frontier.advance(torch.tensor([[[1, 2], [3, 4]]]), scores, torch.tensor([[5.0], [6.0]]))
    assert chosen.tolist() == [[2, 3]]
    assert following.topk_index.tolist() == [[3, 4]]
    assert following.parent_states.tolist() == [[6.0], [6.0]]
