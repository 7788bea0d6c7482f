"""KV slots from the page table. Lengths stay on the device, so CUDA graphs can replay these operations.

The torch twins compute the slot of each place in `out`. The kernels copy the slots of each request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

_BLOCK = 512
_SPLITS = 8  # programs per request
_WINDOW = 128  # positions per program; a prompt may have any number of them
_REQUESTS = 64  # requests whose lengths are added up at once


def indptr_of(lens: Tensor) -> Tensor:
    """Prefix sums, int32 [n + 1]."""
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=indptr[1:])
    return indptr


@op
def build_kv_indices(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, out: Tensor) -> Tensor:
    """out[kv_indptr[b] : kv_indptr[b + 1]] = req_to_token[req_pool_indices[b], : kv_lens[b]]

    Args:
        req_to_token: int32 [number of rows, width], slots by position.
        req_pool_indices: int64 [bs], rows of req_to_token.
        kv_lens: int32 or int64 [bs].
        out: int32 [capacity], capacity at least the sum of kv_lens. The rest is not written.

    Returns:
        kv_indptr int32 [bs + 1], the prefix sums of kv_lens.
    """
    kv_indptr = indptr_of(kv_lens)
    place = torch.arange(len(out), dtype=torch.int32, device=out.device)
    request, column = _owner(kv_indptr, place)
    column = column.clamp(0, req_to_token.shape[1] - 1)
    slots = req_to_token[req_pool_indices.index_select(0, request), column]
    out.copy_(torch.where(place < kv_indptr[-1], slots, out))
    return kv_indptr


@op
def window_slots(
    req_to_token: Tensor, req_pool_indices: Tensor, first: Tensor, count: int, *, offset: int = 0
) -> Tensor:
    """The slots of `count` positions per request from first + offset on, int64 [bs, count].

    Args:
        req_to_token: int32 [number of rows, width].
        req_pool_indices, first: int64 [bs].
    """
    places = first[:, None] + torch.arange(offset, offset + count, device=first.device)
    # only these columns: a whole row may be 0.5 MB
    return req_to_token[req_pool_indices[:, None], places].long()


@op
def draft_slots(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, steps: int, topk: int
) -> tuple[Tensor, Tensor]:
    """Slots and positions of the nodes that draft steps feed, int64 [steps, bs * topk] each.

    Node c of step i has position seq_len + i and the slot of position seq_len + i * topk + c.

    Args:
        req_to_token: int32 [number of rows, width].
        req_pool_indices, seq_lens: int64 [bs].
    """
    slots = window_slots(req_to_token, req_pool_indices, seq_lens, steps * topk).unflatten(1, (steps, topk))
    positions = seq_lens[:, None] + torch.arange(steps, device=seq_lens.device)[:, None, None]
    return slots.transpose(0, 1).flatten(1), positions.expand(-1, -1, topk).flatten(1)


@op
def build_draft_decode_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    ancestor_mask: Tensor,
    num_visible: int,
    out: Tensor,
) -> Tensor:
    """kv_indices of one draft step with bs * K decode queries. Each query reads the prefix, its ancestors and itself.

    Query q = b * K + k reads seq_lens[b] + num_visible slots: the prefix, then the window slots seq_lens[b] + w with
    ancestor_mask[b, k, w], in the order of w.

    Args:
        req_to_token: int32 [number of rows, width].
        req_pool_indices: int64 [bs], rows of req_to_token.
        seq_lens: int64 [bs], lengths of the prefixes.
        ancestor_mask: bool [bs, K, W], with exactly `num_visible` True in each row.
        out: int32 [capacity], capacity at least K * sum(seq_lens + num_visible). The rest is not written.

    Returns:
        kv_indptr int32 [bs * K + 1].
    """
    _, topk, window = ancestor_mask.shape
    kv_indptr = indptr_of((seq_lens + num_visible).repeat_interleave(topk))
    place = torch.arange(len(out), dtype=torch.int32, device=out.device)
    query, column = _owner(kv_indptr, place)
    request = torch.div(query, topk, rounding_mode="floor")
    prefix = seq_lens.index_select(0, request)
    # A stable sort puts the window columns of each query first, in their order.
    order = ancestor_mask.flatten(0, 1).to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    in_window = order[query, (column - prefix).clamp(0, window - 1)]
    column = torch.where(column < prefix, column, prefix + in_window).clamp(0, req_to_token.shape[1] - 1)
    slots = req_to_token[req_pool_indices.index_select(0, request), column]
    out.copy_(torch.where(place < kv_indptr[-1], slots, out))
    return kv_indptr


def _owner(indptr: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The segment of each place (int64) and the offset in it. Places after the end belong to the last segment."""
    segment = torch.searchsorted(indptr[1:], place, right=True).clamp(max=len(indptr) - 2)
    return segment, place - indptr.index_select(0, segment)


@build_kv_indices.on("triton")
def _launch_kv_indices(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, out: Tensor) -> Tensor:
    bs, splits = len(req_pool_indices), min(_SPLITS, blocks(req_to_token.shape[1], _BLOCK))
    kv_indptr = torch.empty(bs + 1, dtype=torch.int32, device=out.device)
    _kv_indices_kernel[bs, splits](
        req_to_token,
        req_pool_indices,
        kv_lens.contiguous(),
        kv_indptr,
        out,
        req_to_token.stride(0),
        REQUESTS=_REQUESTS,
        SPLITS=splits,
        BLOCK=_BLOCK,
    )
    return kv_indptr


@window_slots.on("triton", when=lambda table, rows, first, count, **_: count > 0)
def _launch_window_slots(
    req_to_token: Tensor, req_pool_indices: Tensor, first: Tensor, count: int, *, offset: int = 0
) -> Tensor:
    bs = len(first)
    out = torch.empty(bs, count, dtype=torch.int64, device=first.device)
    _window_kernel[bs, blocks(count, _WINDOW)](
        req_to_token, req_pool_indices, first.contiguous(), out, req_to_token.stride(0), count, offset, BLOCK=_WINDOW
    )
    return out


@draft_slots.on("triton", when=lambda table, rows, seq_lens, steps, topk: steps > 0)
def _launch_draft_slots(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, steps: int, topk: int
) -> tuple[Tensor, Tensor]:
    bs = len(seq_lens)
    slots = torch.empty(steps, bs * topk, dtype=torch.int64, device=seq_lens.device)
    positions = torch.empty_like(slots)
    _draft_slots_kernel[bs, blocks(steps * topk, _WINDOW)](
        *(req_to_token, req_pool_indices, seq_lens.contiguous(), slots, positions),
        *(req_to_token.stride(0), steps * topk, topk),
        BLOCK=_WINDOW,
    )
    return slots, positions


@build_draft_decode_kv_indices.on("triton")
def _launch_draft_decode_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    ancestor_mask: Tensor,
    num_visible: int,
    out: Tensor,
) -> Tensor:
    _, topk, window = ancestor_mask.shape
    kv_indptr = indptr_of((seq_lens + num_visible).repeat_interleave(topk))
    splits = min(_SPLITS, blocks(req_to_token.shape[1], _BLOCK))
    _draft_decode_kv_indices_kernel[len(req_pool_indices) * topk, splits](
        req_to_token,
        req_pool_indices,
        seq_lens,
        ancestor_mask.contiguous().view(torch.uint8),
        kv_indptr,
        out,
        req_to_token.stride(0),
        topk,
        window,
        WINDOW_BLOCK=power_of_two(window),
        SPLITS=splits,
        BLOCK=_BLOCK,
    )
    return kv_indptr


@jit(varying=("req_pool_indices", "kv_lens"))
def _kv_indices_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    table,
    req_pool_indices,
    kv_lens,
    kv_indptr,
    out,
    table_stride,
    REQUESTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program adds up the lengths before its request. The first one of a request writes its end to kv_indptr."""
    request = tl.program_id(0)
    start = sum_before(kv_lens, request, REQUESTS)
    length = tl.load(kv_lens + request).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(kv_indptr + request + 1, start + length)
        if request == 0:
            tl.store(kv_indptr, 0)
    row = table + tl.load(req_pool_indices + request).to(tl.int64) * table_stride
    _copy_slots(row, out + start, length, SPLITS, BLOCK)


@jit(varying=("req_pool_indices", "first", "count", "offset"))
def _window_kernel(  # type: ignore[no-untyped-def]
    table, req_pool_indices, first, out, table_stride, count, offset, BLOCK: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = table + tl.load(req_pool_indices + request).to(tl.int64) * table_stride
    place = row + tl.load(first + request) + offset
    slot = tl.load(place + column, mask=column < count, other=0)
    tl.store(out + request * count + column, slot.to(tl.int64), mask=column < count)


@jit(varying=("req_pool_indices", "seq_lens", "count", "topk"))
def _draft_slots_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    table, req_pool_indices, seq_lens, slots, positions, table_stride, count, topk, BLOCK: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step = node // topk
    length = tl.load(seq_lens + request)
    row = table + tl.load(req_pool_indices + request).to(tl.int64) * table_stride
    place = (step * tl.num_programs(0) + request) * topk + node % topk
    tl.store(slots + place, tl.load(row + length + node, mask=node < count, other=0).to(tl.int64), mask=node < count)
    tl.store(positions + place, length + step, mask=node < count)


@jit(varying=("req_pool_indices", "seq_lens"))
def _draft_decode_kv_indices_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    table,
    req_pool_indices,
    seq_lens,
    ancestor_mask,
    kv_indptr,
    out,
    table_stride,
    topk,
    window,
    WINDOW_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    query = tl.program_id(0)
    request = query // topk
    row = table + tl.load(req_pool_indices + request).to(tl.int64) * table_stride
    prefix = tl.load(seq_lens + request)
    start = tl.load(kv_indptr + query)
    _copy_slots(row, out + start, prefix, SPLITS, BLOCK)
    if tl.program_id(1) == 0:
        column = tl.arange(0, WINDOW_BLOCK)
        visible = tl.load(ancestor_mask + query * window + column, mask=column < window, other=0).to(tl.int32)
        rank = tl.cumsum(visible, 0) - visible
        room = tl.load(kv_indptr + query + 1) - start - prefix
        keep = (visible != 0) & (rank < room)
        tl.store(out + start + prefix + rank, tl.load(row + prefix + column, mask=keep), mask=keep)


@jit
def sum_before(lens, request, REQUESTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the first `request` lengths, int32."""
    total = tl.zeros([REQUESTS], tl.int32)
    for first in range(0, request, REQUESTS):
        others = first + tl.arange(0, REQUESTS)
        total += tl.load(lens + others, mask=others < request, other=0).to(tl.int32)
    return tl.sum(total, 0)


@jit
def _copy_slots(row, out, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[: count] = row[: count]. Each program of axis 1 copies its part."""
    for first in range(tl.program_id(1) * BLOCK, count, SPLITS * BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(out + column, tl.load(row + column, mask=column < count), mask=column < count)
