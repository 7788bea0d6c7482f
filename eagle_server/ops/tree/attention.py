"""Cascade attention for tree windows: attention under a tree mask over a few slots, merged with that over the prefix.

Softmax over KV can be split exactly. For a set of keys A let o(A) be the attention output, and
lse(A) = log2(sum of exp(scale * q.k)). FlashInfer uses base 2 too. For disjoint sets A and B

    lse = log2(2^lse(A) + 2^lse(B)),   o = (2^lse(A) o(A) + 2^lse(B) o(B)) / 2^lse

Every row sees the whole prefix, so the prefix needs no mask, and the mask needs no bits for the prefix. An empty set
has lse = -inf, and its o is ignored. The kernel treats the prefix as the first column of the online softmax: a key with
score lse(prefix) and value o(prefix).

An attention sink is a key with the score `sink` and the value 0, so it is merged like the rest: `add_sinks`.

Source: FlashInfer's cascade inference (flashinfer.ai, 2024) and FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import blocks, constant, jit, power_of_two, tl

_COLUMNS = 32  # window columns of one tile
_WIDE = 128  # above this value size a program has more warps
_LOG2_E = constant(math.log2(math.e))
_FEW = 128  # up to this many (row, shared head) pairs, tiles are small, so that there are more programs


@op
def tree_block_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    mask: Tensor,
    scale: float,
    prefix: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> Tensor:
    """Attention of each row over the window columns that its mask allows, merged with the prefix. Writes to `out`.

    Args:
        q: [bs * R, H, Dq].
        k_pool, v_pool: [slots, KV, Dq] and [slots, KV, Dv <= Dq], any views with a dense last dimension. Query head h
            reads KV head h // (H / KV). If values are the front of the keys (MLA), each key is read only once.
        slots: int [bs, W], the slots of the window's columns. A slot that no row of the request sees may hold NaN.
        mask: bool [bs, R, W], True = attend.
        scale: the factor on the scores, before the softmax.
        prefix: (o [bs * R, H, Dv], lse float32 [bs * R, H]) of the prefix, or None if there is none.
        out: [bs * R, H, Dv]. A row that sees no column gets the prefix alone, or zeros without a prefix.
    """
    bs, rows, width = mask.shape
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    shared = heads // kv_heads
    dtype = torch.promote_types(q.dtype, torch.float32)
    seen = mask.any(dim=1)  # [bs, W]
    index = torch.where(seen, slots, 0).view(-1)
    keys, values = (  # [bs, KV, W, *]; slots that no row sees become 0, because 0 * NaN is NaN
        pool.index_select(0, index).view(bs, width, kv_heads, -1).to(dtype).masked_fill(~seen[..., None, None], 0)
        for pool in (k_pool, v_pool)
    )
    queries = q.reshape(bs, rows, kv_heads, shared, -1).transpose(1, 2).flatten(2, 3).to(dtype)  # [bs, KV, R * S, Dq]
    scores = queries @ keys.permute(0, 2, 3, 1) * (scale * math.log2(math.e))
    allowed = mask[:, None, :, None].expand(-1, -1, -1, shared, -1).flatten(2, 3)  # [bs, 1, R * S, W]
    scores = scores.masked_fill(~allowed, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp2(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    attended = weights @ values.transpose(1, 2) / total.masked_fill(total == 0, 1)
    lse = top + total.log2()

    def by_row(x: Tensor) -> Tensor:
        """[bs, KV, R * S, *] -> [bs * R, H, *]."""
        return x.unflatten(2, (rows, shared)).transpose(1, 2).reshape(bs * rows, heads, -1)  # type: ignore[no-any-return]

    result = by_row(attended)
    if prefix is not None:
        result, _ = merge_states(prefix[0].to(dtype), prefix[1].to(dtype), result, by_row(lse)[..., 0])
    return out.copy_(result)


@op
def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge a sink of each head into an attention state, in place. sinks: float32 [H], scores before the softmax.

    out: [n, H, D], ignored where lse is -inf; lse: float32 [n, H], base 2.

        out = out * 2^lse / (2^lse + e^sink),   lse = log2(2^lse + e^sink)
    """
    merged, total = merge_states(
        out, lse, torch.zeros_like(out), (sinks * math.log2(math.e)).to(lse.dtype).expand_as(lse)
    )
    out.copy_(merged)
    lse.copy_(total)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of the union of two disjoint sets of keys. o: [n, H, D]; lse: [n, H], base 2."""
    top = torch.maximum(lse_a, lse_b).nan_to_num(neginf=0.0)
    a, b = torch.exp2(lse_a - top), torch.exp2(lse_b - top)
    total = a + b
    parts = [
        torch.where(weight[..., None] == 0, 0, out * weight[..., None]) for out, weight in ((out_a, a), (out_b, b))
    ]
    return (parts[0] + parts[1]) / total.masked_fill(total == 0, 1)[..., None], top + total.log2()


@add_sinks.on("triton")
def _launch_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """One program per row and head."""
    rows, heads, dim = out.shape
    _sinks_kernel[(rows, heads)](
        *(out, lse, sinks, *out.stride()[:2], *lse.stride(), dim), SIZE=power_of_two(dim, 16), num_warps=1
    )


@jit
def _sinks_kernel(out, lse, sinks, out_row, out_head, lse_row, lse_head, dim, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = lse + row * lse_row + head * lse_head
    before, sink = tl.load(place), tl.load(sinks + head) * _LOG2_E
    top = tl.maximum(before, sink)
    kept = tl.exp2(before - top)
    total = kept + tl.exp2(sink - top)
    column = tl.arange(0, SIZE)
    at = out + row * out_row + head * out_head + column
    value = tl.load(at, mask=column < dim, other=0.0).to(tl.float32)
    value = tl.where(kept > 0, value * (kept / total), 0.0)  # without any key the output may be NaN
    tl.store(at, value.to(out.dtype.element_ty), mask=column < dim)
    tl.store(place, top + tl.log2(total))


@tree_block_attention.on("triton")
def _launch_block(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    mask: Tensor,
    scale: float,
    prefix: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> Tensor:
    """One program per (block of (row, shared head) pairs, KV head, request)."""
    bs, rows, width = mask.shape
    kv_heads, value_dim = v_pool.shape[1:]
    shared, rest = q.shape[1] // kv_heads, q.shape[2] - value_dim
    if rest < 0 or q.stride(2) != 1 or k_pool.stride(2) != 1 or v_pool.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("values must be no wider than keys, and last dimensions dense")
    prefix_out, prefix_lse = prefix or (out, out)
    pairs = 16 if rows * shared <= _FEW else 32
    _block_kernel[(blocks(rows * shared, pairs), kv_heads, bs)](
        *(q, k_pool, v_pool, slots.contiguous(), mask.contiguous().view(torch.uint8), prefix_out, prefix_lse, out),
        *(*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2]),
        *(*prefix_out.stride()[:2], *prefix_lse.stride()[:2], *out.stride()[:2]),
        *(rows, width, shared, value_dim, rest, scale * math.log2(math.e)),
        MERGES=prefix is not None,
        VALUES_ARE_KEYS=k_pool.data_ptr() == v_pool.data_ptr() and k_pool.stride() == v_pool.stride(),
        PAIRS=pairs,
        COLUMNS=_COLUMNS,
        FRONT=power_of_two(value_dim, 16),
        REST=power_of_two(rest, 16) if rest else 0,
        num_warps=8 if value_dim > _WIDE else 4,
        num_stages=2,
    )
    return out


@jit
def _block_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915, PLR0917
    q,
    k_pool,
    v_pool,
    slots,
    mask,
    prefix_out,
    prefix_lse,
    out,
    q_row,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    prefix_row,
    prefix_head,
    lse_row,
    lse_head,
    out_row,
    out_head,
    rows,
    width,
    shared,
    value_dim,
    rest_dim,
    scale,
    MERGES: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FRONT: tl.constexpr,
    REST: tl.constexpr,
):
    """Keys are read in two parts, value width and rest, because tile sizes are powers of two: 576 = 512 + 64."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    kv_head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    is_pair = pair < rows * shared
    row = request * rows + pair // shared
    head = kv_head * shared + pair % shared
    front = tl.arange(0, FRONT)
    is_value = is_pair[:, None] & (front < value_dim)[None]
    query = q + row * q_row + head * q_head
    q_front = tl.load(query[:, None] + front, mask=is_value, other=0.0)
    if REST > 0:
        rest = tl.arange(0, REST)
        is_rest = rest < rest_dim
        q_rest = tl.load(query[:, None] + value_dim + rest, mask=is_pair[:, None] & is_rest[None], other=0.0)

    if MERGES:
        top = tl.load(prefix_lse + row * lse_row + head * lse_head, mask=is_pair, other=0.0).to(tl.float32)
        has_prefix = top > float("-inf")
        total = has_prefix.to(tl.float32)
        value = prefix_out + row * prefix_row + head * prefix_head
        acc = tl.load(value[:, None] + front, mask=is_value & has_prefix[:, None], other=0.0).to(tl.float32)
    else:
        top = tl.full([PAIRS], float("-inf"), tl.float32)
        total = tl.zeros([PAIRS], tl.float32)
        acc = tl.zeros([PAIRS, FRONT], tl.float32)

    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        in_window = is_pair[:, None] & (column < width)[None]
        allowed = tl.load(mask + row[:, None] * width + column, mask=in_window, other=0) != 0
        # Columns that no pair of this tile sees are not read: they may hold NaN, and 0 * NaN is NaN.
        seen = tl.max(allowed.to(tl.int32), axis=0) != 0
        slot = tl.load(slots + request * width + column, mask=seen, other=0).to(tl.int64)
        key = k_pool + slot * k_slot + kv_head * k_head
        is_front = seen[:, None] & (front < value_dim)[None]
        k_front = tl.load(key[:, None] + front, mask=is_front, other=0.0)
        scores = tl.dot(q_front, tl.trans(k_front), input_precision="ieee")
        if REST > 0:
            k_rest = tl.load(key[:, None] + value_dim + rest, mask=seen[:, None] & is_rest[None], other=0.0)
            scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        scores = tl.where(allowed, scores * scale, float("-inf"))
        if VALUES_ARE_KEYS:
            values = k_front
        else:
            values = tl.load((v_pool + slot * v_slot + kv_head * v_head)[:, None] + front, mask=is_front, other=0.0)
        above = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(above > float("-inf"), above, 0.0)  # -inf - -inf is NaN
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(top - shift)
        total = total * kept + tl.sum(weights, axis=1)
        acc = acc * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = above

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store((out + row * out_row + head * out_head)[:, None] + front, acc.to(out.dtype.element_ty), mask=is_value)
