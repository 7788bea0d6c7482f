"""Estimated acceptance: guesses that are wrong by a factor are corrected, by depth and by temperature."""

from __future__ import annotations

import numpy as np
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
    torch.testing.assert_close(found.path_logp.exp(), torch.tensor([[0.9, 0.45]]))
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
            estimates.estimate(chain([0.55, 0.55]), torch.tensor([temperature_bin])).path_logp[0].exp().tolist()
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
    logp = estimates.estimate(chain([0.5, 0.95, 0.95]), torch.tensor([0])).path_logp[0]
    assert (logp.diff() < 0).all()


def test_padding_is_never_worth_a_row() -> None:
    found = AcceptanceEstimates(CPU).estimate(chain([0.9, -1.0]), torch.tensor([0]))
    assert found.path_logp[0, 1] == -torch.inf


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
    torch.testing.assert_close(estimates.estimate(tree, torch.tensor([0])).path_logp.exp(), wanted, atol=0.08, rtol=0)
    found = estimates.corrected(scores, torch.tensor([0]), 0)
    torch.testing.assert_close(found, estimates.estimate(tree, torch.tensor([0])).path_logp)
