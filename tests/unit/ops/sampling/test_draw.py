"""Gumbel noise and sampling: kernels against their torch twins, and sampling against plain arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle_server.ops.sampling.draw import draw_tokens
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.speculation import sampling
from eagle_server.speculation.bad_words import ANY, PATH_START
from eagle_server.speculation.random import request_key
from eagle_server.speculation.transforms import PenalizerState
from tests.support.kernels import DEVICE, each_variant, generator, on_device, take
from tests.support.sampling import request_sampling
from tests.support.trees import tree_of

NEAR_TIE = 1e-4  # scores this close may be rounded either way (docs/architecture.md)
INF = float("inf")


def keys_of(n: int) -> Tensor:
    return torch.tensor([request_key(seed, 0) for seed in range(n)])


def best_by_hand(logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor) -> Tensor:
    """Scores [n, V] in float64."""
    rows = []
    for row, t in enumerate(temperature.tolist()):
        noise = gumbel.variants["torch"](keys[row : row + 1], positions[row : row + 1], logits.shape[1])[0]
        rows.append(logits[row].double() if t == 0 else logits[row].double() / t + noise.double())
    return torch.stack(rows)


@each_variant(gumbel)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 4099])
def test_the_kernels_noise_is_the_twins(variant: str, vocab: int) -> None:
    keys = torch.cat([keys_of(20), torch.tensor([0, -1, 2**63 - 1, -(2**63)])])
    positions = torch.arange(len(keys)) * 12345
    positions[:2] = torch.tensor([0, 2**40])
    noise = gumbel(*on_device(keys, positions), vocab).cpu()
    torch.testing.assert_close(noise, gumbel.variants["torch"](keys, positions, vocab), rtol=1e-6, atol=1e-6)
    ids = torch.randperm(vocab, generator=generator(vocab))[: vocab // 2 + 1]
    picked = gumbel(*on_device(keys, positions), len(ids), *on_device(ids)).cpu()
    assert torch.equal(picked, noise[:, ids])


@each_variant(draw_tokens)
@pytest.mark.parametrize(("n", "vocab"), [(1, 7), (3, 1000), (5, 4099), (70, 33)])
def test_the_draw_is_the_argmax_of_logits_and_noise(variant: str, n: int, vocab: int) -> None:
    source = generator(n, vocab)
    logits = 3 * torch.randn(n, vocab, generator=source)
    logits[:, vocab // 2 :: 3] = -INF
    positions = torch.randint(2**20, (n,), generator=source)
    temperature = torch.tensor([0.0, 1.0, 0.3, 1.7])[torch.randint(4, (n,), generator=source)]
    keys = keys_of(n)
    tokens, scores = (part.cpu() for part in draw_tokens(*on_device(logits, keys, positions, temperature)))
    expected = best_by_hand(logits, keys, positions, temperature)
    best = expected.max(1).values
    torch.testing.assert_close(scores.double(), best, rtol=1e-6, atol=1e-5)
    two = expected.topk(2, dim=1).values
    clear = two[:, 0] - two[:, 1] > NEAR_TIE
    assert torch.equal(tokens[clear], expected.argmax(1)[clear])
    assert bool((expected.gather(1, tokens[:, None])[:, 0] > best - NEAR_TIE).all())
    assert int(clear.sum()) > 0.9 * n


@each_variant(draw_tokens)
def test_bfloat16_logits_are_drawn_as_their_float32_copies(variant: str) -> None:
    n, vocab = 9, 4099
    logits = (3 * torch.randn(n, vocab, generator=generator(n))).bfloat16()
    temperature = torch.tensor([0.0, 1.0, 0.7])[torch.arange(n) % 3]
    keyed = on_device(keys_of(n), torch.arange(n), temperature)
    tokens, scores = draw_tokens(logits.to(DEVICE), *keyed)
    expected_tokens, expected_scores = draw_tokens(logits.float().to(DEVICE), *keyed)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(scores, expected_scores)


@each_variant(draw_tokens)
def test_ties_go_to_the_lower_id_and_views_of_wider_rows_are_accepted(variant: str) -> None:
    """Equal maxima in one block of the kernel, and in two."""
    logits = torch.zeros(3, 5000)
    logits[0, [17, 40]] = 2.0
    logits[1, [2500, 4990]] = 2.0
    logits[2, 4995:] = 9.0
    rows = logits.to(DEVICE)[:, :4995]
    still = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    tokens, scores = draw_tokens(rows, still, still, still.float())
    assert tokens.tolist() == [17, 2500, 0]
    assert scores.tolist() == [2.0, 2.0, 0.0]


@each_variant(draw_tokens)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_are_reported(variant: str, temperature: float) -> None:
    logits = torch.zeros(6, 4099)
    logits[1, 3000] = float("nan")
    logits[2, [5, 3000]] = torch.tensor([INF, float("nan")])
    logits[3, 4098] = INF
    logits[4] = -INF
    logits[5, 1:] = -INF
    keys, positions, heat = on_device(keys_of(6), torch.arange(6), torch.full((6,), temperature))
    tokens, scores = draw_tokens(logits.to(DEVICE), keys, positions, heat)
    assert scores.isfinite().tolist() == [True, False, False, False, False, True]
    assert bool(((tokens >= 0) & (tokens < 4099)).all())
    assert int(tokens[5]) == 0


@each_variant(draw_tokens)
def test_transformed_and_truncated_logits_are_drawn_alike_by_every_kernel(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with all sampling parameters in one batch, over trees."""
    common = {"key": 4, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.4}
    settings = [
        request_sampling(
            **{**common, "temperature": 0.0, "bad_words": ((1, 2), (3,)), "logit_bias": ((4, 3.0), (5, -INF))}
        ),
        request_sampling(**{**common, "temperature": 0.7, "min_p": 0.1, "allowed_token_ids": tuple(range(30))}),
        request_sampling(key=5, temperature=1.0, top_k=9, top_p=0.9, min_p=0.05, stop_ids=(1, 7), allowed_from=12),
        request_sampling(key=6, temperature=1.0, top_k=9, top_p=1.0),
    ]
    source = generator(8)
    logits = torch.randn(4, 6, 50, generator=source)
    tree = tree_of([[-1, 0, 0, 1, 1, 3]] * 4, torch.randint(8, (4, 6), generator=source).tolist(), [9] * 4, 3)
    counts, prompts = torch.randint(3, (2, 50), generator=source).float(), torch.rand(2, 50, generator=source) < 0.3
    begun = torch.tensor([[0, 2, PATH_START, ANY, ANY, ANY]]).T  # the first request's text ends with the token 1
    batch = sampling.SamplingBatch.of(settings, torch.device("cpu"), steps=3)
    batch = replace(batch, penalizer_state=PenalizerState(counts, prompts, begun))
    rows = (logits, tree.positions + 1, batch, tree)
    take("torch", monkeypatch)
    expected_tokens, expected_scores = sampling.draw(*rows)
    if DEVICE.type == "cuda" and variant == "triton":
        pytest.skip("the kernel would be given the CPU's tensors")
    tokens, scores = sampling.draw(*rows)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(scores, expected_scores)
