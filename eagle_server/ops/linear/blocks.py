"""Weights in the blocks of GGUF files: integers of 4, 5, 6 or 8 bits, multiplied as they are.

Groups of 32 inputs (of Q6_K: 16) share a scale, and in some formats a number that is added:

    weight = code * scale + low

    Q8_0, Q4_0, Q5_0        scale is a float16; there is no low
    Q4_1, Q5_1              scale and low are float16
    Q4_K, Q5_K              of 256 inputs: scale = d * 6 bits, low = -dmin * 6 bits
    Q6_K                    of 256 inputs: scale = d * 8 bits

Source of the formats: ggml's documentation and the package gguf. kernels/cpu/blocks.h packs and multiplies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.linear.quantize import QuantizedWeight

_Q4_ZERO = 8
CHUNK = 32  # inputs of a row that share a scale
_MOST = 127  # an input rounded to 8 bits


class BlockFormat(NamedTuple):
    """Inputs and bytes of a block. group: inputs that share a scale. bits: of a code. number: Format in blocks.h."""

    inputs: int
    bytes: int
    group: int
    bits: int
    number: int


FORMATS = {
    "Q8_0": BlockFormat(32, 34, 32, 8, 0),
    "Q4_0": BlockFormat(32, 18, 32, 4, 1),
    "Q4_1": BlockFormat(32, 20, 32, 4, 2),
    "Q5_0": BlockFormat(32, 22, 32, 5, 3),
    "Q5_1": BlockFormat(32, 24, 32, 5, 4),
    "Q4_K": BlockFormat(256, 144, 32, 4, 5),
    "Q5_K": BlockFormat(256, 176, 32, 5, 6),
    "Q6_K": BlockFormat(256, 210, 16, 6, 7),
}


@dataclass(frozen=True)
class BlockRows:
    """Some outputs in one format. blocks: uint8 [out, bytes], as in the file."""

    format: str
    blocks: Tensor

    @property
    def inputs(self) -> int:
        form = FORMATS[self.format]
        return self.blocks.shape[1] // form.bytes * form.inputs

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """codes int32 [out, in], less their zeros, scales and lows float32 [out, groups]."""
        form = FORMATS[self.format]
        blocks = self.blocks.unflatten(1, (-1, form.bytes))
        codes, scales, lows = (_read_super if form.inputs > form.group else _read_small)(self.format, blocks)
        return codes.flatten(1), scales.flatten(1), lows.flatten(1)

    def dense(self) -> Tensor:
        """float32 [out, in], as the package gguf has them, bit for bit."""
        codes, scales, lows = self.numbers()
        grouped = codes.float().unflatten(1, (scales.shape[1], -1))
        weight: Tensor = (grouped * scales[..., None] + lows[..., None]).flatten(1)
        return weight


@dataclass(frozen=True)
class BlockWeight:
    """A weight [out, in]: rows of several formats, one below the other, as the parts of a fused layer may have them.

    order: int64 [in / 32], where the 32 columns at each place of the rows stand in the weight; None: where they are.
        Blocks of 256 inputs cannot be put in another order, as they share numbers.
    """

    parts: tuple[BlockRows, ...]
    order: Tensor | None = None

    @classmethod
    def stacked(cls, weights: Sequence[BlockWeight]) -> BlockWeight:
        """Weights one after the other along the outputs. Neighbours of one format become one part."""
        parts: list[BlockRows] = []
        for part in (part for weight in weights for part in weight.parts):
            if parts and parts[-1].format == part.format:
                part = BlockRows(part.format, torch.cat([parts.pop().blocks, part.blocks]))
            parts.append(part)
        assert len(weights) == 1 or all(weight.order is None for weight in weights), "one order for all rows"
        return cls(tuple(parts), weights[0].order)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part.blocks) for part in self.parts), self.parts[0].inputs

    def rows(self, chosen: slice) -> BlockWeight:
        """Only some of the outputs."""
        first, last, _ = chosen.indices(self.shape[0])
        found, begin = [], 0
        for part in self.parts:
            rows = part.blocks[max(first - begin, 0) : max(last - begin, 0)]
            found += [BlockRows(part.format, rows)] if len(rows) else []
            begin += len(part.blocks)
        return BlockWeight(tuple(found), self.order)

    def columns(self, first: int, last: int) -> BlockWeight | None:
        """Only some of the inputs; None: they do not begin and end with a block, or stand in another order."""
        parts = []
        if self.order is not None:
            return None
        for part in self.parts:
            form = FORMATS[part.format]
            if first % form.inputs or last % form.inputs:
                return None
            begin, end = (place // form.inputs * form.bytes for place in (first, last))
            parts.append(BlockRows(part.format, part.blocks[:, begin:end].contiguous()))
        return BlockWeight(tuple(parts))

    def dense(self) -> Tensor:
        """The weight that is computed with, float32 [out, in]."""
        return self._ordered(torch.cat([part.dense() for part in self.parts]), CHUNK)

    def as_int4(self) -> QuantizedWeight | None:
        """The same weight for other kernels, if it is all Q4_0: groups of 32 inputs whose zeros are 8."""
        if any(part.format != "Q4_0" for part in self.parts):
            return None
        numbers = [part.numbers() for part in self.parts]
        codes = self._ordered(torch.cat([codes for codes, _, _ in numbers]), CHUNK) + _Q4_ZERO
        scales = self._ordered(torch.cat([scales for _, scales, _ in numbers]), 1).t().contiguous()
        zeros = torch.full(scales.shape, _Q4_ZERO, dtype=torch.uint8, device=scales.device)
        return QuantizedWeight("int4", codes.to(torch.uint8), scales, zeros, FORMATS["Q4_0"].group)

    def _ordered(self, numbers: Tensor, each: int) -> Tensor:
        """Numbers [out, in / 32 * each] of the stored columns, as those of the weight's."""
        if self.order is None:
            return numbers
        ordered: Tensor = numbers.unflatten(1, (-1, each))[:, self.order.argsort()].flatten(1)
        return ordered


def block_linear(x: Tensor, weight: BlockWeight) -> Tensor:
    """x [rows, in] @ weight^T -> float32 [rows, out], as the native kernels compute it.

    Each 32 inputs of a row are rounded to 8 bits with a scale of their own. Sums of integers are exact. float32 sums
    are over the groups of inputs in order: products * scale * inputs' scale, then inputs * inputs' scale * low.
    """
    chunks = x.float().unflatten(1, (-1, CHUNK))
    chunks = chunks if weight.order is None else chunks[:, weight.order]
    largest = chunks.abs().amax(dim=2, keepdim=True)
    most = torch.full_like(largest, _MOST)  # `_MOST / largest` would be rounded twice
    inputs = (chunks * torch.where(largest > 0, most / largest, 0.0)).round().flatten(1)
    return torch.cat([_sums(inputs, (largest / most)[..., 0], part) for part in weight.parts], dim=1)


def _sums(inputs: Tensor, input_scales: Tensor, part: BlockRows) -> Tensor:
    """inputs [rows, in]: integers. input_scales [rows, in / 32]."""
    (codes, scales, lows), size = part.numbers(), FORMATS[part.format].group
    sums = inputs.new_zeros(len(inputs), len(codes))
    groups = zip(inputs.split(size, dim=1), codes.float().split(size, dim=1), strict=True)
    for group, (some, own) in enumerate(groups):
        scale = input_scales[:, group * size // CHUNK, None]
        sums = sums + (some @ own.t()) * (scale * scales[:, group])
        sums = sums + (some.sum(dim=1, keepdim=True) * scale) * lows[:, group]
    return sums


def _halves(data: Tensor) -> Tensor:
    """uint8 [..., 2 n] -> the n float16 numbers in them, in float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(pairs: Tensor) -> Tensor:
    """uint8 [..., n] -> int32 [..., 2 n]: the lower halves, then the upper ones."""
    return torch.cat([pairs & 15, pairs >> 4], dim=-1).int()


def _bits(data: Tensor, width: int) -> Tensor:
    """uint8 [..., n] -> int32 [..., 8 / width, n]: fields of `width` bits of each byte, the lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)[:, None]
    return ((data.unsqueeze(-2) >> shifts) & ((1 << width) - 1)).int()


def _read_small(name: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, blocks, 32], scales and lows [out, blocks], of blocks [out, blocks, bytes] of 32 inputs."""
    scales, has_low = _halves(blocks[..., :2]), name.endswith("_1")
    lows = _halves(blocks[..., 2:4]) if has_low else torch.zeros_like(scales)
    if name == "Q8_0":
        return blocks[..., 2:].contiguous().view(torch.int8).int(), scales, lows
    data, bits = blocks[..., 4 if has_low else 2 :], FORMATS[name].bits
    codes = _nibbles(data[..., -16:])
    if bits == 5:  # noqa: PLR2004
        codes = codes + (_bits(data[..., :4], 1).transpose(-1, -2).flatten(-2) << 4)
    return codes if has_low else codes - (1 << (bits - 1)), scales, lows


def _read_super(name: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, blocks, 256], scales and lows [out, blocks, groups], of blocks [out, blocks, bytes] of 256 inputs."""
    if name == "Q6_K":
        lower = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
        upper = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
        factors = blocks[..., 192:208].contiguous().view(torch.int8)
        scales = _halves(blocks[..., 208:]) * factors
        return (lower + (upper << 4)).flatten(-2) - 32, scales, torch.zeros_like(scales)
    packed = blocks[..., 4:16].unflatten(-1, (3, 4)).int()
    first, second, third = packed.unbind(-2)
    factors = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], dim=-1)
    low_factors = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], dim=-1)
    codes = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32)))  # [..., 4, 64]
    if name == "Q5_K":
        codes = codes + (_bits(blocks[..., 16:48], 1).unflatten(-2, (4, 2)).flatten(-2) << 4)
    scales, lows = _halves(blocks[..., :2]) * factors, -_halves(blocks[..., 2:4]) * low_factors
    return codes.flatten(-2), scales, lows
