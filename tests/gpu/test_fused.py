"""Norms, gate and rotary embedding: FlashInfer's kernels on a GPU against the twins in float64.

bfloat16 has 8 bits of precision, so one rounding changes a value by at most 2^-9 of it. Results that are rounded twice
may differ by 2^-7.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eagle_server.models.config import RopeConfig
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.layers import fused
from tests.gpu.conftest import moved

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def _with_flashinfer() -> Iterator[None]:
    fused.use_flashinfer(enabled=importlib.util.find_spec("flashinfer") is not None)
    yield
    fused.use_flashinfer(enabled=False)


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
        close(fused.rms_norm(*moved((x, weight), device), 1e-5, 1.0), norm(x, 1 + weight.double()))


@dtypes
@pytest.mark.parametrize("heads", [(8, 2), (1, 1)], ids=str)
def test_norms_of_queries_and_keys_within_one_projection(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    """As in Qwen3: views of three dimensions, with gaps between rows."""
    count, kv_heads = heads
    projected, weight = normal(9, count + 2 * kv_heads, 128, dtype=dtype), normal(128, dtype=dtype, seed=1)
    found, weight_ = moved((projected, weight), device)
    parts = [count, kv_heads, kv_heads]
    with torch.inference_mode():
        for view, expected in zip(found.split(parts, dim=1)[:2], projected.split(parts, dim=1)[:2], strict=True):
            assert not view.is_contiguous()
            close(fused.rms_norm(view, weight_, 1e-5), norm(expected, weight))


@dtypes
def test_norms_of_a_latent_within_one_projection(device: torch.device, dtype: torch.dtype) -> None:
    """As in DeepSeek: the first columns of wider rows."""
    projected, weight = normal(9, 576, dtype=dtype), normal(512, dtype=dtype, seed=1)
    with torch.inference_mode():
        found = fused.rms_norm(moved(projected, device)[:, :512], moved(weight, device), 1e-5)
    close(found, norm(projected[:, :512], weight))


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
    with torch.inference_mode():
        found = fused.gelu_tanh_mul(moved(x, device))
    close(found, torch.nn.functional.gelu(gate, approximate="tanh") * up)


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (10, 128), (5, 96)])
def test_rotations(device: torch.device, dtype: torch.dtype, heads: int, dim: int, interleaved: bool) -> None:
    rope = RotaryEmbedding(RopeConfig(), dim, 600)
    positions = torch.tensor([0, 1, 5, 599, 17, 300])
    projected = normal(len(positions), heads + 2, dim, dtype=dtype)
    x = projected[:, :heads]
    turn = fused.rotate_interleaved if interleaved else fused.rotate
    expected = turn(x.double(), *(table[positions].unsqueeze(1).double() for table in (rope.cos, rope.sin)))
    with torch.inference_mode():
        on_device = rope.to(device)
        rotation = on_device(positions.to(device), dtype)
        whole = moved(projected, device)
        found = fused.apply_rope(whole[:, :heads], rotation, interleaved=interleaved)
    assert torch.equal(whole[:, heads:].cpu(), projected[:, heads:]), "the values beside them are overwritten"
    # On the CPU angles are rounded to the dtype of the activations, which adds an error.
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@dtypes
def test_rotations_of_the_last_numbers_of_each_head(device: torch.device, dtype: torch.dtype) -> None:
    """As in DeepSeek: queries with a part that does not rotate, and one key within the projection of the latent."""
    rope = RotaryEmbedding(RopeConfig(), 64, 600)
    positions = torch.tensor([0, 1, 5, 599, 17, 300])
    queries, latents = normal(6, 4, 192, dtype=dtype), normal(6, 576, dtype=dtype, seed=1)
    tables = [table[positions].unsqueeze(1).double() for table in (rope.cos, rope.sin)]
    expected = [fused.rotate_interleaved(x.double(), *tables) for x in (queries[..., 128:], latents[:, None, 512:])]
    queries, latents = moved((queries, latents), device)
    with torch.inference_mode():
        rotation = rope.to(device)(positions.to(device), dtype)
        found = fused.apply_rope_pair(queries[..., 128:], latents[:, None, 512:], rotation, interleaved=True)
    for each, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(each.cpu().double(), exact, rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
