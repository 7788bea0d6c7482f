"""The candidate pool: ties, NaN and the growth of the frontier."""

from __future__ import annotations

import torch

from eagle_server.speculation.candidates import CandidatePool
from eagle_server.speculation.draft_input import DraftWindow, Frontier
from tests.support.drafts import example_pool


def test_ties_go_to_the_lower_pool_index_so_that_parents_stay() -> None:
    """A child with probability 1 ties with its parent. The parent has the lower index and comes first."""
    pool = CandidatePool(torch.tensor([[1, 2]]), torch.tensor([[-1.0, -1.0]]))
    pool.add(torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[-1.0, -1.0], [-1.0, -1.0]]]))
    assert [pool.best(count).selected_index.tolist() for count in (1, 2, 3, 5)] == [
        [[0]],
        [[0, 1]],
        [[0, 1, 2]],
        [[0, 1, 2, 3, 4]],
    ]


def test_nan_scores_come_last() -> None:
    nan = float("nan")
    pool = CandidatePool(torch.tensor([[1, 2]]), torch.tensor([[nan, -5.0]]))
    pool.add(torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[nan, nan], [-6.0, nan]]]))
    assert pool.best(2).selected_index.tolist() == [[1, 4]]
    assert pool.best(4).selected_index.tolist() == [[0, 1, 2, 4]]


def test_a_node_inherits_its_parents_lineage_and_no_one_elses() -> None:
    """In the worked example both nodes of level 2 descend from column 0."""
    _, second = example_pool()
    assert second.topk_index.tolist() == [[21, 22]]
    assert second.ancestor_mask.tolist() == [[[True, False, True, False], [True, False, False, True]]]


def test_a_nodes_feedback_is_its_parents() -> None:
    window = DraftWindow.of(2, 4, torch.device("cpu"))
    frontier = Frontier.first(torch.zeros(1, 2), torch.zeros(1, 2).long(), torch.zeros(2, 1), window)
    scores = torch.tensor([[[-9.0, -8.0], [-1.0, -2.0]]])
    following, chosen = frontier.advance(torch.tensor([[[1, 2], [3, 4]]]), scores, torch.tensor([[5.0], [6.0]]))
    assert chosen.tolist() == [[2, 3]]
    assert following.topk_index.tolist() == [[3, 4]]
    assert following.hidden_states.tolist() == [[6.0], [6.0]]
