"""FlashInfer's norms, gate and rotary embedding in torch, and the kernel branch of `ops.layers.fused` on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.dispatch import FITS
from eagle_server.ops.layers import fused


def fake_flashinfer() -> Any:
    """FlashInfer's functions, with the same names and the same in-place writes."""

    def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return F.rms_norm(input, weight.shape, weight, eps)

    def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
        residual += input
        input.copy_(rmsnorm(residual, weight, eps))

    def gemma_rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return F.rms_norm(input.float(), weight.shape, 1 + weight.float(), eps).to(input.dtype)

    def gemma_fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
        residual += input
        input.copy_(gemma_rmsnorm(residual, weight, eps))

    def gelu_tanh_and_mul(input: Tensor) -> Tensor:
        gate, up = input.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def silu_and_mul(input: Tensor) -> Tensor:
        gate, up = input.chunk(2, dim=-1)
        return F.silu(gate) * up

    def apply_rope_with_cos_sin_cache_inplace(
        positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
    ) -> None:
        cos, sin = cos_sin_cache[positions].chunk(2, dim=1)
        rows = torch.cat([cos, cos], 1)[:, None], torch.cat([-sin, sin], 1)[:, None]
        for x in (query.view(query.shape[0], -1, head_size), key.view(key.shape[0], -1, head_size)):
            x.copy_((fused.rotate if is_neox else fused.rotate_interleaved)(x, *rows))

    return SimpleNamespace(
        **{f.__name__: f for f in (rmsnorm, fused_add_rmsnorm, silu_and_mul)},
        **{f.__name__: f for f in (gemma_rmsnorm, gemma_fused_add_rmsnorm, gelu_tanh_and_mul)},
        **{"apply_rope_with_cos_sin_cache_inplace": apply_rope_with_cos_sin_cache_inplace},
    )


def use_kernel_branch(monkeypatch: pytest.MonkeyPatch, module: Any = None) -> None:
    """Take the kernel branch of every function on a CPU. `module` replaces FlashInfer; None: `fake_flashinfer`."""
    module = fake_flashinfer() if module is None else module
    monkeypatch.setitem(FITS, "flashinfer", lambda _: not torch.is_grad_enabled())
    monkeypatch.setattr(fused, "_flashinfer", lambda: module)
    monkeypatch.setattr("eagle_server.models.rope.can_use_table", lambda *_: not torch.is_grad_enabled())
