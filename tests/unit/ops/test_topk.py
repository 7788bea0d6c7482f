"""Top-k log-probabilities: torch twin and kernel against a stable sort and log_softmax in float64."""

from __future__ import annotations

import pytest
import torch

from eagle_server.ops import topk
from eagle_server.ops.topk import topk_logprobs
from tests.support.covering import covering
from tests.support.kernels import DEVICE, each_way, generator, needs_triton

INF = float("inf")


@pytest.fixture(autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    way = request.node.callspec.params.get("way", "kernel")
    monkeypatch.setattr(topk, "on_gpu", lambda _: way == "kernel")


@each_way
@pytest.mark.parametrize(
    ("n", "vocab", "k", "dtype"),
    covering(
        [(1, 7, 7), (3, 7, 1), (5, 1000, 4), (3, 4099, 8), (2, 2049, 16), (1, 1, 1)],
        [torch.float32, torch.bfloat16],
        together=1,
    ),
)
def test_the_best_come_first_with_their_log_probabilities(
    way: str, n: int, vocab: int, k: int, dtype: torch.dtype
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


@needs_triton
@pytest.mark.parametrize("vocab", [16, 1000, 4099])
def test_ties_go_to_the_lower_id(vocab: int) -> None:
    """Few different values, so that most tie, within a block and across blocks."""
    logits = torch.randint(3, (4, vocab), generator=generator(vocab)).float()
    logits[3] = 0.0
    _, ids = topk_logprobs(logits.to(DEVICE), 12)
    assert torch.equal(ids.cpu(), logits.sort(dim=1, descending=True, stable=True).indices[:, :12])


@each_way
def test_forbidden_tokens_and_far_values_keep_the_sum_exact(way: str) -> None:
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
@each_way
@pytest.mark.parametrize("vocab", [9, 4099])
def test_no_logits_produce_an_id_out_of_range(way: str, vocab: int) -> None:
    logits = torch.zeros(5, vocab)
    logits[0] = float("nan")
    logits[1, vocab - 1] = float("nan")
    logits[2] = -INF
    logits[3, vocab - 1] = INF
    logits[4, : vocab - 3] = float("nan")
    logp, ids = topk_logprobs(logits.to(DEVICE), 8)
    assert bool(((ids >= 0) & (ids < vocab)).all())
    assert not logp[:, 0].isfinite().any()
    if way == "kernel":
        assert vocab - 1 not in ids[1].tolist(), "NaN ranks last"
