"""The noise: its distribution, its independence across keys and positions, and that it depends on nothing else.

Every statistical test rejects a correct distribution with probability 1e-6. The keys are fixed, so results repeat.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch

from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.speculation.random import TARGET_STREAM, TokenNoise, request_key

ALPHA = 1e-6
SEEDS = 4000


@pytest.fixture(scope="module")
def keys() -> torch.Tensor:
    return torch.tensor([request_key(seed, 0) for seed in range(SEEDS)])


def uniform(noise: torch.Tensor) -> np.ndarray:
    """Gumbel noise mapped back to uniform noise in (0, 1)."""
    return torch.exp(-torch.exp(-noise.double())).numpy()


def dependence(one: np.ndarray, other: np.ndarray) -> float:
    """p-value of independence of two uniforms: chi-squared over the 8 x 8 cells of their joint distribution."""
    counts, _, _ = np.histogram2d(one, other, bins=8, range=[[0, 1], [0, 1]])
    expected = len(one) / 64
    return float(scipy.stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), 63))


def test_the_noise_is_standard_gumbel(keys: torch.Tensor) -> None:
    """Kolmogorov-Smirnov on 200,000 values of many keys, and of one key over many positions."""
    for noise in (
        gumbel(keys, torch.full_like(keys, 17), 50),
        gumbel(keys[:1].expand(SEEDS), torch.arange(SEEDS), 50),
        gumbel(keys[:1], torch.tensor([5]), 200_000),
    ):
        assert noise.dtype is torch.float32
        assert bool(noise.isfinite().all())
        assert scipy.stats.kstest(noise.flatten().numpy(), scipy.stats.gumbel_r.cdf).pvalue > ALPHA


def test_the_tail_that_picks_rare_tokens_is_right() -> None:
    """P(G > t) is about exp(-t): counts beyond 10 and 12 in twenty million values are Poisson."""
    counts = {10: 0, 12: 0}
    values = 20_000_000
    for position in range(10):
        noise = gumbel(torch.tensor([request_key(1, 0)]), torch.tensor([position + 1]), values // 10)
        for threshold in counts:
            counts[threshold] += int((noise > threshold).sum())
    for threshold, count in counts.items():
        expected = values * -math.expm1(-math.exp(-threshold))
        assert min(scipy.stats.poisson.cdf(count, expected), scipy.stats.poisson.sf(count - 1, expected)) > ALPHA / 2


@pytest.mark.parametrize("distance", [1, 2, 7, 256])
def test_positions_tokens_seeds_and_choices_are_independent(keys: torch.Tensor, distance: int) -> None:
    here = torch.full_like(keys, 40)
    noise = gumbel(keys, here, 300)
    first, spread = uniform(noise[:, :40]).ravel(), uniform(gumbel(keys, here + distance, 40)).ravel()
    assert dependence(first, spread) > ALPHA
    assert dependence(first, uniform(noise[:, distance : distance + 40]).ravel()) > ALPHA
    assert dependence(first, np.roll(uniform(noise[:, :40]), distance, axis=0).ravel()) > ALPHA
    choices = torch.tensor([request_key(seed, distance) for seed in range(SEEDS)])
    assert dependence(first, uniform(gumbel(choices, here, 40)).ravel()) > ALPHA
    streams = torch.tensor([request_key(seed, 0, TARGET_STREAM + 1) for seed in range(SEEDS)])
    assert dependence(first, uniform(gumbel(streams, here, 40)).ravel()) > ALPHA


def test_the_test_of_independence_sees_a_shared_key(keys: torch.Tensor) -> None:
    """A mixture that shares one position in ten."""
    here = torch.full_like(keys, 40)
    mostly = torch.where(torch.arange(SEEDS) % 10 == 0, here, here + 1)
    assert dependence(uniform(gumbel(keys, here, 40)).ravel(), uniform(gumbel(keys, mostly, 40)).ravel()) < ALPHA


def test_a_row_depends_on_its_key_and_position_only(keys: torch.Tensor) -> None:
    """A row does not depend on its place in the batch, on other rows, or on the vocabulary size."""
    positions = torch.arange(SEEDS)
    whole = gumbel(keys, positions, 64)
    for row in (0, 1, 999, SEEDS - 1):
        assert torch.equal(gumbel(keys[row : row + 1], positions[row : row + 1], 64)[0], whole[row])
    assert torch.equal(gumbel(keys, positions, 33), whole[:, :33])
    order = torch.randperm(SEEDS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(keys[order], positions[order], 64), whole[order])


def test_keys_differ_by_seed_choice_and_stream() -> None:
    seeds = [0, 1, 2, 256, 512, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 2]  # 256 is choice 1, if seeds are mixed alike
    found = {request_key(seed, choice, stream) for seed in seeds for choice in range(20) for stream in range(3)}
    assert len(found) == len(seeds) * 60
    assert all(-(2**63) <= key < 2**63 for key in found)


def test_the_generator_is_splitmix64() -> None:
    """The published first outputs for state 0 belong to counters GAMMA, 2 GAMMA, ... These are a row with mix 0."""
    bits = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [-math.log(-math.log1p(-(value >> 11) * 2.0**-53)) for value in bits]
    noise = gumbel(torch.tensor([0]), torch.tensor([0]), 3)[0].tolist()
    assert noise == pytest.approx(expected, rel=1e-5)


def test_every_64_bit_seed_has_a_key_of_its_own() -> None:
    seeds = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1]
    found = [request_key(seed, 0) for seed in seeds]
    assert torch.tensor(found).unique().numel() == len(seeds)  # each fits int64


def test_the_hosts_noise_of_single_tokens_is_the_devices() -> None:
    """The hash and the uniform numbers are the same bits, so only the last bits of the logarithms may differ."""
    for key in (0, -1, 2**63 - 1, -(2**63), request_key(7, 1)):
        for position in (0, 1, 12345, 2**40):
            expected = gumbel(torch.tensor([key]), torch.tensor([position]), 2000)[0]
            noise = TokenNoise(key, position)
            found = torch.tensor([noise(token) for token in range(2000)])
            torch.testing.assert_close(found, expected, rtol=3e-7, atol=3e-7)
