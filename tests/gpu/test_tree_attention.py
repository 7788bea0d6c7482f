"""The tree's block of a cascade, merged with its prefix: the kernel and its twin against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle_server.ops.tree.attention import add_sinks, tree_block_attention
from tests.gpu.conftest import moved

# A GPU may round float32 to TF32 in matrix products, which has 10 bits.
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 2e-2}
GROUPED, ALONE, SHARED, LATENT = (8, 2, 128, 0), (4, 4, 64, 0), (6, 1, 96, 0), (16, 1, 576, 512)
TREE, DRAFT, ROOT, ODD = (2, 64, 64), (2, 8, 48), (1, 1, 1), (3, 7, 7)
CASES = [
    (GROUPED, TREE, torch.bfloat16),
    (GROUPED, DRAFT, torch.bfloat16),
    (GROUPED, ODD, torch.float32),
    (ALONE, ROOT, torch.bfloat16),
    (ALONE, TREE, torch.float32),
    (SHARED, ODD, torch.bfloat16),
    (LATENT, TREE, torch.bfloat16),
    (LATENT, ODD, torch.bfloat16),
    (LATENT, DRAFT, torch.float32),
]


@pytest.mark.parametrize("prefixed", [True, False], ids=["prefix", "alone"])
@pytest.mark.parametrize(("heads", "tree", "dtype"), CASES, ids=str)
def test_a_trees_block_attends_alike(
    device: torch.device, heads: tuple[int, ...], tree: tuple[int, ...], dtype: torch.dtype, prefixed: bool
) -> None:
    """With a prefix (its output and base-2 log-sum-exp) or without. Slots that no row sees hold NaN."""
    (count, kv_heads, dim, rank), (bs, rows, width) = heads, tree
    random_ = torch.Generator().manual_seed(count)
    value_dim, scale = rank or dim, dim**-0.5

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random_).to(dtype)

    slots = torch.randperm(200, generator=random_)[: bs * width].view(bs, width)
    mask = torch.rand(bs, rows, width, generator=random_) < 0.4
    mask[:, :, 0] = True
    mask[:, :, -1] &= width == 1  # the last column is hidden from all
    keys = normal(200, kv_heads, dim)
    q, prefix = normal(bs * rows, count, dim), normal(bs * rows, count, value_dim)
    values = keys[..., :rank] if rank else normal(200, kv_heads, dim)
    lse = torch.randn(bs * rows, count, generator=random_) * 2
    lse[0] = -math.inf  # a request without a prefix
    expected = _merged(q, keys, values, slots, mask, scale, prefix, lse if prefixed else lse - math.inf)
    if width > 1:
        keys[slots[:, -1]] = math.nan
        values[slots[:, -1]] = math.nan
    q_, keys_, slots_, mask_, prefix_, lse_ = moved((q, keys, slots, mask, prefix, lse), device)
    values_ = keys_[..., :rank] if rank else moved(values, device)
    out = torch.empty_like(prefix_)
    tree_block_attention(q_, keys_, values_, slots_, mask_, scale, (prefix_, lse_) if prefixed else None, out)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def _merged(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, mask: Tensor, scale: float, prefix: Tensor, lse: Tensor
) -> Tensor:
    """The expected output in float64: a softmax over the prefix's log-sum-exp and the block's scores."""
    bs, rows, _ = mask.shape
    shared = q.shape[1] // keys.shape[1]
    k, v = (x.double()[slots].repeat_interleave(shared, dim=2) for x in (keys, values))  # [bs, W, heads, *]
    scores = torch.einsum("brhd,bwhd->brhw", q.double().unflatten(0, (bs, rows)), k) * scale
    scores = scores.masked_fill(~mask[:, :, None], -math.inf)
    before = lse.double().unflatten(0, (bs, rows)) * math.log(2)
    weights = torch.cat([before[..., None], scores], dim=-1).softmax(-1)
    block = torch.einsum("brhw,bwhd->brhd", weights[..., 1:], v)
    return (weights[..., :1] * prefix.double().unflatten(0, (bs, rows)) + block).flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_merged_alike(device: torch.device, dtype: torch.dtype) -> None:
    random_ = torch.Generator().manual_seed(4)
    out, lse = torch.randn(5, 6, 80, generator=random_).to(dtype), 3 * torch.randn(5, 6, generator=random_)
    lse[0] = -math.inf  # a request without a prefix
    sinks = 3 * torch.randn(6, generator=random_)
    expected = out.double(), lse.double()
    add_sinks.variants["torch"](*expected, sinks.double())
    found = moved((out, lse, sinks), device)
    add_sinks(*found)
    torch.testing.assert_close(found[0].cpu().double(), expected[0], atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(found[1].cpu().double(), expected[1], atol=1e-5, rtol=0)
