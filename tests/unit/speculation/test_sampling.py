"""Drawing tokens: the order of transforms, ties, forbidden tokens, the distribution, and what a draw depends on."""

from __future__ import annotations

from collections import Counter

import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eagle_server.ops.sampling import draw as draw_module
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.ops.sampling.truncate import truncate
from eagle_server.plan import RequestSampling
from eagle_server.speculation.random import request_key
from eagle_server.speculation.sampling import SamplingBatch, draw, draw_rows
from tests.support.kernels import take
from tests.support.sampling import changed, request_sampling
from tests.support.scoring import token_probs

CPU = torch.device("cpu")
GREEDY = request_sampling(temperature=0.0)
SAMPLED = request_sampling(key=request_key(3, 0), temperature=1.0)


def one_draw(logits: Tensor, setting: RequestSampling, position: int = 9) -> int:
    tokens, _ = draw(logits.view(1, 1, -1), torch.tensor([[position]]), SamplingBatch.of([setting], CPU))
    return int(tokens)


def kept(logits: list[float], top_k: int = 1 << 40, top_p: float = 1.0) -> list[int]:
    row = torch.tensor(logits).view(1, 1, -1)
    found = truncate(row, torch.ones(1), torch.tensor([top_k]), torch.tensor([top_p]))
    return found[0, 0].isfinite().nonzero().flatten().tolist()


def test_top_p_counts_mass_within_the_top_k() -> None:
    """With .4 .3 .2 .1, the tokens .4 and .3 have 7/9 of the mass of the top three, and .7 of the mass of all four."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept(logits, 3, 0.75) == [0, 1]
    assert kept(logits, 3, 0.8) == [0, 1, 2]
    assert kept(logits, 4, 0.75) == [0, 1, 2]


def test_a_token_is_kept_while_the_mass_before_it_is_below_top_p() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().tolist()  # sums of halves are exact
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.75) == [0, 1]
    assert kept(logits, top_p=1e-9) == [0]


def test_top_p_of_one_keeps_tokens_whose_mass_rounds_away() -> None:
    """In float32 the mass before the second token is 1."""
    assert kept([0.0, -60.0, -90.0, -200.0], top_k=3) == [0, 1, 2]
    assert kept([0.0, -60.0, -90.0, -200.0], top_k=3, top_p=0.9999999) == [0]


def test_logits_that_are_equal_after_division_are_no_ties() -> None:
    close = torch.tensor([1.8125, 1.8125 + 2**-23])
    assert float(close[0] / 3) == float(close[1] / 3)
    assert truncate(close.view(1, 1, 2), torch.tensor([3.0]), torch.tensor([1]), torch.ones(1)).isfinite().tolist() == [
        [[False, True]]
    ]


def test_ties_go_to_the_smaller_token_id() -> None:
    assert kept([1.0, 2.0, 1.0, 2.0, 1.0], top_k=1) == [1]
    assert kept([1.0, 2.0, 1.0, 2.0, 1.0], top_k=3) == [0, 1, 3]
    assert kept([0.0] * 8, top_p=0.3) == [0, 1, 2]
    assert one_draw(torch.zeros(6), GREEDY) == 0


@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=12),
    st.integers(0, 13),
    st.sampled_from([0.1, 0.33, 0.6, 0.9, 0.999, 1.0]),
    st.sampled_from([0.5, 0.7, 1.0, 1.7]),
)
def test_the_kept_tokens_and_their_distribution_are_the_references(values, top_k, top_p, temperature) -> None:
    logits = torch.tensor(values, dtype=torch.float32) / 3
    expected = token_probs(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    limits = torch.tensor([temperature]), torch.tensor([top_k or 1 << 40]), torch.tensor([top_p])
    found = (truncate(logits.view(1, 1, -1), *limits) / temperature).softmax(-1)[0, 0]
    if found.tolist() != pytest.approx(expected, abs=1e-6):  # a running sum that equals top_p up to rounding
        nudged = [token_probs(logits, temperature=temperature, top_k=top_k, top_p=top_p + e) for e in (-1e-6, 1e-6)]
        assert any(found.tolist() == pytest.approx(each, abs=1e-6) for each in nudged)


def test_a_draw_is_the_best_of_truncated_logits_and_noise() -> None:
    """Mixed settings in one batch with several rows each: every draw follows its own formula."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 4, 40, generator=generator) * 3
    positions = torch.tensor([[11, 12, 12, 13], [0, 1, 2, 2], [5, 6, 6, 6], [70, 71, 72, 73], [9, 10, 10, 11]])
    settings = [
        GREEDY,
        changed(SAMPLED, temperature=0.7),
        changed(SAMPLED, key=8, top_k=5),
        changed(GREEDY, key=4),
        changed(SAMPLED, key=-5, temperature=1.4, top_k=20, top_p=0.8),
    ]
    tokens, scores = draw(logits.clone(), positions, SamplingBatch.of(settings, CPU))
    for request, setting in enumerate(settings):
        for row in range(4):
            expected = logits[request, row].double()
            if setting.params.temperature:
                p = token_probs(
                    expected,
                    temperature=setting.params.temperature,
                    top_k=setting.params.top_k,
                    top_p=setting.params.top_p,
                )
                noise = gumbel(torch.tensor([setting.key]), positions[request, row : row + 1], 40)[0]
                expected = torch.tensor(p, dtype=torch.float64).log() + noise
            assert int(tokens[request, row]) == int(expected.argmax())
            assert not bool(scores[request, row].isnan())


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 3, 30, generator=generator)
    positions = torch.tensor([[4, 5, 5], [9, 10, 11], [4, 5, 6], [1, 2, 2], [30, 31, 32], [7, 8, 8]])
    settings = [
        changed(SAMPLED, key=key, temperature=0.5 + key / 4, top_k=key % 3 * 4, top_p=(1.0, 0.7)[key % 2])
        for key in range(5)
    ] + [GREEDY]
    together, _ = draw(logits.clone(), positions, SamplingBatch.of(settings, CPU))
    for request, setting in enumerate(settings):
        own = slice(request, request + 1)
        alone, _ = draw(logits[own].clone(), positions[own], SamplingBatch.of([setting], CPU))
        assert alone.tolist() == together[own].tolist()
        for row in range(3):
            assert one_draw(logits[request, row], setting, int(positions[request, row])) == int(together[request, row])


def test_rows_that_fill_one_position_see_the_same_noise() -> None:
    tokens, _ = draw(torch.zeros(1, 6, 50), torch.tensor([[5, 6, 6, 7, 7, 6]]), SamplingBatch.of([SAMPLED], CPU))
    root, first, second, deep, deeper, third = tokens[0].tolist()
    assert first == second == third
    assert deep == deeper
    assert len({root, first, deep}) == 3


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (1.0, 0.7, 1.3), (0.0, 0.7, 0.0)])
def test_draws_of_some_rows_are_bit_identical_to_those_of_all(temperatures: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 5, 1003, generator=generator) * 2
    positions = torch.tensor([[4, 5, 5, 6, 7], [9, 10, 10, 10, 10], [30, 31, 32, 32, 33]])
    settings = [changed(SAMPLED, key=n, temperature=t) for n, t in enumerate(temperatures)]
    sampling = SamplingBatch.of(settings, CPU)
    assert not sampling.edits_logits
    tokens, scores = draw(logits, positions, sampling)
    for _ in range(20):
        rows = (torch.rand(15, generator=generator) < 0.6).nonzero()[:, 0]
        some, own = draw_rows(logits.view(15, -1)[rows], positions, rows, sampling)
        assert torch.equal(some, tokens.view(-1)[rows])
        assert torch.equal(own, scores.view(-1)[rows])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_drawn_before_they_are_allowed(temperature: float) -> None:
    """Three forbidden tokens and four rows. The last two rows may draw them. The other request forbids no token."""
    base = SAMPLED if temperature else GREEDY
    logits = torch.full((2, 4, 8), -40.0)
    logits[:, :, [1, 4, 6]] = 40.0
    settings = [changed(base, stop_ids=(1, 4, 6), allowed_from=22), base]
    positions = torch.tensor([[20, 21, 22, 23], [20, 21, 22, 23]])
    given_logits = logits.clone()
    tokens, _ = draw(given_logits, positions, SamplingBatch.of(settings, CPU))
    assert not {1, 4, 6} & set(tokens[0, :2].tolist())
    assert set(tokens[0, 2:].tolist()) | set(tokens[1].tolist()) <= {1, 4, 6}
    assert torch.equal(given_logits, logits), "log-probabilities are read from these"


def test_forbidden_tokens_count_neither_in_top_k_nor_in_top_p() -> None:
    logits = torch.tensor([9.0, 8.0, 3.0, 2.0, 1.0])
    setting = changed(SAMPLED, stop_ids=(0, 1), allowed_from=100, top_k=2, top_p=0.99)
    assert {one_draw(logits, setting, position) for position in range(99)} == {2, 3}


def test_nan_logits_show_in_the_score() -> None:
    logits = torch.zeros(2, 1, 5)
    logits[1, 0, 3] = float("nan")
    for setting in (GREEDY, SAMPLED, changed(SAMPLED, top_k=2)):
        _, scores = draw(logits.clone(), torch.tensor([[1], [1]]), SamplingBatch.of([setting] * 2, CPU))
        assert scores.isnan().flatten().tolist() == [False, True]


DRAWS, ALPHA = 130_000, 1e-6
SETTINGS = {
    "plain": {},
    "cooler": {"temperature": 0.8},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.85},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
}
LOGITS = torch.tensor([0.3, -1.2, 1.1, 0.0, -0.4, 0.9, -2.0, 0.5])


def p_value_of_pairs(setting: RequestSampling) -> float:
    """Chi-squared test over the joint cells of draws at two neighbouring positions. Each pair has its own seed."""
    pieces = []
    for start in range(0, DRAWS, 13_000):
        settings = [RequestSampling(setting.params, request_key(seed, 0)) for seed in range(start, start + 13_000)]
        logits, positions = LOGITS.expand(13_000, 2, -1).clone(), torch.tensor([[50, 51]]).expand(13_000, -1)
        pieces.append(draw(logits, positions, SamplingBatch.of(settings, CPU))[0])
    counts = Counter(map(tuple, torch.cat(pieces).tolist()))
    p = token_probs(
        LOGITS, temperature=setting.params.temperature, top_k=setting.params.top_k, top_p=setting.params.top_p
    )
    expected = {(a, b): p[a] * p[b] * DRAWS for a in range(8) for b in range(8) if p[a] * p[b]}
    assert counts.keys() <= expected.keys()
    assert min(expected.values()) > 5
    statistic = sum((counts[cell] - mean) ** 2 / mean for cell, mean in expected.items())
    return float(scipy.stats.chi2.sf(statistic, len(expected) - 1))


# The gate has the one in which all of them are together.
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.deep
def test_draws_follow_the_distribution_and_are_independent_between_positions(name: str) -> None:
    """130,000 pairs in 64 cells. The test rejects a correct distribution with probability 1e-6. It misses a total
    variation of .02 with probability below 1e-6."""
    assert p_value_of_pairs(changed(SAMPLED, **SETTINGS[name])) > ALPHA


@pytest.mark.deep
def test_noise_that_is_a_tenth_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take("torch", monkeypatch)
    monkeypatch.setattr(draw_module, "gumbel", lambda *args: gumbel(*args) * 0.9)
    assert p_value_of_pairs(SAMPLED) < ALPHA


@pytest.mark.deep
def test_noise_shared_by_neighbouring_positions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take("torch", monkeypatch)
    monkeypatch.setattr(draw_module, "gumbel", lambda keys, where, *args: gumbel(keys, where // 2 * 2, *args))
    assert p_value_of_pairs(SAMPLED) < ALPHA
