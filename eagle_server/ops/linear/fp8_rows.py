"""Rounds rows to fp8 (float8_e4m3fn), each with a scale of its own. One program per row."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import constant, jit, power_of_two, tl

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
_TINY = torch.finfo(torch.float32).tiny
_LARGEST = constant(FP8_MAX)
_LEAST = constant(_TINY)


@op
def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, n] -> float8_e4m3fn [rows, n] and float32 scales [rows, 1], which take each row's largest to 448."""
    scales = (x.abs().amax(dim=1, keepdim=True).float() / FP8_MAX).clamp(min=_TINY)
    return (x / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


@fp8_rows.on("triton")
def _launch_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    codes, scales = x.new_empty((rows, size), dtype=FP8), x.new_empty((rows, 1), dtype=torch.float32)
    width = power_of_two(size)
    _rows_kernel[rows,](x.contiguous(), codes, scales, size, SIZE=width, num_warps=min(max(width // 1024, 1), 16))
    return codes, scales


@jit
def _rows_kernel(x, codes, scales, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < size
    given = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(given), 0), _LARGEST), _LEAST)
    rounded = tl.clamp(tl.div_rn(given, scale), -_LARGEST, _LARGEST)
    tl.store(codes + row * size + column, rounded.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)
