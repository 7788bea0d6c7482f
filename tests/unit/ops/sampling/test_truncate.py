"""Truncation without a sort against the torch twin, which sorts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle_server.ops.sampling.truncate import NO_TOP_K, _launch_candidates, truncate_rows
from eagle_server.plan import RequestSampling
from eagle_server.request import SamplingParams
from eagle_server.speculation.sampling import SamplingBatch
from tests.support.covering import covering
from tests.support.kernels import DEVICE, each_variant, generator, on_device, with_triton

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
    {"top_k": 5, "top_p": 0.999},
    {"top_p": 1e-9},
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


def by_sorting(logits: Tensor, limit: dict[str, float], temperature: float) -> tuple[Tensor, Tensor]:
    """Which tokens of logits [rows, V] stay, by float64, and which are so close to top_p that rounding decides."""
    top_k, top_p = int(limit.get("top_k", 1 << 30)), limit.get("top_p", 1.0)
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1])
    scores = ordered.double() / temperature
    probs = scores.masked_fill(rank >= top_k, -math.inf).softmax(-1)
    before = probs.cumsum(-1) - probs
    stays = (rank < top_k) & ((before < top_p) | (rank == 0) | (top_p == 1.0)) & ordered.isfinite()
    if "min_p" in limit:
        stays &= scores >= scores[:, :1] + math.log(limit["min_p"])
    unsure = (before - top_p).abs() < 1e-5 if top_p < 1.0 else torch.zeros_like(stays)
    place = tokens.argsort(-1)
    return stays.gather(1, place), unsure.gather(1, place)


def rows_of(kind: str, vocab: int) -> Tensor:
    """Logits [2, vocab]."""
    noise = torch.randn(2, vocab, generator=generator(vocab))
    logits = {
        "normal": 4 * noise,
        "peaked": 9 * noise.abs() ** 1.5,
        "flat": noise / 100,
        "equal": torch.zeros(2, vocab),
        "of bfloat16": (20 + 3 * noise).bfloat16().float(),  # many ties
        "masked by -1e9": torch.where(noise > 0.5, noise, -1e9),
        "few": torch.where(noise > 1.5, 3 * noise, -math.inf),
    }[kind]
    logits[:, 3] = 1.0  # one token is finite
    return logits


KINDS = ["normal", "peaked", "flat", "equal", "of bfloat16", "masked by -1e9", "few"]


@each_variant(truncate_rows)
@pytest.mark.parametrize(
    ("vocab", "limit", "temperature", "kind"),
    covering([5, 1000, 9001], range(len(LIMITS)), [0.3, 1.0, 1.7], KINDS, together=1),
)
def test_the_same_tokens_stay_as_after_a_sort(
    variant: str, vocab: int, limit: int, temperature: float, kind: str
) -> None:
    """The request with the limit stands beside one without and a greedy one, which lose nothing."""
    logits = rows_of(kind, vocab).expand(3, -1, -1).contiguous()
    found = truncated(logits, [LIMITS[limit], {}, LIMITS[limit]], [temperature, 1.0, 0.0])
    assert torch.equal(found[1:], logits[1:])
    stays, unsure = by_sorting(logits[0], LIMITS[limit], temperature)
    kept = found[0].isfinite()
    assert torch.equal(found[0], torch.where(kept, logits[0], -math.inf))
    assert bool(((kept == stays) | unsure).all())
    assert bool(kept.any(-1).all())


@each_variant(truncate_rows)
@pytest.mark.parametrize("limit", range(len(LIMITS)))
def test_ties_go_to_the_smaller_id(variant: str, limit: int) -> None:
    """Six values for 700 tokens, within and across the kernel's blocks."""
    logits = torch.full((1, 4, 5000), -math.inf)
    logits[:, :, ::7] = torch.randint(-2, 4, (1, 4, 715), generator=generator(limit)).float()
    found = truncated(logits, [LIMITS[limit]], [1.0])
    stays, unsure = by_sorting(logits[0], LIMITS[limit], 1.0)
    assert bool(((found[0].isfinite() == stays) | unsure).all())
    for value in logits[0, :, ::7].unique():
        for row in range(4):
            kept = found[0, row].isfinite()[logits[0, row] == value]
            assert bool((kept.int().diff() <= 0).all()), "the first of equal tokens stay"


@with_triton
@pytest.mark.parametrize(
    ("kind", "limit", "searched"),
    [
        ("normal", {"top_k": 100}, "candidates"),
        ("normal", {"top_p": 0.9}, "candidates"),
        ("neighbours", {"top_k": 300}, "candidates"),
        ("neighbours", {"top_p": 0.9}, "candidates"),
        ("neighbours", {"top_k": 300, "top_p": 0.5, "min_p": 0.01}, "candidates"),
        ("few", {"top_k": 200, "top_p": 0.9}, "candidates"),
        ("flat", {"top_p": 0.999}, "row"),
        ("flat", {"top_k": 2000, "top_p": 0.9}, "row"),
        ("equal", {"top_k": 10}, "row"),
        ("masked by -1e9", {"top_k": 5000}, "row"),
    ],
)
def test_a_row_is_searched_where_its_candidates_do_not_reach_the_limit(
    variant: str, kind: str, limit: dict[str, float], searched: str
) -> None:
    """Tokens that stay are above the candidates' bound, unless the row was searched."""
    if kind == "neighbours":
        logits = torch.randn(1, 1, 20_000, generator=generator())
        logits[..., :300] += 12
    else:
        logits = rows_of(kind, 20_000)[:1, None]
    settings = torch.ones(1), torch.tensor([[limit.get("top_k", NO_TOP_K)], [limit.get("top_p", 1.0)], [0.0]])
    pieces = _launch_candidates(*on_device(logits[0], *settings))
    bound = float(pieces.measures[..., 1].max())
    found = truncated(logits, [limit], [1.0])[0]
    stays, unsure = by_sorting(logits[0], limit, 1.0)
    assert bool(((found.isfinite() == stays) | unsure).all())
    assert (float(found[found.isfinite()].min()) > bound) == (searched == "candidates")


@with_triton
def test_a_rows_result_does_not_depend_on_other_rows(variant: str) -> None:
    logits = torch.cat([rows_of(kind, 5000)[:, None] for kind in KINDS])
    limits = [LIMITS[number % len(LIMITS)] for number in range(len(logits))]
    together = truncated(logits, limits, [0.9] * len(logits))
    for row, limit, found in zip(logits, limits, together, strict=True):
        assert torch.equal(truncated(row[None], [limit], [0.9])[0], found)


@each_variant(truncate_rows)
def test_tokens_that_transforms_removed_stay_removed(variant: str) -> None:
    logits = torch.full((4, 1, 90), -math.inf)
    logits[0, 0, 4], logits[1, 0, [7, 3]] = 2.0, torch.tensor([1.0, 0.5])
    logits[2, 0, 60:63] = torch.tensor([0.0, -0.0, 1e-30])
    limits = [{"top_k": 5, "top_p": 0.9}] * 4
    expected = truncated(logits, limits, [1.0] * 4, truncate_rows.variants["torch"])
    assert torch.equal(truncated(logits, limits, [1.0] * 4), expected)


@each_variant(truncate_rows)
def test_bfloat16_logits_are_truncated_as_their_float32_copies(variant: str) -> None:
    """With ties, which bfloat16 has many of, and with a limit that the candidates do not reach."""
    logits = torch.cat([rows_of(kind, 5000)[:, None] for kind in KINDS]).bfloat16()
    limits = [LIMITS[number % len(LIMITS)] for number in range(len(logits))]
    found = truncated(logits, limits, [0.9] * len(logits))
    assert found.dtype == torch.float32
    assert torch.equal(found, truncated(logits.float(), limits, [0.9] * len(logits)))


@with_triton
def test_a_row_that_is_not_finite_is_returned_as_it_is(variant: str) -> None:
    logits = torch.randn(4, 1, 90, generator=generator())
    logits[0, 0, 3], logits[1, 0, 4] = math.nan, math.inf
    logits[2, 0, 5] = torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32)  # NaN with a sign
    found = truncated(logits, [{"top_k": 5, "top_p": 0.9, "min_p": 0.1}] * 4, [1.0] * 4)
    assert torch.equal(found[:3].nan_to_num(nan=7.0), logits[:3].nan_to_num(nan=7.0))
    assert int(found[3].isfinite().sum()) < 6
