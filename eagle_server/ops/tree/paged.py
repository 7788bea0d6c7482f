"""Attention of a few rows per request over its page table, under a tree mask or causal, in one kernel.

It reads lengths, slots and the mask on the device, so nothing is planned or packed for it, and a CUDA graph replays it
for any lengths. A program computes a tile of one request's rows, for one KV head, over a part of its KV: of several
parts the last one is the window, and the others share the prefix. A second kernel merges parts by their log-sum-exp
(see `ops/tree/attention.py`). The number of parts follows from the shape alone: as many as fill the device. On an H100
a tree of 64 nodes takes 13 us in a layer of an 8B model at 600 slots; FlashInfer's fa2 under a packed mask takes 31.

Source: FlashDecoding (Dao et al., 2023), with the rows of a tree instead of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import blocks, constant, dependent_launch, jit, power_of_two, tl

LARGEST_HEAD = 256  # head sizes above it need more shared memory than tiles of this size have
_WARPS = 1024  # that fill a GPU: an H100 has 132 multiprocessors, and more programs than 8 warps each were no faster
_USUAL_PARTS, _MOST_PARTS = 8, 16  # tiles are smaller where the usual parts do not fill it
# By the (row, shared head) pairs of a tile: warps of a program, and stages of its loop. Measured on an H100.
_TILES = {16: (2, 3), 32: (4, 3), 64: (4, 3), 128: (8, 2)}
_COLUMNS = 64  # slots that are read at once
_MERGED = 4  # (row, head) pairs that a program merges
_LOG2_E = constant(math.log2(math.e))


@dataclass(frozen=True)
class PagedRows:
    """The same number of query rows R for each of some requests, and what they see.

    Request r reads the KV slots `req_to_token[req_pool_indices[r], : kv_lens[r]]`. Its last W are the window.
    """

    req_pool_indices: Tensor  # int64 [bs]
    kv_lens: Tensor  # int64 [bs], window included
    req_to_token: Tensor  # int32 [max requests, width]
    mask: Tensor | None  # bool [bs, R, W], True = attend; None: causal, W = R
    # A sliding window, of so many positions with the row's own; 0: none. A mask has it for the window already. A row is
    # `row_depths` behind the prefix, int64 [bs, R]; None: its number among the rows.
    sliding: int = 0
    row_depths: Tensor | None = None


@op
def paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: PagedRows, scale: float, sinks: Tensor | None, out: Tensor
) -> Tensor:
    """Attention of each row over its request's prefix and over the window columns that it sees. Writes to `out`.

    Args:
        q: [bs * R, H, D].
        k_pool, v_pool: [slots, KV, D], any views with a dense last dimension. Query head h reads KV head h // (H / KV).
            All slots that are read must hold finite numbers, also those of columns that no row sees.
        scale: the factor on the scores, before the softmax.
        sinks: float32 [H], one more score for every row of a head, whose value is zero; None: there is none.
        out: [bs * R, H, D].
    """
    bs, longest = len(rows.kv_lens), rows.req_to_token.shape[1]
    count, (heads, kv_heads) = len(q) // bs, (q.shape[1], k_pool.shape[1])
    shared, dtype = heads // kv_heads, torch.promote_types(q.dtype, torch.float32)
    window = _causal(bs, count, rows.sliding, q.device) if rows.mask is None else rows.mask
    column = torch.arange(longest, device=q.device)
    place = column - (rows.kv_lens[:, None] - window.shape[2])  # [bs, longest], in the window
    inside = (place >= 0) & (place < window.shape[2])
    wanted = place.clamp(0, window.shape[2] - 1)[:, None].expand(-1, count, -1)
    before = (place < 0)[:, None].expand(-1, count, -1)
    if rows.sliding:
        depths = torch.arange(count, device=q.device).expand(bs, -1) if rows.row_depths is None else rows.row_depths
        before = before & (place[:, None] > depths[..., None] - rows.sliding)
    seen = before | (inside[:, None] & window.gather(2, wanted))  # [bs, R, longest]
    table = rows.req_to_token[rows.req_pool_indices]
    slots = torch.where(column < rows.kv_lens[:, None], table, table[:, :1]).view(-1)
    keys, values = (  # [bs, KV, longest, D]
        pool.index_select(0, slots).view(bs, longest, kv_heads, -1).to(dtype) for pool in (k_pool, v_pool)
    )
    queries = q.reshape(bs, count, kv_heads, shared, -1).permute(0, 2, 3, 1, 4).to(dtype)  # [bs, KV, S, R, D]
    scores = queries @ keys.permute(0, 2, 3, 1)[:, :, None] * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(dtype).view(kv_heads, shared, 1, 1).expand(bs, -1, -1, count, -1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :longest]
    attended = weights @ values.transpose(1, 2)[:, :, None]
    return out.copy_(attended.permute(0, 3, 1, 2, 4).reshape(out.shape))


def _causal(bs: int, count: int, sliding: int, device: torch.device) -> Tensor:
    seen = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    return (seen.triu(1 - sliding) if sliding else seen).expand(bs, -1, -1)


@paged_attention.on("triton")
def _launch(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: PagedRows, scale: float, sinks: Tensor | None, out: Tensor
) -> Tensor:
    bs, (heads, kv_heads), dim = len(rows.kv_lens), (q.shape[1], k_pool.shape[1]), q.shape[2]
    if any(x.stride(-1) != 1 for x in (q, k_pool, v_pool, out, rows.req_to_token)):
        raise ValueError("the last dimensions must be dense")
    count, shared = len(q) // bs, heads // kv_heads
    pairs, parts = _tiles(count * shared, kv_heads * bs)
    warps, stages = _TILES[pairs]
    mask = None if rows.mask is None else rows.mask.contiguous().view(torch.uint8)
    depths = rows.row_depths.contiguous() if rows.sliding and rows.row_depths is not None else None
    size = len(q) * heads * parts if parts > 1 else 0
    partial, lse = (torch.empty(size, n, dtype=torch.float32, device=q.device) for n in (dim, 1))
    _attention_kernel[(blocks(count * shared, pairs), kv_heads, bs * parts)](
        *(q, k_pool, v_pool, rows.req_to_token, rows.req_pool_indices, rows.kv_lens, mask, depths, sinks),
        *(out, partial, lse),
        *(*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2], *out.stride()[:2], rows.req_to_token.stride(0)),
        *(
            count,
            count if rows.mask is None else rows.mask.shape[2],
            shared,
            heads,
            rows.sliding,
            scale * math.log2(math.e),
        ),
        CAUSAL=rows.mask is None,
        SLIDES=rows.sliding > 0,
        SINKS=sinks is not None,
        PARTS=parts,
        PAIRS=pairs,
        COLUMNS=_COLUMNS,
        HEAD=dim,
        DIM=power_of_two(dim, 16),
        num_warps=warps,
        num_stages=stages,
        **dependent_launch(q.device),
    )
    if parts > 1:
        _merge_kernel[(blocks(len(q) * heads, _MERGED),)](
            *(partial, lse, out, *out.stride()[:2], heads, len(q) * heads),
            PARTS=parts,
            ROWS=_MERGED,
            HEAD=dim,
            DIM=power_of_two(dim, 16),
            **dependent_launch(q.device),
        )
    return out


def _tiles(pairs: int, groups: int) -> tuple[int, int]:
    """(pairs of a tile, parts of a request's KV), if there are `groups` times (requests times KV heads) `pairs`."""
    tile = min(max(_TILES), power_of_two(pairs, min(_TILES)))
    while tile > min(_TILES) and blocks(pairs, tile) * groups * _TILES[tile][0] * _USUAL_PARTS < _WARPS:
        tile //= 2
    warps = blocks(pairs, tile) * groups * _TILES[tile][0]
    parts = min(_MOST_PARTS, max(1, _WARPS // warps))
    return tile, 1 << (parts.bit_length() - 1)


@jit(varying=("req_to_token", "req_pool_indices", "kv_lens", "mask", "row_depths", "rows", "width", "table_row"))
def _attention_kernel(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917
    q,
    k_pool,
    v_pool,
    req_to_token,
    req_pool_indices,
    kv_lens,
    mask,
    row_depths,
    sinks,
    out,
    partial,
    partial_lse,
    q_row,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    out_row,
    out_head,
    table_row,
    rows,
    width,
    shared,
    heads,
    sliding,
    scale,
    CAUSAL: tl.constexpr,
    SLIDES: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,
    DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    kv_head = tl.program_id(1)
    request, part = (tl.program_id(2) // PARTS).to(tl.int64), tl.program_id(2) % PARTS
    is_pair = pair < rows * shared
    node, head = pair // shared, kv_head * shared + pair % shared
    row = request * rows + node
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD
    table = req_to_token + tl.load(req_pool_indices + request) * table_row
    prefix = tl.load(kv_lens + request).to(tl.int32) - width
    query = tl.load((q + row * q_row + head * q_head)[:, None] + dim, mask=is_pair[:, None] & is_dim, other=0.0)
    keys, values = k_pool + kv_head * k_head, v_pool + kv_head * v_head
    top = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    if SINKS:  # noqa: SIM102, a constant of the kernel
        if part == 0:  # a key whose value is zero
            top = tl.load(sinks + head, mask=is_pair, other=0.0) * _LOG2_E
            total += 1.0
    acc = tl.zeros([PAIRS, DIM], tl.float32)

    begin = 0
    lowest = tl.zeros([PAIRS], tl.int32)  # the columns above it are in the sliding window
    if SLIDES:
        begin = tl.maximum(prefix - sliding + 1, 0)
        depth = node if row_depths is None else tl.load(row_depths + row, mask=is_pair, other=0).to(tl.int32)
        lowest = prefix + depth - sliding
    if PARTS == 1:
        start, end = begin, prefix
    else:  # the window is a part of its own
        size = (prefix - begin + (PARTS - 1) * COLUMNS - 1) // ((PARTS - 1) * COLUMNS) * COLUMNS
        start = begin + part * size
        end = tl.where(part == PARTS - 1, start, tl.minimum(start + size, prefix))
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < end
        slot = tl.load(table + column, mask=is_column, other=0).to(tl.int64)
        key = tl.load((keys + slot * k_slot)[None] + dim[:, None], mask=is_column[None] & is_dim[:, None], other=0.0)
        visible = is_column[None]
        if SLIDES:
            visible = visible & (column[None] > lowest[:, None])
        scores = tl.where(visible, tl.dot(query, key, input_precision="ieee") * scale, float("-inf"))
        above = tl.maximum(top, tl.max(scores, axis=1))
        shift = above
        if SLIDES:  # -inf - -inf is NaN
            shift = tl.where(above > float("-inf"), above, 0.0)
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(top - shift)
        total = total * kept + tl.sum(weights, axis=1)
        value = tl.load((values + slot * v_slot)[:, None] + dim, mask=is_column[:, None] & is_dim, other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
        top = above

    if part == PARTS - 1:
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_column = column < width
            slot = tl.load(table + prefix + column, mask=is_column, other=0).to(tl.int64)
            key = tl.load(
                (keys + slot * k_slot)[None] + dim[:, None], mask=is_column[None] & is_dim[:, None], other=0.0
            )
            if CAUSAL:
                allowed = is_column[None] & (column[None] <= node[:, None])
                if SLIDES:
                    allowed = allowed & (column[None] > node[:, None] - sliding)
            else:
                in_mask = is_pair[:, None] & is_column[None]
                allowed = tl.load(mask + row[:, None] * width + column, mask=in_mask, other=0) != 0
            scores = tl.where(allowed, tl.dot(query, key, input_precision="ieee") * scale, float("-inf"))
            above = tl.maximum(top, tl.max(scores, axis=1))
            shift = tl.where(above > float("-inf"), above, 0.0)  # -inf - -inf is NaN
            weights = tl.exp2(scores - shift[:, None])
            kept = tl.exp2(top - shift)
            total = total * kept + tl.sum(weights, axis=1)
            value = tl.load((values + slot * v_slot)[:, None] + dim, mask=is_column[:, None] & is_dim, other=0.0)
            acc = tl.dot(weights.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
            top = above

    has_key = total > 0
    total = tl.where(has_key, total, 1.0)
    acc = acc / total[:, None]
    if PARTS == 1:
        place = (out + row * out_row + head * out_head)[:, None] + dim
        tl.store(place, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & is_dim)
    else:
        place = (row * heads + head) * PARTS + part
        tl.store(partial + place[:, None] * HEAD + dim, acc, mask=(is_pair & has_key)[:, None] & is_dim)
        tl.store(partial_lse + place, tl.where(has_key, top + tl.log2(total), float("-inf")), mask=is_pair)


@jit
def _merge_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    partial,
    lse,
    out,
    out_row,
    out_head,
    heads,
    count,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """partial: float32 [count, PARTS, HEAD]; lse: float32 [count, PARTS], base 2, -inf for a part without keys."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_pair, dim, part = pair < count, tl.arange(0, DIM), tl.arange(0, PARTS)
    is_value = is_pair[:, None] & (dim < HEAD)
    known = tl.load(lse + pair[:, None] * PARTS + part, mask=is_pair[:, None], other=0.0)
    weights = tl.exp2(known - tl.max(known, axis=1)[:, None])
    weights = weights / tl.sum(weights, axis=1)[:, None]
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for number in tl.static_range(PARTS):
        weight = tl.sum(tl.where(part[None] == number, weights, 0.0), axis=1)
        is_part = is_value & (weight > 0)[:, None]  # one without keys was not written
        value = tl.load(partial + ((pair * PARTS + number)[:, None] * HEAD + dim), mask=is_part, other=0.0)
        acc += value * weight[:, None]
    place = (out + pair // heads * out_row + pair % heads * out_head)[:, None] + dim
    tl.store(place, acc.to(out.dtype.element_ty), mask=is_value)
