"""Truncation without a sort against the torch twin, which sorts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle_server.ops.sampling.truncate import truncate_rows
from eagle_server.plan import RequestSampling
from eagle_server.request import SamplingParams
from eagle_server.speculation.sampling import SamplingBatch
from tests.support.covering import covering
from tests.support.kernels import DEVICE, each_variant, generator, with_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
CPU = torch.device("cpu")
LIMITS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.0001},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7},
    {"top_k": 3, "top_p": 0.99, "min_p": 0.05},
    {"top_k": 100_000},
]


def truncated(
    logits: Tensor,
    limits: list[dict[str, float]],
    temperature: list[float],
    run: Callable[..., Tensor] = truncate_rows,
) -> Tensor:
    pairs = zip(temperature, limits, strict=True)
    params = [SamplingParams(max_tokens=1, seed=0, temperature=t, **limit) for t, limit in pairs]  # type: ignore[arg-type]
    sampling = SamplingBatch.of([RequestSampling(each, key=0) for each in params], CPU)
    given = (logits, sampling.all_temperature, sampling.limits, sampling.truncated, sampling.floored)
    return run(*(None if each is None else each.to(DEVICE) for each in given)).cpu()


def by_sorting(scores: Tensor, limit: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Which tokens of scores [rows, V] stay, by float64, and which are so close to top_p that rounding decides."""
    top_k, top_p = int(limit.get("top_k", 1 << 30)), limit.get("top_p", 1.0)
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1])
    probs = ordered.double().masked_fill(rank >= top_k, -math.inf).softmax(-1)
    before = probs.cumsum(-1) - probs
    stays = (rank < top_k) & ((before < top_p) | (rank == 0) | (top_p == 1.0))
    stays &= ordered >= ordered[:, :1] + math.log(limit.get("min_p", 0.0) or 1e-300)
    unsure = (before - top_p).abs() < 1e-5
    place = tokens.argsort(-1)
    return stays.gather(1, place), unsure.gather(1, place)


@each_variant(truncate_rows)
@pytest.mark.parametrize(
    ("vocab", "limit", "temperature"),
    covering([5, 1000, 9001], range(len(LIMITS)), [0.3, 1.0, 1.7], together=1),
)
def test_the_same_tokens_stay_as_after_a_sort(variant: str, vocab: int, limit: int, temperature: float) -> None:
    """The request with the limit stands beside one without and a greedy one, which lose nothing."""
    logits = 4 * torch.randn(3, 2, vocab, generator=generator(vocab, limit))
    found = truncated(logits, [LIMITS[limit], {}, LIMITS[limit]], [temperature, 1.0, 0.0])
    assert torch.equal(found[1:], logits[1:])
    stays, unsure = by_sorting(logits[0] / temperature, LIMITS[limit])
    kept = found[0].isfinite()
    assert torch.equal(found[0], torch.where(kept, logits[0], -math.inf))
    if variant != "torch":  # the twin drops tokens whose mass float32 rounds away, without top-p too
        unsure &= LIMITS[limit].get("top_p", 1.0) < 1.0
    assert bool(((kept == stays) | unsure).all())
    assert bool(kept.any(-1).all())


@each_variant(truncate_rows)
@pytest.mark.parametrize("limit", range(len(LIMITS)))
def test_ties_go_to_the_smaller_id(variant: str, limit: int) -> None:
    """Six values for 700 tokens, within and across the kernel's blocks."""
    logits = torch.full((1, 4, 5000), -math.inf)
    logits[:, :, ::7] = torch.randint(-2, 4, (1, 4, 715), generator=generator(limit)).float()
    found = truncated(logits, [LIMITS[limit]], [1.0])
    stays, unsure = by_sorting(logits[0], LIMITS[limit])
    unsure &= LIMITS[limit].get("top_p", 1.0) < 1.0
    assert bool(((found[0].isfinite() == (stays & logits[0].isfinite())) | unsure).all())
    for value in logits[0, :, ::7].unique():
        for row in range(4):
            kept = found[0, row].isfinite()[logits[0, row] == value]
            assert bool((kept.int().diff() <= 0).all()), "the first of equal tokens stay"


@each_variant(truncate_rows)
def test_tokens_that_transforms_removed_stay_removed(variant: str) -> None:
    logits = torch.full((4, 1, 90), -math.inf)
    logits[0, 0, 4], logits[1, 0, [7, 3]] = 2.0, torch.tensor([1.0, 0.5])
    logits[2, 0, 60:63] = torch.tensor([0.0, -0.0, 1e-30])
    limits = [{"top_k": 5, "top_p": 0.9}] * 4
    expected = truncated(logits, limits, [1.0] * 4, truncate_rows.variants["torch"])
    assert torch.equal(truncated(logits, limits, [1.0] * 4), expected)


@with_triton
def test_a_row_that_is_not_finite_is_returned_as_it_is(variant: str) -> None:
    logits = torch.randn(3, 1, 90, generator=generator())
    logits[0, 0, 3], logits[1, 0, 4] = math.nan, math.inf
    found = truncated(logits, [{"top_k": 5, "top_p": 0.9, "min_p": 0.1}] * 3, [1.0] * 3)
    assert torch.equal(found[:2].nan_to_num(nan=7.0), logits[:2].nan_to_num(nan=7.0))
    assert int(found[2].isfinite().sum()) < 6
