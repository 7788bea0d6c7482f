"""The input of an EAGLE-3 head's first layer: torch twin and kernel against the separate operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eagle_server.ops.layers.normed_pairs import PairNorms, normed_pairs
from tests.support.covering import covering
from tests.support.kernels import DEVICE, each_variant, generator, take

VOCAB, EPS = 30, 1e-5


@each_variant(normed_pairs)
@pytest.mark.parametrize(
    ("rows", "size", "keeps_normed", "has_parents", "dtype"),
    covering(
        [(1, 1), (3, 8), (7, 48), (2, 257)], [False, True], [False, True], [torch.float32, torch.bfloat16], together=2
    ),
)
def test_one_call_embeds_norms_and_joins(
    variant: str,
    rows: int,
    size: int,
    keeps_normed: bool,
    has_parents: bool,
    dtype: torch.dtype,
) -> None:
    """From rows of a wider embedding, and from hidden states that every second row of a tensor holds."""
    source = generator(rows, size)
    embed = torch.randn(VOCAB, size + 3, generator=source).to(DEVICE, dtype)[:, :size]
    hidden = torch.randn(2 * rows, size, generator=source).to(DEVICE, dtype)[::2]
    weights = [(1 + torch.randn(size, generator=source) / 4).to(DEVICE, dtype) for _ in range(2)]
    tokens = torch.randint(VOCAB, (rows,), generator=source).to(DEVICE)
    before, norms = hidden.clone(), PairNorms(*weights, EPS)
    parents = torch.randint(rows, (rows,), generator=source).to(DEVICE) if has_parents else None
    with torch.inference_mode():
        pairs, residual = normed_pairs(tokens, embed, hidden, norms, parents, keeps_normed=keeps_normed)
    read = hidden if parents is None else hidden[parents]
    halves = [
        F.rms_norm(x.float(), (size,), w.float(), EPS) for x, w in zip((embed[tokens], read), weights, strict=True)
    ]
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(pairs.float(), torch.cat(halves, dim=1), **close)
    assert torch.equal(residual, pairs[:, size:] if keeps_normed else read)
    assert torch.equal(hidden, before)
    if variant == "triton":
        assert residual.data_ptr() != hidden.data_ptr(), "the caller may overwrite the residual stream"


def test_training_takes_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has no gradient."""
    take("triton", monkeypatch)
    weight = torch.ones(4, requires_grad=True)
    norms = PairNorms(weight, weight, EPS)
    pairs, _ = normed_pairs(torch.tensor([1]), torch.randn(3, 4), torch.randn(1, 4), norms, keeps_normed=False)
    pairs.sum().backward()
    assert weight.grad is not None
