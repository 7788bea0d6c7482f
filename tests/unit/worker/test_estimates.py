"""Estimated acceptance: guesses that are wrong by a factor are corrected, by depth and by temperature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle_server.speculation.tree import Tree, build_tree
from eagle_server.worker.budget.estimates import AcceptanceEstimates

CPU = torch.device("cpu")


def chain(guesses: list[float]) -> Tree:
    """One request whose tree is a chain with these conditional guesses; -1 is padding."""
    count = len(guesses)
    tokens = torch.tensor([[5 if guess >= 0 else -1 for guess in guesses]])
    scores = torch.tensor([guesses]).clamp(min=0).log().cumsum(1)
    return build_tree(torch.tensor([1]), torch.tensor([10]), tokens, torch.arange(count)[None], count, scores)


def test_before_any_count_an_estimate_is_the_guess() -> None:
    found = AcceptanceEstimates(CPU).estimate(chain([0.9, 0.5]), torch.tensor([0]))
    torch.testing.assert_close(found.scores.exp(), torch.tensor([[0.9, 0.45]]))
    torch.testing.assert_close(found.guesses.exp(), torch.tensor([[0.9, 0.5]]))


def test_estimates_become_what_is_observed_in_each_bin() -> None:
    estimates, random = AcceptanceEstimates(CPU), np.random.default_rng(0)
    chances = {
        (0, 1): 0.95,
        (0, 2): 0.6,
        (1, 1): 0.3,
        (1, 2): 0.1,
        (2, 1): 0.5,
        (2, 2): 0.9,
    }  # by temperature and depth, all guessed as 0.55
    for _ in range(400):
        for temperature_bin in (0, 1, 2):
            found = estimates.estimate(chain([0.55, 0.55]), torch.tensor([temperature_bin]))
            accepted = random.random(2) < [chances[temperature_bin, 1], chances[temperature_bin, 2]]
            places = np.full(2, temperature_bin), np.array([1, 2]), np.zeros(2, dtype=int)
            estimates.observe(found.guesses[0].numpy(), places, accepted)
    for temperature_bin in (0, 1, 2):
        first, second = (
            estimates.estimate(chain([0.55, 0.55]), torch.tensor([temperature_bin])).scores[0].exp().tolist()
        )
        assert abs(first - chances[temperature_bin, 1]) < 0.06
        assert abs(second / first - chances[temperature_bin, 2]) < 0.1


def test_a_child_never_outranks_its_parent() -> None:
    estimates = AcceptanceEstimates(CPU)
    for _ in range(200):
        found = estimates.estimate(chain([0.5, 0.95, 0.95]), torch.tensor([0]))
        accepted = np.array([False, True, True])
        nothing = np.zeros(3, dtype=int)
        estimates.observe(found.guesses[0].numpy(), (nothing, np.array([1, 2, 3]), nothing), accepted)
    logp = estimates.estimate(chain([0.5, 0.95, 0.95]), torch.tensor([0])).scores[0]
    assert (logp.diff() < 0).all()


def test_padding_is_never_worth_a_row() -> None:
    found = AcceptanceEstimates(CPU).estimate(chain([0.9, -1.0]), torch.tensor([0]))
    assert found.scores[0, 1] == -torch.inf


def test_second_children_are_corrected_for_themselves() -> None:
    """The drafter believes as much in every second child as in the first, but they are accepted half as often."""
    estimates, random = AcceptanceEstimates(CPU), np.random.default_rng(0)
    scores, parents = torch.tensor([[0.45, 0.45]]).log(), torch.zeros(1, 2, dtype=torch.int64)
    tree = build_tree(torch.tensor([1]), torch.tensor([10]), torch.tensor([[5, 6]]), parents, 1, scores)
    for _ in range(400):
        accepted = random.random(2) < [0.45, 0.2]
        places = np.zeros(2, dtype=int), np.ones(2, dtype=int), np.array([0, 1])
        estimates.observe(scores[0].numpy(), places, accepted)
    wanted = torch.tensor([[0.45, 0.2]])
    torch.testing.assert_close(estimates.estimate(tree, torch.tensor([0])).scores.exp(), wanted, atol=0.08, rtol=0)
    found = estimates.corrected(scores, torch.tensor([0]), 0)
    torch.testing.assert_close(found, estimates.estimate(tree, torch.tensor([0])).scores)


def test_native_counts_of_every_cycle_are_those_of_lessons() -> None:
    """Three requests, of which two drafted: a branched tree, and one with a node that was not proposed last."""
    counted, learned = AcceptanceEstimates(CPU), AcceptanceEstimates(CPU)
    if not counted.counts_all:
        pytest.skip("there are no native kernels")
    guesses = torch.tensor([[0.55, 0.31, 0.72, 0.88, 0.04], [0.8, 0.65, 0.15, 0.97, 0.33]]).log()
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 0, 0, 0, 0], [-1, 0, 1, 1, 3, 0]])
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5], [9, -1, -1, -1, -1, -1], [9, 1, 2, 3, 4, -1]])
    path = torch.tensor([[0, 1, 3, 5], [0, -1, -1, -1], [0, 1, 2, -1]])
    proposed = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 0, 0], [1, 0, 3, 2, 4]])
    verified = replace(Tree.linked(tokens, parents, torch.tensor([5, 6, 7]), 3), proposed=proposed)
    drafted = replace(verified.rows_of(torch.tensor([0, 2])), guesses=guesses, proposed=None)
    tried = {0: [1, 2, 3, 4, 5], 2: [1, 2, 3]}  # those whose parents were accepted
    later = {0: [0, 1, 0, 1, 0], 2: [0, 0, 1]}
    for _ in range(3):
        counted.count(drafted, verified, path, torch.tensor([0, 2]), (0, 2))
        for row, number in enumerate((0, 2)):
            nodes = np.array(tried[number])
            places = np.full(len(nodes), number), verified.depths[number].numpy()[nodes], np.array(later[number])
            accepted = np.isin(nodes, path[number].numpy())
            learned.observe(guesses[row].numpy()[proposed[number].numpy()[nodes - 1]], places, accepted)
    np.testing.assert_allclose(counted._accepted, learned._accepted)
    np.testing.assert_allclose(counted._expected, learned._expected, rtol=1e-6)
    torch.testing.assert_close(counted._ratios, learned._ratios, atol=1e-5, rtol=1e-5)
    with pytest.raises(IndexError):
        counted.count(drafted, replace(verified, proposed=proposed + 5), path, torch.tensor([0, 2]), (0, 2))
