"""Norms, gate and rotary embedding: FlashInfer's kernels on a GPU against the twins in float64.

bfloat16 has 8 bits of precision, so one rounding changes a value by at most 2^-9 of it. Results that are rounded twice
may differ by 2^-7.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_server.models.config import RopeConfig
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops import fused
from tests.gpu.conftest import moved

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def normal(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@dtypes
@pytest.mark.parametrize("size", [(1, 64), (7, 384), (64, 4096), (5, 8, 128)])
def test_norms(device: torch.device, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    x, weight = normal(*size, dtype=dtype), normal(size[-1], dtype=dtype, seed=1)
    with torch.inference_mode():
        close(fused.rms_norm(*moved((x, weight), device), 1e-5), norm(x, weight))


@dtypes
@pytest.mark.parametrize("size", [(1, 64), (7, 384), (64, 4096)])
def test_norms_after_an_addition(device: torch.device, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, residual = normal(*size, dtype=dtype), normal(*size, dtype=dtype, seed=1)
    weight = normal(size[1], dtype=dtype, seed=2)
    with torch.inference_mode():
        normed, stream = fused.add_rms_norm(*moved((x, residual, weight), device), 1e-5)
    close(stream, x.double() + residual.double())
    close(normed, norm(x.double() + residual.double(), weight))


@dtypes
@pytest.mark.parametrize("size", [(1, 128), (13, 640), (64, 28672)])
def test_gates(device: torch.device, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x = normal(*size, dtype=dtype)
    with torch.inference_mode():
        found = fused.silu_mul(moved(x, device))
    gate, up = x.double().chunk(2, dim=-1)
    close(found, gate * torch.sigmoid(gate) * up)


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (10, 128), (5, 96)])
def test_rotations(device: torch.device, dtype: torch.dtype, heads: int, dim: int, interleaved: bool) -> None:
    rope = RotaryEmbedding(RopeConfig(), dim, 600)
    positions = torch.tensor([0, 1, 5, 599, 17, 300])
    x = normal(len(positions), heads, dim, dtype=dtype)
    turn = fused.rotate_interleaved if interleaved else fused.rotate
    expected = turn(x.double(), *(table[positions].unsqueeze(1).double() for table in (rope.cos, rope.sin)))
    with torch.inference_mode():
        on_device = rope.to(device)
        rotation = on_device(positions.to(device), dtype)
        found = fused.apply_rope(moved(x, device), rotation, interleaved=interleaved)
    # On the CPU angles are rounded to the dtype of the activations, which adds an error.
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
