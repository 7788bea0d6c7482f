"""N-gram tries with the noise of the target's draws: what they prefer, and what stays as it is."""

from __future__ import annotations

import pytest
import torch

from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.plan import Decode
from eagle_server.speculation.random import request_key
from eagle_server.worker.drafters.ngram.coupled_estimates import CoupledEstimates, coupled_estimates
from eagle_server.worker.drafters.ngram.drafter import NgramTries
from tests.support.sampling import request_sampling

STEPS, NODES = 3, 40
# After 1 came 2 and 3, and after 1 2 came 4 and 5, all equally often; 6 came after 1 3.
TEXT = [1, 2, 4, 8, 1, 3, 6, 8, 1, 2, 5, 8, 1, 3, 6, 8, 1, 2, 4, 8, 1, 2, 5, 8, 9, 1]


def decode(seed: int, temperature: float = 1.0, tokens: list[int] = TEXT) -> Decode:
    return Decode(
        0, len(tokens) - 1, tokens[-1], request_sampling(request_key(seed, 0), temperature=temperature), tokens
    )


def noise(each: Decode, depth: int) -> torch.Tensor:
    return gumbel(torch.tensor([each.sampling.key]), torch.tensor([each.seq_len + 1 + depth]), 16)[0]


def test_half_of_an_estimate_follows_from_the_noise() -> None:
    each, estimates = decode(3), {2: 0.5, 3: 0.3}
    for depth in range(STEPS):
        g = noise(each, depth).double()
        scores = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
        scores[:2] += g[[2, 3]]
        chances = scores.softmax(0)
        found = CoupledEstimates(each).given_noise(depth, estimates)
        assert found[2] == pytest.approx((0.5 + float(chances[0])) / 2, rel=1e-5)
        assert found[3] == pytest.approx((0.3 + float(chances[1])) / 2, rel=1e-5)
    assert CoupledEstimates(each).given_noise(0, {}) == {}
    assert sum(CoupledEstimates(each).given_noise(0, {2: 0.7, 3: 0.3}).values()) <= 1


def test_equally_frequent_continuations_rank_by_the_noise_of_their_depth() -> None:
    """4 and 5 followed 1 2 twice each, so the noise two tokens ahead decides between them."""
    firsts = set()
    for seed in range(12):
        each = decode(seed)
        trie = NgramTries(STEPS, NODES).trie_of(each)
        below = [
            token for token, parent in zip(trie.tokens, trie.parents, strict=True) if parent == trie.tokens.index(2) + 1
        ]
        below = [token for token in below if token in (4, 5)]
        g = noise(each, 1)
        assert below[0] == (4 if g[4] > g[5] else 5)
        firsts.add(below[0])
        chances = [1.0]
        for parent, estimate in zip(trie.parents, trie.estimates, strict=True):
            chances.append(chances[parent] * estimate)
        assert chances == sorted(chances, reverse=True)
    assert firsts == {4, 5}


def test_greedy_requests_and_uncoupled_tries_estimate_by_counts_alone() -> None:
    plain = NgramTries(STEPS, NODES, coupling=False).trie_of(decode(5))
    assert coupled_estimates(decode(5, temperature=0.0)) is None
    assert NgramTries(STEPS, NODES).trie_of(decode(5, temperature=0.0)) == plain
    assert NgramTries(STEPS, NODES).trie_of(decode(5)) != plain
