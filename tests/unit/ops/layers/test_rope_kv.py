"""Norms, rotation and the write to the pool in one: torch twin and kernel against the separate operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.cache.pool import KVPool, KVShape
from eagle_server.models.config import RopeConfig
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.layers import fused
from eagle_server.ops.layers.fused import AngleRows, AngleTable
from eagle_server.ops.layers.rope_kv import HeadNorms, rotate_and_write
from tests.support.covering import covering
from tests.support.kernels import DEVICE, each_variant, generator

SLOTS, CONTEXT = 40, 64


def rotations(positions: Tensor, dim: int, rotary: int) -> tuple[AngleTable, AngleRows]:
    """The angles as the kernel and as the separate operations take them."""
    config = RopeConfig(theta=100.0, partial_rotary_factor=rotary / dim)
    rope = RotaryEmbedding(config, dim, CONTEXT).to(DEVICE)
    rows = rope(positions, torch.float32)
    assert isinstance(rows, AngleRows)
    return AngleTable(positions, rope._kernel_table()), rows


@each_variant(rotate_and_write)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "rotary", "offset", "dtype"),
    covering(
        [(1, 1, 1, 2, 2), (3, 4, 2, 8, 8), (7, 6, 1, 64, 64), (2, 8, 8, 128, 128), (5, 3, 3, 6, 6)]
        + [(3, 4, 2, 8, 2), (7, 6, 1, 64, 32), (2, 2, 1, 256, 64), (5, 3, 3, 10, 6), (4, 2, 2, 48, 18)],
        [None, 0.0, 1.0],
        [torch.float32, torch.bfloat16],
        together=2,
    ),
)
def test_one_call_norms_rotates_and_writes(
    variant: str,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    offset: float | None,
    dtype: torch.dtype,
) -> None:
    """From a view of a wider projection, into one layer of a pool, at shuffled slots. No `offset`: no norms."""
    source = generator(rows, dim)
    pool = KVPool([KVShape(kv_heads, dim)] * 3, SLOTS, dtype, DEVICE)
    data = pool.groups[0].fill_(7.0)
    wide = torch.randn(rows, heads + 2 * kv_heads + 1, dim, generator=source).to(DEVICE, dtype)
    qkv = wide[:, 1:]
    positions = torch.randint(CONTEXT, (rows,), generator=source).to(DEVICE)
    slots = torch.randperm(SLOTS, generator=source)[:rows].to(DEVICE)
    table, angles = rotations(positions, dim, rotary)
    q, k, v = (x.clone() for x in qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1))
    norms = None
    if offset is not None:
        weights = [(1 + torch.randn(dim, generator=source) / 4).to(DEVICE, dtype) for _ in range(2)]
        norms = HeadNorms(*weights, 1e-5, offset)
        gains = [offset + weight.float() for weight in weights]
        q, k = (F.rms_norm(x.float(), (dim,), gain, 1e-5).to(dtype) for x, gain in zip((q, k), gains, strict=True))
    q, k = (fused.rotate(x.float(), *angles).to(dtype) for x in (q, k))

    found = rotate_and_write(qkv, heads, table, pool.keys[1], pool.values[1], slots, norms)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, q, **close)
    torch.testing.assert_close(pool.keys[1][slots], k, **close)
    assert torch.equal(pool.values[1][slots], v)
    untouched = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE).index_fill(0, slots, value=False)
    assert bool((data[:, 1, untouched] == data[0, 2, 1, 0, 0]).all()), "other slots"
    assert bool((data[:, 2] == 7.0).all()), "other layers"
