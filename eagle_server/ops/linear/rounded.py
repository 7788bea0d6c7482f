"""Products with weights in fp8 or int4 by one Triton kernel, which leaves the inputs as they are.

A tile of codes is widened to the inputs' dtype, in which codes are exact, and multiplied by tensor cores. The sums of a
row follow from the weight's shape alone, so a row's result does not depend on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.device import on_gpu
from eagle_server.ops.dispatch import op
from eagle_server.ops.linear.fp8_rows import fp8_rows
from eagle_server.ops.linear.quantize import QuantizedWeight
from eagle_server.ops.triton_support import blocks, jit, tl

GROUPS = (32, 64, 128, 256)  # inputs that share a scale
_BLOCK = 128  # inputs, at most, that are multiplied before their scale is
_TILE = 32  # outputs; with 256 inputs it took 0.60 of cuBLAS's time in bfloat16 on an H100, see docs/experiments.md
_PROGRAMS = 256  # that a product of few rows should have: where the outputs give fewer, the inputs are split
_SPLIT = 1024  # inputs of a split, at least


class Tile(NamedTuple):
    """How a product is cut into programs, up to this number of rows."""

    rows: int
    outputs: int
    inputs: int  # where an output has one scale
    warps: int
    stages: int


@dataclass(frozen=True)
class RoundedWeight:
    """A weight [out, in] as the kernel reads it: (codes - zeros) * scales.

    codes: float8_e4m3fn [out, in]; or int4 as uint8 [out, in / 2], where the lower four bits hold the first half of a
    block's inputs, and the upper four the second half. scales: float32 [groups, out]. zeros: uint8 [groups, out]; of
    fp8 None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int  # inputs that share a scale
    dtype: torch.dtype  # of the model

    @classmethod
    def packed(cls, weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> RoundedWeight:
        """Pack a weight that `fits`. On a GPU it launches every kernel that it may need, so that all are compiled."""
        codes, scales, zeros = weight.codes.to(device), weight.scales.to(device), None
        if weight.quantization == "int4":
            low, high = codes.unflatten(1, (-1, 2, min(weight.group, _BLOCK) // 2)).unbind(2)
            codes, zeros = (low | high << 4).flatten(1), weight.zeros.to(device)
        packed = cls(codes, scales, zeros, weight.group, dtype)
        for tile in TILES if on_gpu(codes) else ():
            packed.linear(torch.zeros(tile.rows, packed.inputs, dtype=dtype, device=device))
        return packed

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (1 if self.zeros is None else 2)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.zeros) if tensor is not None)

    @property
    def is_grouped(self) -> bool:
        return len(self.scales) > 1

    @property
    def block(self) -> int:
        """The inputs whose sum is multiplied by one scale, or a part of them."""
        return min(self.group, _BLOCK)

    @property
    def splits(self) -> int:
        """Parts of the inputs that are summed apart, and then one after the other."""
        outputs = self.codes.shape[0]
        return max(1, min(blocks(_PROGRAMS, blocks(outputs, _TILE)), self.inputs // _SPLIT))

    @property
    def split_inputs(self) -> int:
        """The inputs of a split: whole tiles of every size. The last split may have fewer."""
        return blocks(blocks(self.inputs, _LONGEST), self.splits) * _LONGEST

    def numbers(self) -> Tensor:
        """codes - zeros, float32 [out, in]."""
        if self.zeros is None:
            return self.codes.float()
        pairs = self.codes.unflatten(1, (-1, self.block // 2))
        codes = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)
        return codes.float() - self.zeros.t().repeat_interleave(self.group, dim=1)

    def dense(self) -> Tensor:
        """The weight [out, in] in the dtype of the model."""
        scales = self.scales.t().repeat_interleave(self.group, dim=1)[:, : self.inputs]
        return (self.numbers() * scales).to(self.dtype)

    def linear(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out], without a bias."""
        x = x.to(self.dtype)
        fits_torch = self.zeros is None and not self.is_grouped and len(self.codes) % 16 == 0
        return self.multiply_rounded(x) if fits_torch and len(x) > _FEW else rounded_linear(x, self)

    def multiply_rounded(self, x: Tensor) -> Tensor:
        """As `linear`, of inputs rounded to fp8 by row. The weight is fp8 with a scale for each of 16 * n outputs."""
        codes, scales = fp8_rows(x)
        return torch._scaled_mm(codes, self.codes.t(), scale_a=scales, scale_b=self.scales, out_dtype=self.dtype)


# The last one is for all other numbers of rows. Shared memory holds each on GPUs from Ampere on.
TILES = (Tile(16, _TILE, 256, 4, 4), Tile(64, 64, 128, 4, 3), Tile(128, 128, 128, 8, 3))
_LONGEST = max(tile.inputs for tile in TILES)
_FEW = TILES[-2].rows  # up to which inputs are not rounded: the trees of a request alone, as in plain decoding


@op
def rounded_linear(x: Tensor, weight: RoundedWeight) -> Tensor:
    """x [rows, in] @ weight^T -> [rows, out] in the dtype of x, in which the weight's codes are exact.

    Sums are in float32 and in this order: over the inputs of a block, times the group's scale, over the blocks of a
    split, over the splits. With one scale for each output a split is one block. The result is rounded once.
    """
    inputs, wide, numbers = x.shape[1], x.float(), weight.numbers()
    result = x.new_zeros((len(x), len(numbers)), dtype=torch.float32)
    for first in range(0, inputs, weight.split_inputs):
        last = min(first + weight.split_inputs, inputs)
        part, size = torch.zeros_like(result), weight.block if weight.is_grouped else last - first
        for start in range(first, last, size):
            stop = min(start + size, last)
            product = wide[:, start:stop] @ numbers[:, start:stop].t()
            part = part + product * weight.scales[start // weight.group]
        result = result + part
    return result.to(x.dtype)


@rounded_linear.on("triton")
def _launch_product(x: Tensor, weight: RoundedWeight) -> Tensor:
    """Few rows: one program for each tile and split, whose sums a second kernel adds."""
    rows, inputs = x.shape
    outputs, splits = len(weight.codes), weight.splits
    tile = next((tile for tile in TILES if rows <= tile.rows), TILES[-1])
    block = weight.block if weight.is_grouped or weight.zeros is not None else tile.inputs
    out = x.new_empty((rows, outputs))
    together = splits == 1 or tile is TILES[-1]  # one program for all splits of a tile
    sums = out if together else x.new_empty((splits, rows, outputs), dtype=torch.float32)
    _product_kernel[(blocks(rows, tile.rows), blocks(outputs, tile.outputs), 1 if together else splits)](
        *(x.contiguous(), weight.codes, weight.scales, weight.zeros, sums),
        *(rows, outputs, inputs, weight.codes.shape[1], splits, weight.split_inputs // block),
        GROUP=weight.group if weight.is_grouped else 0,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        BLOCK=block,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if not together:
        size = rows * outputs
        _sum_kernel[blocks(size, 1024),](sums, out, size, SPLITS=splits, BLOCK=1024)
    return out


@jit(varying=("rows", "splits", "split_blocks"))
def _product_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x,
    codes,
    scales,
    zeros,
    sums,
    rows,
    outputs,
    inputs,
    width,
    splits,
    split_blocks,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row blocks come first, so that programs that read the same codes run at the same time.

    width: of a row of codes. GROUP: 0 for all inputs.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < outputs
    # Of int4, the first half of a block's inputs stands in the lower four bits, the second half in the upper four.
    HALF: tl.constexpr = BLOCK if zeros is None else BLOCK // 2
    column = tl.arange(0, HALF)
    x_row = x + row.to(tl.int64)[:, None] * inputs + column
    code_row = codes + output.to(tl.int64)[None] * width + column[:, None]
    result = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        first = split * split_blocks
        part = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for block in range(first, tl.minimum(first + split_blocks, tl.cdiv(inputs, BLOCK))):
            start = block * BLOCK
            inside = start + column < inputs
            front = tl.load(x_row + start, mask=is_row[:, None] & inside, other=0.0)
            tile = tl.load(code_row + block * HALF, mask=inside[:, None] & is_output, other=0.0)
            before = tl.zeros([ROWS, OUTPUTS], tl.float32) if GROUP > 0 else part
            group = (start // GROUP if GROUP > 0 else 0) * outputs + output
            if zeros is None:
                product = tl.dot(front, tile.to(front.dtype), before, input_precision="ieee")
            else:
                zero = tl.load(zeros + group, mask=is_output, other=0).to(tl.float32)
                low = ((tile & 15).to(tl.float32) - zero).to(front.dtype)
                high = ((tile >> 4).to(tl.float32) - zero).to(front.dtype)
                rest = tl.load(x_row + start + HALF, mask=is_row[:, None], other=0.0)
                product = tl.dot(front, low, before, input_precision="ieee")
                product = tl.dot(rest, high, product, input_precision="ieee")
            if GROUP > 0:
                scale = tl.load(scales + group, mask=is_output, other=0.0)[None]
                part = tl.fma(product, scale, part)  # not left to the compiler, which may fuse it in some tiles alone
            else:
                part = product
        if GROUP == 0:
            part *= tl.load(scales + output, mask=is_output, other=0.0)
        result += part
    place = sums + (tl.program_id(2) * rows + row).to(tl.int64)[:, None] * outputs + output
    tl.store(place, result.to(sums.dtype.element_ty), mask=is_row[:, None] & is_output)


@jit(varying=("size",))
def _sum_kernel(sums, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of the splits, one after the other."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    result = tl.load(sums + at, mask=inside, other=0.0)
    for split in range(1, SPLITS):
        result += tl.load(sums + split * size + at, mask=inside, other=0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
