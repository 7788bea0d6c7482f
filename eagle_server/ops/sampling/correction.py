"""Guessed chances, corrected by what was accepted before. `worker/budget/estimates.py` counts that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

_BLOCK = 256


class Correction(NamedTuple):
    """min(guess + ratio of the guess's bin, most), all logarithms. -inf and NaN stay."""

    ratios: Tensor  # float32 [temperatures, depths, 2, bins]
    edges: Tensor  # float32 [bins - 1], ascending. An edge belongs to the bin below it
    temperature_bin: Tensor  # int64 [bs], numbers of the requests' temperatures
    depth: int  # the number of the guesses' depth
    most: float


@op
def correct_guesses(guesses: Tensor, correction: Correction) -> Tensor:
    """The guesses float32 [bs, nodes, k], corrected.

    The best of each node come first: those from the second on have ratios of their own.
    """
    ratios, edges, temperature_bin, depth, most = correction
    later = torch.ones(guesses.shape[2], dtype=torch.int64, device=guesses.device)
    later[:1] = 0
    return corrected(guesses, ratios, edges, (temperature_bin[:, None, None], depth, later), most)


def corrected(
    guesses: Tensor, ratios: Tensor, edges: Tensor, group: tuple[Tensor, Tensor | int, Tensor], most: float
) -> Tensor:
    """A `Correction` of guesses of any shape and depth.

    group: the numbers of temperature and depth, and 1 for later children, each broadcast to the guesses' shape.
    """
    return (ratios[(*group, torch.bucketize(guesses.contiguous(), edges))] + guesses).clamp_(max=most)


@correct_guesses.on("triton")
def _launch_correction(guesses: Tensor, correction: Correction) -> Tensor:
    ratios, edges, temperature_bin, depth, most = correction
    bs, nodes, topk = guesses.shape
    _, depths, _, bins = ratios.shape
    out, count = torch.empty(guesses.shape, dtype=torch.float32, device=guesses.device), nodes * topk
    block = min(_BLOCK, power_of_two(count))
    _correction_kernel[bs, blocks(count, block)](
        *(guesses, ratios, edges, temperature_bin.contiguous(), out, *guesses.stride()),
        *(count, topk, depths, bins, depth, most),
        BLOCK=block,
    )
    return out


@jit(varying=("temperature_bin", "count", "depth"))
def _correction_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    guesses,
    ratios,
    edges,
    temperature_bin,
    out,
    row,
    node,
    column,
    count,
    topk,
    depths,
    bins,
    depth,
    most,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    rank = place % topk
    guess = tl.load(guesses + request * row + place // topk * node + rank * column, mask=inside, other=0.0)
    number = tl.where(rank > 0, bins, 0)
    for edge in range(bins - 1):
        number += (guess > tl.load(edges + edge)).to(tl.int32)
    first = (tl.load(temperature_bin + request) * depths + depth) * 2 * bins
    corrected = guess + tl.load(ratios + first + number)
    tl.store(out + request * count + place, tl.where(corrected > most, most, corrected), mask=inside)
