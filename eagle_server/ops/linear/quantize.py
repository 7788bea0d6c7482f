"""Rounds weights to 8 or 4 bits.

int8, fp8 (float8_e4m3fn): one scale for each output. int4: groups of inputs, each with a scale and a zero for each
output. The range of a group is cut where that lowers its squared error. mxfp4 (OCP Microscaling Formats): floats of 4
bits, and a power of two for each output and 32 inputs; weights are read in it, never rounded to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from eagle_server.ops.linear.fp8_rows import fp8_rows

Quantization = Literal["int8", "int4", "fp8", "mxfp4"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of the codes 0 to 7; those from 8 on are negative
MXFP4_GROUP = 32  # inputs that share a scale
_GROUPS = (128, 64, 32, 16, 8)  # inputs that share a scale: the first that divides their number
_RANGES = (1.0, 0.94, 0.88, 0.82, 0.76)  # of a group's range that are tried
_ROWS = 1024  # at once


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in]: (codes - zeros) * scales; of mxfp4 number(codes) * scales, and zeros are 0.

    codes: uint8 [out, in], below 256 or below 16, or float8_e4m3fn. scales: float32 [groups, out]; zeros: uint8
    [groups, out]. Inputs g * group to (g + 1) * group belong to group g.
    """

    quantization: Quantization
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int

    @classmethod
    def stacked(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Weights of one kind and group, one after the other along the outputs."""
        first = weights[0]
        codes = torch.cat([weight.codes for weight in weights])
        scales, zeros = (
            torch.cat([getattr(weight, name) for weight in weights], dim=1) for name in ("scales", "zeros")
        )
        return cls(first.quantization, codes, scales, zeros, first.group)

    @classmethod
    def mxfp4(cls, codes: Tensor, exponents: Tensor) -> QuantizedWeight:
        """codes uint8 [out, in], exponents uint8 [out, in / 32]: 32 inputs share the factor 2^(exponent - 127)."""
        powers, zeros = torch.exp2(exponents.t().float() - 127), torch.zeros_like(exponents.t())
        return cls("mxfp4", codes.contiguous(), powers.contiguous(), zeros.contiguous(), MXFP4_GROUP)

    def rows(self, chosen: slice) -> QuantizedWeight:
        """Only some of the outputs."""
        scales, zeros = (values[:, chosen].contiguous() for values in (self.scales, self.zeros))
        return replace(self, codes=self.codes[chosen].contiguous(), scales=scales, zeros=zeros)

    def columns(self, first: int, last: int) -> QuantizedWeight | None:
        """Only some of the inputs; None: they do not begin and end with a group."""
        codes, inputs = self.codes[:, first:last].contiguous(), self.codes.shape[1]
        if len(self.scales) == 1:  # all inputs are one group
            return replace(self, codes=codes, group=last - first)
        if first % self.group or (last % self.group and last < inputs):
            return None
        groups = slice(first // self.group, -(-last // self.group))
        return replace(self, codes=codes, scales=self.scales[groups], zeros=self.zeros[groups])

    def dense(self) -> Tensor:
        """The weight that is computed with, float32 [out, in]."""
        scales, zeros = (
            values.t().repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1]]
            for values in (self.scales, self.zeros.float())
        )
        if self.quantization == "mxfp4":
            numbers = scales.new_tensor([*_E2M1, *(-number for number in _E2M1)])
            return numbers[self.codes.int()] * scales
        return (self.codes.float() - zeros) * scales


def quantize(weight: Tensor, quantization: Quantization) -> QuantizedWeight:
    """Round a weight [out, in].

    Raises:
        ValueError: a number in it is not finite.
    """
    if not weight.isfinite().all():
        raise ValueError(f"--quantization {quantization}: a weight is infinite or NaN; serve it without")
    round_rows = {"int8": _int8, "int4": _int4, "fp8": _fp8}[quantization]
    group = weight.shape[1]
    if quantization == "int4":
        group = next((size for size in _GROUPS if weight.shape[1] % size == 0), -(-weight.shape[1] // 8) * 8)
    parts = [round_rows(rows.float(), group) for rows in weight.detach().split(_ROWS)]
    codes, scales, zeros = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return QuantizedWeight(quantization, codes, scales.t().contiguous(), zeros.t().contiguous(), group)


def _int8(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes [rows, in], scales and zeros [rows, 1]."""
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (weight / scales).round_().clamp_(-127, 127) + 128
    return codes.to(torch.uint8), scales, torch.full_like(scales, 128, dtype=torch.uint8)


def _fp8(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes [rows, in], scales and zeros [rows, 1]."""
    codes, scales = fp8_rows(weight)
    return codes, scales, torch.zeros_like(scales, dtype=torch.uint8)


def _int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes [rows, in], scales and zeros [rows, groups]."""
    rows, width = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -width % group)).view(rows, -1, group)
    low, high = groups.amin(dim=2, keepdim=True).clamp(max=0), groups.amax(dim=2, keepdim=True).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    codes, scales, zeros = torch.zeros_like(groups), torch.ones_like(low), torch.zeros_like(low)
    for part in _RANGES:
        scale = (part * (high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
        zero = (-part * low / scale).round_().clamp_(0, 15)
        code = (groups / scale + zero).round_().clamp_(0, 15)
        error = ((code - zero) * scale - groups).square().sum(dim=2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        codes, scales, zeros = (
            torch.where(better, new, old) for new, old in ((code, codes), (scale, scales), (zero, zeros))
        )
    return codes.view(rows, -1)[:, :width].to(torch.uint8), scales[..., 0], zeros[..., 0].to(torch.uint8)
