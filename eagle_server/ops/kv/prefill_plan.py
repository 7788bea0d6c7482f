"""The plan of FlashInfer's paged prefill (fa2), written on the device. So a CUDA graph replays it for other lengths.

FlashInfer launches as many blocks as fill the device. A block computes a tile of a request's query rows over a chunk of
its KV, and a second kernel merges the chunks of each row. The plan tells each block its tile and chunk. It stands in an
int workspace that the kernels read. Of its arrays only those in `PrefillPlan` follow from lengths.

The contract is FlashInfer's own planner with CUDA graphs and page size 1: PrefillSplitQOKVIndptr in
flashinfer/attention/scheduler.cuh of 0.7.2.post1. A test compiles it and compares the arrays. The kernel adds up the
lengths of all requests in each program, and each program writes the blocks of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import jit, tl

SMALLEST_CHUNK = 128  # KV slots, the library's
_REQUESTS = 64  # requests whose lengths are added up at once
_BLOCK = 128  # blocks or rows that are written at once
_UNLIMITED = (1 << 31) - 1
_INFO = 15  # entries of PrefillPlanInfo


@dataclass(frozen=True)
class PrefillPlan:
    """The arrays of one wrapper's plan that follow from lengths, and what they follow from besides.

    Query rows are packed: `rows` of a request times the query heads of a KV head. A tile has `tile` packed rows.
    """

    kv_indptr: Tensor  # int32 [bs + 1], the wrapper's
    last_page_len: Tensor  # int32 [bs], the wrapper's
    request_indices: Tensor  # int32 [blocks], of each block
    qo_tile_indices: Tensor  # int32 [blocks]
    kv_tile_indices: Tensor  # int32 [blocks], its chunk
    block_valid_mask: Tensor  # uint8 [blocks], 0: the block has nothing to do
    o_indptr: Tensor  # int32 [bs + 1], partial results of each request
    merge_indptr: Tensor  # int32 [bs * rows + 1], of each row; [0]: no KV is split
    kv_chunk_size: Tensor  # int32 [1], slots
    rows: int  # per request
    tiles: int  # per request
    tile: int
    window_left: int  # slots before a row's own that it sees; -1: all
    longest: int  # slots of the longest request

    @classmethod
    def of(
        cls,
        workspace: Tensor,
        info: Sequence[int],
        lengths: tuple[Tensor, Tensor],
        rows: int,
        group: int,
        window_left: int,
        longest: int,
    ) -> PrefillPlan:
        """The arrays in an int workspace, uint8, that the host has planned for any lengths.

        Args:
            info: PrefillPlanInfo, which the planner returns.
            lengths: `kv_indptr` and `last_page_len`.
            group: query heads per KV head.
        """
        if len(info) != _INFO:
            raise ValueError(f"FlashInfer's PrefillPlanInfo has {len(info)} entries, not {_INFO}: another version?")
        blocks, _, _, tile, *offsets, splits = info
        requests, qo_tiles, kv_tiles, merge, o_indptr, chunk, _, _, valid, _ = offsets
        bs = len(lengths[1])

        def ints(offset: int, count: int) -> Tensor:
            return workspace[offset : offset + 4 * count].view(torch.int32)

        return cls(
            *lengths,
            ints(requests, blocks),
            ints(qo_tiles, blocks),
            ints(kv_tiles, blocks),
            workspace[valid : valid + blocks],
            ints(o_indptr, bs + 1),
            ints(merge, bs * rows + 1 if splits else 0),
            ints(chunk, 1),
            rows,
            -(-rows * group // tile),
            tile,
            window_left,
            longest,
        )

    @property
    def fills_device(self) -> bool:
        """Whether each tile needs a block, so that none is left for a second chunk."""
        return len(self.request_indices) == self.tiles * len(self.last_page_len)


@op
def plan_prefill(kv_indptr: Tensor, plan: PrefillPlan) -> None:
    """Write `plan`'s arrays for these lengths, kv_indptr int32 [bs + 1].

    The chunk is the smallest of at least SMALLEST_CHUNK slots for which the blocks suffice. All tiles of a request have
    the same chunks. With a sliding window a tile's chunks cover only the slots that its rows can see.
    """
    lens = kv_indptr.diff()
    plan.kv_indptr.copy_(kv_indptr)
    plan.last_page_len.copy_(lens.clamp(max=1))
    seen = lens.clamp(1, _most_seen(plan)).long()
    blocks = len(plan.request_indices)
    sizes = torch.arange(SMALLEST_CHUNK, max(SMALLEST_CHUNK, plan.longest) + 1, device=lens.device)
    suffices = plan.tiles * -(-seen // sizes[:, None]).sum(1) <= blocks
    chunk = sizes.index_select(0, suffices.int().argmax().view(1))
    chunks = -(-seen // chunk)  # [bs]
    ends = (plan.tiles * chunks).cumsum(0)
    block = torch.arange(blocks, device=lens.device)
    request = torch.searchsorted(ends, block, right=True).clamp(max=len(lens) - 1)
    count = chunks.index_select(0, request)
    inside = block - ends.index_select(0, request) + plan.tiles * count
    valid = block < ends[-1]
    plan.request_indices.copy_(request * valid)
    plan.qo_tile_indices.copy_(inside // count * valid)
    plan.kv_tile_indices.copy_(inside % count * valid)
    plan.block_valid_mask.copy_(valid)
    plan.kv_chunk_size.copy_(chunk)
    plan.o_indptr[:1].zero_()
    torch.cumsum(plan.rows * chunks, 0, dtype=torch.int32, out=plan.o_indptr[1:])
    if len(plan.merge_indptr):
        rows = torch.arange(plan.rows, device=lens.device)
        plan.merge_indptr[:-1].copy_((plan.o_indptr[:-1, None] + chunks[:, None] * rows).view(-1))
        plan.merge_indptr[-1:].copy_(plan.o_indptr[-1:])


def _most_seen(plan: PrefillPlan) -> int:
    """The most slots that the rows of a tile see, as the planner bounds them."""
    return _UNLIMITED if plan.window_left < 0 else plan.window_left + plan.tile


@plan_prefill.on("triton")
def _launch(kv_indptr: Tensor, plan: PrefillPlan) -> None:
    bs = len(plan.last_page_len)
    _plan_kernel[bs,](
        kv_indptr,
        plan.kv_indptr,
        plan.last_page_len,
        plan.request_indices,
        plan.qo_tile_indices,
        plan.kv_tile_indices,
        plan.block_valid_mask,
        plan.o_indptr,
        plan.merge_indptr,
        plan.kv_chunk_size,
        bs,
        plan.rows,
        plan.rows if len(plan.merge_indptr) else 0,
        plan.tiles,
        len(plan.request_indices),
        _most_seen(plan),
        SMALLEST=SMALLEST_CHUNK,
        REQUESTS=_REQUESTS,
        BLOCK=_BLOCK,
    )


@jit(varying=("kv_indptr", "kv_chunk_size", "merge_indptr", "bs", "rows", "merged", "tiles", "blocks", "most"))
def _plan_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    kv_indptr,
    indptr_out,
    last_page_len,
    request_indices,
    qo_tile_indices,
    kv_tile_indices,
    block_valid_mask,
    o_indptr,
    merge_indptr,
    kv_chunk_size,
    bs,
    rows,
    merged,
    tiles,
    blocks,
    most,
    SMALLEST: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`merged`: rows of a request whose chunks are merged: `rows`, or 0."""
    request = tl.program_id(0)
    low = tl.full([], SMALLEST, tl.int32)
    high = tl.maximum(low, _longest(kv_indptr, bs, most, REQUESTS))
    while low < high:
        middle = (low + high) // 2
        fits = _chunks_of(kv_indptr, bs, most, middle, REQUESTS) * tiles <= blocks
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    before = _chunks_of(kv_indptr, request, most, low, REQUESTS)
    start, end = tl.load(kv_indptr + request), tl.load(kv_indptr + request + 1)
    chunks = (_seen(end - start, most) + low - 1) // low
    if request == 0:
        tl.store(indptr_out, start)
        tl.store(o_indptr, 0)
        tl.store(kv_chunk_size, low)
    tl.store(indptr_out + request + 1, end)
    tl.store(last_page_len + request, tl.minimum(end - start, 1))
    tl.store(o_indptr + request + 1, (before + chunks) * rows)
    first, count = before * tiles, chunks * tiles
    for offset in range(0, count, BLOCK):
        inside = offset + tl.arange(0, BLOCK)
        mine = inside < count
        tl.store(request_indices + first + inside, request, mask=mine)
        tl.store(qo_tile_indices + first + inside, inside // chunks, mask=mine)
        tl.store(kv_tile_indices + first + inside, inside % chunks, mask=mine)
        tl.store(block_valid_mask + first + inside, 1, mask=mine)
    for offset in range(0, merged, BLOCK):
        row = offset + tl.arange(0, BLOCK)
        tl.store(merge_indptr + request * rows + row, before * rows + row * chunks, mask=row < rows)
    if request == bs - 1:
        for offset in range(first + count, blocks, BLOCK):
            rest = offset + tl.arange(0, BLOCK)
            tl.store(request_indices + rest, 0, mask=rest < blocks)
            tl.store(qo_tile_indices + rest, 0, mask=rest < blocks)
            tl.store(kv_tile_indices + rest, 0, mask=rest < blocks)
            tl.store(block_valid_mask + rest, 0, mask=rest < blocks)
        if merged > 0:
            tl.store(merge_indptr + bs * rows, (before + chunks) * rows)


@jit
def _seen(length, most):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.minimum(length, most), 1)


@jit
def _longest(kv_indptr, bs, most, REQUESTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The most slots that a tile of any request sees."""
    found = tl.zeros([REQUESTS], tl.int32)
    for first in range(0, bs, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        found = tl.maximum(found, _seen(_lengths(kv_indptr, request, bs), most))
    return tl.max(found, 0)


@jit
def _chunks_of(kv_indptr, count, most, chunk, REQUESTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The chunks of the first `count` requests together."""
    total = tl.zeros([REQUESTS], tl.int32)
    for first in range(0, count, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        chunks = (_seen(_lengths(kv_indptr, request, count), most) + chunk - 1) // chunk
        total += tl.where(request < count, chunks, 0)
    return tl.sum(total, 0)


@jit
def _lengths(kv_indptr, request, count):  # type: ignore[no-untyped-def]
    start = tl.load(kv_indptr + request, mask=request < count, other=0)
    return tl.load(kv_indptr + request + 1, mask=request < count, other=0) - start
