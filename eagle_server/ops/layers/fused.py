"""The operations between a layer's matrix products, one kernel each: norms, gates and rotary embedding.

Engines with the backend flashinfer use its kernels for 16-bit CUDA tensors outside autograd. They overwrite their
arguments. Everything else uses the torch twins, which do not. So callers must use the results, and must not use the
arguments again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.dispatch import FITS, op

_HALF = (torch.bfloat16, torch.float16)
_ROPE_DIMS = (64, 128, 256, 512)  # head sizes that FlashInfer's rotary kernel supports
_ROTARY_STEP = 32  # its threads rotate up to 16 dimensions each, in one half of the rotated ones


_uses_flashinfer = False


def use_flashinfer(*, enabled: bool) -> None:
    """Whether this process computes with FlashInfer's kernels: while its newest engine has the backend flashinfer."""
    global _uses_flashinfer
    _uses_flashinfer = enabled


def _fuses(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in _HALF and not torch.is_grad_enabled() and _uses_flashinfer


FITS["flashinfer"] = lambda x: x.is_cuda and _fuses(x.device, x.dtype)


class AngleRows(NamedTuple):
    """cos and sin for each row of a forward, for the torch twin. The first half of the sine is negated.

    They may be narrower than a head: then its first dimensions are rotated, and the others stay as they are.
    """

    cos: Tensor  # [T, 1, rotary_dim]
    sin: Tensor  # [T, 1, rotary_dim]


class AngleTable(NamedTuple):
    """cos and sin by position, for the kernel. A row of `table` holds the cosines of a position, then its sines."""

    positions: Tensor  # int [T]
    table: Tensor  # float32 [context, rotary_dim]


Rotation = AngleRows | AngleTable


def gain_of(weight: Tensor, offset: float) -> Tensor:
    """What a norm multiplies by: offset + weight. In float32 with an offset, as bfloat16 would round 1 + weight."""
    return offset + _wide(weight) if offset else weight


def _wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dimension, computed in float32.

    x: [rows, size] or [T, heads, size]. offset: 0 or 1.
    """
    if offset:
        return F.rms_norm(_wide(x), weight.shape, gain_of(weight, offset), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


@rms_norm.on("flashinfer")
def _rms_norm_flashinfer(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    if offset:  # its CUDA kernel takes rows alone
        return _flashinfer().gemma_rmsnorm(x.flatten(0, -2), weight, eps).view(x.shape)  # type: ignore[no-any-return]
    return _flashinfer().rmsnorm(x, weight, eps)  # type: ignore[no-any-return]


@op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), all [rows, size]. Both arguments may be overwritten."""
    residual = residual + x
    return rms_norm(residual, weight, eps, offset), residual


@add_rms_norm.on("flashinfer")
def _add_rms_norm_flashinfer(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    norm = _flashinfer().gemma_fused_add_rmsnorm if offset else _flashinfer().fused_add_rmsnorm
    norm(x, residual, weight, eps)
    return x, residual


@op
def owned(residual: Tensor) -> Tensor:
    """The same values. The caller may pass them to `add_rms_norm` and still use the argument."""
    return residual


@owned.on("flashinfer")
def _owned_flashinfer(residual: Tensor) -> Tensor:
    return residual.clone()


@op
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up [rows, 2F] -> [rows, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@silu_mul.on("flashinfer")
def _silu_mul_flashinfer(gate_up: Tensor) -> Tensor:
    return _flashinfer().silu_and_mul(gate_up)  # type: ignore[no-any-return]


def limited_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    """min(silu(gate), limit) * up, with up in [-limit, limit]: gate_up [rows, 2F] -> [rows, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


@op
def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with tanh in gelu: gate_up [rows, 2F] -> [rows, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@gelu_tanh_mul.on("flashinfer")
def _gelu_tanh_mul_flashinfer(gate_up: Tensor) -> Tensor:
    return _flashinfer().gelu_tanh_and_mul(gate_up)  # type: ignore[no-any-return]


def squared_relu(up: Tensor) -> Tensor:
    """relu(up)^2, where there is no gate: [rows, F] -> [rows, F]."""
    return F.relu(up).square()


# By the name of the activation.
GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, "relu2": squared_relu}


def can_use_table(device: torch.device, dtype: torch.dtype, dim: int, rotary_dim: int) -> bool:
    """Whether a forward on this device uses `AngleTable`; otherwise it uses `AngleRows`."""
    return dim in _ROPE_DIMS and rotary_dim % _ROTARY_STEP == 0 and _fuses(device, dtype)


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
    """Rotate the pairs (i, i + rotary_dim / 2) of x [T, heads, dim], as Llama does. cos and sin as in `AngleRows`."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :dim], cos, sin), x[..., dim:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of x [T, heads, dim], as GPT-J and DeepSeek do. cos and sin as in `AngleRows`."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([rotate_interleaved(x[..., :dim], cos, sin), x[..., dim:]], dim=-1)
    half = dim // 2
    cos, sin = cos[..., :half], sin[..., half:]
    even, odd = x.unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


@cache
def _flashinfer() -> ModuleType:
    """Imported at the first CUDA tensor, because the import takes seconds."""
    return importlib.import_module("flashinfer")
