"""The operations between a layer's matrix products, one kernel each: norms, SiLU gate and rotary embedding.

Engines with the backend flashinfer use its kernels for 16-bit CUDA tensors outside autograd. They overwrite their
arguments. Everything else uses the torch twins, which do not. So callers must use the results, and must not use the
arguments again.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_ROPE_DIMS = (64, 128, 256, 512)  # head sizes that FlashInfer's rotary kernel supports


_uses_flashinfer = False


def use_flashinfer(*, enabled: bool) -> None:
    """Whether this process computes with FlashInfer's kernels: while its newest engine has the backend flashinfer."""
    global _uses_flashinfer  # noqa: PLW0603  one process serves one model
    _uses_flashinfer = enabled


class AngleRows(NamedTuple):
    """cos and sin for each row of a forward, for the torch twin. The first half of the sine is negated."""

    cos: Tensor  # [T, 1, dim]
    sin: Tensor  # [T, 1, dim]


class AngleTable(NamedTuple):
    """cos and sin by position, for the kernel. A row of `table` holds the cosines of a position, then its sines."""

    positions: Tensor  # int [T]
    table: Tensor  # float32 [context, dim]


Rotation = AngleRows | AngleTable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32. x: [rows, size] or [T, heads, size]."""
    if _is_fused(x):
        return _flashinfer().rmsnorm(x, weight, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), all [rows, size]. Both arguments may be overwritten."""
    if _is_fused(x):
        _flashinfer().fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual
    residual = residual + x
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up [rows, 2F] -> [rows, F]."""
    if _is_fused(gate_up):
        return _flashinfer().silu_and_mul(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def can_use_table(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether a forward on this device uses `AngleTable`; otherwise it uses `AngleRows`."""
    return dim in _ROPE_DIMS and _fuses(device, dtype)


def apply_rope(x: Tensor, rotation: Rotation, *, interleaved: bool = False) -> Tensor:
    """Rotate x [T, heads, dim], a layer's queries and keys together, at least two heads. May overwrite x."""
    if isinstance(rotation, AngleRows):
        return (rotate_interleaved if interleaved else rotate)(x, *rotation)
    apply_rope_pair(x[:, :-1], x[:, -1:], rotation, interleaved=interleaved)
    return x


def apply_rope_pair(q: Tensor, k: Tensor, rotation: Rotation, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """`apply_rope` for q [T, heads, dim] and k [T, kv_heads, dim] in separate tensors. May overwrite both."""
    if isinstance(rotation, AngleRows):
        apply = rotate_interleaved if interleaved else rotate
        return apply(q, *rotation), apply(k, *rotation)
    _flashinfer().apply_rope_with_cos_sin_cache_inplace(
        rotation.positions, q, k, q.shape[-1], rotation.table, is_neox=not interleaved
    )
    return q, k


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + dim / 2) of x [T, heads, dim], as Llama does. cos and sin as in `AngleRows`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of x [T, heads, dim], as GPT-J and DeepSeek do. cos and sin as in `AngleRows`."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., half:]
    even, odd = x.unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def _is_fused(x: Tensor) -> bool:
    return x.is_cuda and _fuses(x.device, x.dtype)


def _fuses(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in _HALF and not torch.is_grad_enabled() and _uses_flashinfer


@cache
def _flashinfer() -> ModuleType:
    """Imported at the first CUDA tensor, because the import takes seconds."""
    return importlib.import_module("flashinfer")
