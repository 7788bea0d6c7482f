"""Top-k log-probabilities: torch twin and kernel against a stable sort and log_softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_server.ops.sampling import topk
from eagle_server.ops.sampling.correction import Correction, correct_guesses
from eagle_server.ops.sampling.draw import draw_tokens
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.ops.sampling.topk import MAX_TOPK, DrawNoise, score_children, topk_logprobs
from eagle_server.ops.tree.candidates import Children
from eagle_server.speculation.random import request_key
from tests.support.covering import covering
from tests.support.kernels import DEVICE, each_variant, generator, on_device, with_triton

INF = float("inf")
POOL = (torch.int64, torch.float32, torch.float32)  # tokens, scores, guesses


def noise_of(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, positions and temperatures of n rows; every third row is greedy."""
    temperature = torch.tensor([0.7, 0.0, 1.6])[torch.arange(n) % 3]
    return torch.tensor([request_key(seed, 0) for seed in range(n)]), torch.arange(n) * 977 + 5, temperature


def scores_by_hand(logits: Tensor, noise: tuple[Tensor, Tensor, Tensor], ids: Tensor) -> Tensor:
    """The perturbed scores in float64. The noise is taken from the whole target vocabulary."""
    keys, positions, temperature = noise
    t = temperature.double()[:, None]
    added = gumbel.variants["torch"](keys, positions, int(ids.max()) + 1)[:, ids].double()
    return torch.where(t > 0, logits.double() / torch.where(t > 0, t, 1.0) + added, logits.double())


@each_variant(topk_logprobs)
@pytest.mark.parametrize(
    ("n", "vocab", "k", "dtype"),
    covering(
        [(1, 7, 7), (3, 7, 1), (5, 1000, 4), (3, 4099, 8), (2, 2049, 16), (1, 1, 1)],
        [torch.float32, torch.bfloat16],
        together=1,
    ),
)
def test_the_best_come_first_with_their_log_probabilities(
    variant: str, n: int, vocab: int, k: int, dtype: torch.dtype
) -> None:
    logits = (4 * torch.randn(n, vocab, generator=generator(n, vocab))).to(dtype)
    logp, ids = (part.cpu() for part in topk_logprobs(logits.to(DEVICE), k))
    assert (logp.dtype, ids.dtype) == (torch.float32, torch.int64)
    exact = logits.double().log_softmax(1)
    best = exact.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(logp.double(), best.values[:, :k], rtol=1e-5, atol=1e-5)
    if dtype == torch.float32:  # values differ
        assert torch.equal(ids, best.indices[:, :k])
    assert torch.equal(exact.gather(1, ids), best.values[:, :k])
    assert all(len(set(row)) == k for row in ids.tolist())


@with_triton
@pytest.mark.parametrize("vocab", [16, 1000, 4099])
def test_ties_go_to_the_lower_id(variant: str, vocab: int) -> None:
    """Few different values, so that most tie, within a block and across blocks."""
    logits = torch.randint(3, (4, vocab), generator=generator(vocab)).float()
    logits[3] = 0.0
    _, ids = topk_logprobs(logits.to(DEVICE), 12)
    assert torch.equal(ids.cpu(), logits.sort(dim=1, descending=True, stable=True).indices[:, :12])


@each_variant(topk_logprobs)
def test_forbidden_tokens_and_far_values_keep_the_sum_exact(variant: str) -> None:
    """One block holds only -inf, another only very negative logits. The sum must count both correctly."""
    logits = torch.full((2, 4099), -INF)
    logits[0, 4097] = -200.0
    logits[1, [3, 4098]] = torch.tensor([-200.0, -201.0])
    logp, ids = topk_logprobs(logits.to(DEVICE), 3)
    expected = logits.log_softmax(1).sort(dim=1, descending=True).values[:, :3]
    torch.testing.assert_close(logp.cpu(), expected, rtol=0, atol=1e-4)
    assert int(ids[0, 0]) == 4097
    assert ids[1, :2].tolist() == [3, 4098]
    assert all(len(set(row)) == 3 for row in ids.tolist())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
@each_variant(topk_logprobs)
@pytest.mark.parametrize("vocab", [9, 4099])
def test_no_logits_produce_an_id_out_of_range(variant: str, vocab: int) -> None:
    logits = torch.zeros(5, vocab)
    logits[0] = float("nan")
    logits[1, vocab - 1] = float("nan")
    logits[2] = -INF
    logits[3, vocab - 1] = INF
    logits[4, : vocab - 3] = float("nan")
    logp, ids = topk_logprobs(logits.to(DEVICE), 8)
    assert bool(((ids >= 0) & (ids < vocab)).all())
    assert not logp[:, 0].isfinite().any()
    if variant != "torch":
        assert vocab - 1 not in ids[1].tolist(), "NaN ranks last"
    keys, positions, _ = noise_of(5)
    noise = on_device(keys, positions, torch.full((5,), 0.8))
    noisy_logp, noisy_ids = (part.cpu() for part in topk_logprobs(logits.to(DEVICE), 8, noise=DrawNoise(*noise)))
    assert bool(((noisy_ids >= 0) & (noisy_ids < vocab)).all())
    torch.testing.assert_close(noisy_logp.isfinite(), logp.isfinite())
    if variant != "torch":
        assert vocab - 1 not in noisy_ids[1].tolist(), "NaN ranks last"


@each_variant(topk_logprobs)
@pytest.mark.parametrize(
    ("n", "vocab", "k", "mapped", "dtype"),
    covering(
        [(1, 7, 7), (4, 7, 1), (5, 1000, 4), (4, 4099, 8), (3, 2049, 16), (1, 1, 1), (3, 60, MAX_TOPK + 1)],
        [False, True],
        [torch.float32, torch.bfloat16],
        together=2,
    ),
)
def test_coupled_children_are_the_best_by_logits_and_noise(
    variant: str, n: int, vocab: int, k: int, mapped: bool, dtype: torch.dtype
) -> None:
    """Greedy and stochastic rows in one call, as views of wider rows."""
    source = generator(n, vocab)
    wide = (3 * torch.randn(n, vocab + 5, generator=source)).to(dtype)
    wide[:, 1 : vocab // 2 : 3] = -INF
    logits, noise = wide[:, :vocab], noise_of(n)
    ids = torch.randperm(3 * vocab, generator=source)[:vocab] if mapped else torch.arange(vocab)
    drafted = wide.to(DEVICE)[:, :vocab]
    given = ids.to(DEVICE) if mapped else None
    logp, found = (part.cpu() for part in topk_logprobs(drafted, k, given, DrawNoise(*on_device(*noise))))
    tokens = torch.zeros(3 * vocab, dtype=torch.int64).index_copy(0, ids, torch.arange(vocab))[found]  # the draft's
    assert torch.equal(ids[tokens], found)
    assert (logp.dtype, tokens.dtype) == (torch.float32, torch.int64)
    scores = scores_by_hand(logits, noise, ids).log_softmax(1)
    torch.testing.assert_close(logp.double(), scores.sort(dim=1, descending=True).values[:, :k], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp.double(), scores.gather(1, tokens), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == k for row in tokens.tolist())
    plain_logp, plain_tokens = (part.cpu() for part in topk_logprobs(drafted, k))
    assert torch.equal(logp[1::3], plain_logp[1::3]), "greedy rows have no noise"
    if dtype == torch.float32:  # values differ
        assert torch.equal(tokens[1::3], plain_tokens[1::3])


@each_variant(topk_logprobs, draw_tokens)
def test_with_equal_logits_the_first_child_is_the_draw(variant: str) -> None:
    """Drafted in any order of the vocabulary: the map to target ids finds each token's own noise."""
    n, vocab = 24, 4099
    logits, noise = 2 * torch.randn(n, vocab, generator=generator(n)), on_device(*noise_of(n))
    drawn, _ = draw_tokens(logits.to(DEVICE), *noise)
    _, children = topk_logprobs(logits.to(DEVICE), 3, noise=DrawNoise(*noise))
    assert torch.equal(children[:, 0], drawn)
    ids = torch.randperm(vocab, generator=generator(vocab))
    _, children = topk_logprobs(logits[:, ids].to(DEVICE), 3, ids.to(DEVICE), DrawNoise(*noise))
    assert torch.equal(children[:, 0], drawn)


@each_variant(score_children, topk_logprobs)
@pytest.mark.parametrize(
    ("bs", "nodes", "vocab", "k", "noisy", "mapped", "corrects"),
    covering(
        [(1, 1, 7, 7), (1, 4, 1000, 4), (3, 4, 4099, 4), (2, 3, 2049, 16), (2, 1, 60, MAX_TOPK + 1)],
        [False, True],
        [False, True],
        [False, True],
        together=2,
    ),
)
def test_a_level_is_scored_as_by_the_separate_operations(
    variant: str,
    bs: int,
    nodes: int,
    vocab: int,
    k: int,
    noisy: bool,
    mapped: bool,
    corrects: bool,
) -> None:
    """In every bit, and into views of a pool, whose other levels stay as they are."""
    source = generator(bs, nodes, vocab)
    logits = (3 * torch.randn(bs * nodes, vocab, generator=source)).to(DEVICE)
    logits[0, : vocab - k] = -INF
    noise = DrawNoise(*on_device(*noise_of(bs)), 2) if noisy else None
    ids = torch.randperm(3 * vocab, generator=source)[:vocab].to(DEVICE) if mapped else None
    bins = on_device(torch.randn(2, 3, 2, 5, generator=source), torch.tensor([-4.0, -2.0, -1.0, -0.1]))
    corrected = Correction(*bins, (torch.arange(bs) % 2).to(DEVICE), 1, -0.05) if corrects else None
    above = -torch.rand(bs, nodes, generator=source).to(DEVICE)
    pool = Children(*(torch.full((bs, 2 + nodes * k + 3), 9, device=DEVICE).to(dtype) for dtype in POOL))
    level = Children(*(part[:, 2 : 2 + nodes * k].unflatten(1, (nodes, k)) for part in pool))
    found = score_children(logits, above, level, ids, noise, corrected)
    logp, tokens = topk_logprobs(logits, k, ids, noise)
    guesses = logp.view(bs, nodes, k)
    chances = guesses if corrected is None else correct_guesses(guesses, corrected)
    assert torch.equal(found.tokens, tokens.view(bs, nodes, k))
    assert torch.equal(found.guesses, guesses)
    assert torch.equal(found.scores, above[:, :, None] + chances)
    for part in pool:
        assert bool((part[:, :2] == 9).all()) and bool((part[:, 2 + nodes * k :] == 9).all())


@with_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_score_of_a_child_is_bit_for_bit_the_score_of_the_draw(variant: str, dtype: torch.dtype) -> None:
    n, vocab, pieces = 24, 4099, 3
    logits, noise = torch.randn(n, vocab, generator=generator(n)).to(dtype).to(DEVICE), on_device(*noise_of(n))
    values, mass = torch.empty(n, pieces, 1, device=DEVICE), torch.empty(n, pieces, 2, device=DEVICE)
    tokens = torch.empty(n, pieces, 1, dtype=torch.int32, device=DEVICE)
    sizes = (vocab, vocab, 1, 1, 0)
    topk._block_kernel[n, pieces](logits, *noise, None, values, tokens, mass, *sizes, BLOCK=2048)
    _, scores = draw_tokens(logits.float(), *noise)
    assert torch.equal(values.amax((1, 2)), scores)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
@each_variant(topk_logprobs)
@pytest.mark.parametrize("vocab", [9, 4099])
def test_children_that_are_not_allowed_have_no_probability(variant: str, vocab: int) -> None:
    """Noise does not raise a logit of -inf: allowed tokens come first, and the sum counts them alone."""
    n, allowed = 6, torch.tensor([vocab - 2, 3])
    logits = torch.full((n, vocab), -INF)
    logits[:, allowed] = torch.tensor([-50.0, -51.0])
    logits[2] = -INF
    noise = noise_of(n)
    logp, tokens = (part.cpu() for part in topk_logprobs(logits.to(DEVICE), 4, noise=DrawNoise(*on_device(*noise))))
    best = scores_by_hand(logits, noise, torch.arange(vocab)).log_softmax(1).topk(4, dim=1)
    some = [0, 1, 3, 4, 5]
    torch.testing.assert_close(logp.double()[some], best.values[some], rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens[some, :2], best.indices[some, :2])
    assert bool(logp[some, 2:].isneginf().all()) and bool(logp[2].isnan().all())
    assert all(len(set(row)) == 4 and max(row) < vocab for row in tokens.tolist())
