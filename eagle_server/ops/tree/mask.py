"""The tree mask in FlashInfer's format: bits over prefix and window, packed on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import jit, tl

_BLOCK = 128  # bytes
_SPLITS = 16  # programs per request
_REQUESTS = 64  # requests whose lengths are added up at once


class SlidingWindow(NamedTuple):
    """How many positions a row sees, and where rows and the window's columns are."""

    size: int  # above 0
    row_depths: Tensor  # int64 [bs, R]
    column_depths: Tensor  # int64 [bs, W]


@op
def pack_tree_mask(
    window: Tensor, kv_lens: Tensor, out: Tensor, mask_indptr: Tensor, sliding: SlidingWindow | None = None
) -> None:
    """Extend the mask of the query window to the whole KV and pack it, one bit per KV slot (1 = attend).

    Each request has R rows of kv_len bits, row-major, little-endian, and starts at a byte of its own. All rows see the
    kv_len - W columns of the prefix, unless there is a sliding window. Then row i, at position
    p = kv_len - W + row_depths[i], sees only positions above p - size.

    Args:
        window: bool [bs, R, W], True = attend.
        kv_lens: int32 or int64 [bs], including the window.
        out: uint8 [capacity], capacity at least sum(ceil(R * kv_len / 8)). Bytes after that are not written.
        mask_indptr: int32 [bs + 1]; receives the byte offsets of the requests.
    """
    bs, rows, width = window.shape
    kv_lens = kv_lens.long()
    mask_indptr[:1].zero_()
    torch.cumsum(torch.div(rows * kv_lens + 7, 8, rounding_mode="floor"), 0, dtype=torch.int32, out=mask_indptr[1:])
    place = torch.arange(len(out), dtype=torch.int32, device=out.device)
    request = torch.searchsorted(mask_indptr[1:], place, right=True).clamp(max=bs - 1)  # [capacity]
    bit = torch.arange(8, device=out.device)
    # [capacity, 8], bit numbers within the request
    index = (place - mask_indptr.index_select(0, request))[:, None] * 8 + bit
    length, request = kv_lens.index_select(0, request)[:, None], request[:, None]
    row = torch.div(index, length, rounding_mode="floor")
    column = index - row * length - (length - width)  # negative in the prefix
    inside = row < rows
    row, tree_column = row.clamp(max=rows - 1), column.clamp(min=0)
    visible = inside & ((column < 0) | window[request, row, tree_column])
    if sliding is not None:
        # Depth counts from the start of the window, so it is negative in the prefix.
        depth = torch.where(column < 0, column, sliding.column_depths[request, tree_column])
        visible &= depth > sliding.row_depths[request, row] - sliding.size
    packed = (visible.int() << bit.int()).sum(1).to(torch.uint8)
    out.copy_(torch.where(place < mask_indptr[-1], packed, out))


@pack_tree_mask.on("triton")
def _launch_pack(
    window: Tensor, kv_lens: Tensor, out: Tensor, mask_indptr: Tensor, sliding: SlidingWindow | None = None
) -> None:
    bs, rows, width = window.shape
    bits = window.contiguous().view(torch.uint8)
    size, *depths = (0, bits, bits) if sliding is None else (sliding.size, *(each.contiguous() for each in sliding[1:]))
    _pack_kernel[bs, _SPLITS](
        bits,
        kv_lens,
        *depths,
        out,
        mask_indptr,
        rows,
        width,
        size,
        SLIDES=sliding is not None,
        REQUESTS=_REQUESTS,
        SPLITS=_SPLITS,
        BLOCK=_BLOCK,
    )


@jit(varying=("kv_lens",))
def _pack_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    window,
    kv_lens,
    row_depths,
    column_depths,
    out,
    mask_indptr,
    rows,
    width,
    sliding,
    SLIDES: tl.constexpr,
    REQUESTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, split = tl.program_id(0), tl.program_id(1)
    before = tl.zeros([REQUESTS], tl.int32)
    for first in range(0, request, REQUESTS):
        others = first + tl.arange(0, REQUESTS)
        length = tl.load(kv_lens + others, mask=others < request, other=0).to(tl.int32)
        before += (length * rows + 7) // 8
    start = tl.sum(before, 0)
    length = tl.load(kv_lens + request).to(tl.int32)
    count = (length * rows + 7) // 8
    if split == 0:
        tl.store(mask_indptr + request + 1, start + count)
        if request == 0:
            tl.store(mask_indptr, 0)
    bit = tl.arange(0, 8)[None, :]
    for first in range(split * BLOCK, count, SPLITS * BLOCK):
        byte = first + tl.arange(0, BLOCK)
        index = byte[:, None] * 8 + bit  # [BLOCK, 8]
        row = index // length
        column = index - row * length - (length - width)  # negative in the prefix
        inside = row < rows
        in_tree = inside & (column >= 0)
        place = (request * rows + row) * width + column
        visible = inside & ((column < 0) | (tl.load(window + place, mask=in_tree, other=0) != 0))
        if SLIDES:
            tree_depth = tl.load(column_depths + request * width + column, mask=in_tree, other=0).to(tl.int32)
            depth = tl.where(column < 0, column, tree_depth)
            at = tl.load(row_depths + request * rows + row, mask=inside, other=0).to(tl.int32)
            visible = visible & (depth > at - sliding)
        packed = tl.sum(visible.to(tl.int32) << bit, 1)
        tl.store(out + start + byte, packed.to(tl.uint8), mask=byte < count)
