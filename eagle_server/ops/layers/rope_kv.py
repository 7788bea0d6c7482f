"""Between a layer's first matrix product and its attention: q and k norms, rotary embedding and the write to the pool.

One program per row and head. Its head's values stay in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.layers.fused import AngleTable, rms_norm, rotate
from eagle_server.ops.triton_support import dependent_launch, jit, power_of_two, tl


class HeadNorms(NamedTuple):
    """The norms of Qwen3's queries and keys, before the rotation: x / rms(x) * (offset + weight)."""

    q_weight: Tensor  # [dim]
    k_weight: Tensor  # [dim]
    eps: float
    offset: float = 0.0


@op
def rotate_and_write(
    qkv: Tensor,
    heads: int,
    rotation: AngleTable,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values to their slots.

    Args:
        qkv: [T, heads + 2 * kv_heads, dim], any view with a dense last dimension. It may be overwritten.
        heads: the number of query heads, which come first, before the keys and the values.
        rotation: positions [T] and angles. Pairs are (i, i + rotary_dim / 2), as in Llama; later dimensions stay.
        keys, values: the pool of the layer, [slots, kv_heads, dim], any views with a dense last dimension.
        slots: int64 [T].

    Returns:
        the queries [T, heads, dim], which may be a view of qkv.
    """
    kv_heads = keys.shape[1]
    q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q = rms_norm(q, norms.q_weight, norms.eps, norms.offset)
        k = rms_norm(k, norms.k_weight, norms.eps, norms.offset)
    cos, sin = rotation.table.index_select(0, rotation.positions)[:, None].chunk(2, dim=2)
    cos, sin = torch.cat([cos, cos], dim=2), torch.cat([-sin, sin], dim=2)
    q, k = (rotate(x.float(), cos, sin).to(qkv.dtype) for x in (q, k))
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)
    return q


@rotate_and_write.on("triton")
def _launch_rotation(
    qkv: Tensor,
    heads: int,
    rotation: AngleTable,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    kv_heads, dim = keys.shape[1:]
    rotary = rotation.table.shape[1]
    if qkv.stride(2) != 1 or keys.stride(2) != 1 or values.stride(2) != 1:
        raise ValueError("last dimensions must be dense")
    q_weight, k_weight, eps, offset = (None, None, 0.0, 0.0) if norms is None else norms
    _rotation_kernel[len(qkv), heads + kv_heads](
        *(qkv, rotation.positions.contiguous(), rotation.table, keys, values, slots.contiguous(), q_weight, k_weight),
        *(*qkv.stride()[:2], *keys.stride()[:2], *values.stride()[:2], rotation.table.stride(0)),
        *(heads, kv_heads, rotary // 2, dim, eps, offset),
        HALF=power_of_two(rotary // 2),
        REST=0 if rotary == dim else power_of_two(dim - rotary),
        num_warps=1,
        **dependent_launch(qkv.device),
    )
    return qkv[:, :heads]


@jit(varying=("positions", "slots"))
def _rotation_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915, PLR0917
    qkv,
    positions,
    table,
    keys,
    values,
    slots,
    q_weight,
    k_weight,
    qkv_row,
    qkv_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    table_row,
    heads,
    kv_heads,
    half,
    dim,
    eps,
    offset,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries are rotated in place. A key is written to its slot only, and its program copies the value too.

    The dimensions after the first 2 * half are not rotated. REST 0: there are none.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, HALF)
    inside = column < half
    place = qkv + row * qkv_row + head * qkv_head + column
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    is_query = head < heads
    if REST:
        later = 2 * half + tl.arange(0, REST)
        is_later = later < dim
        rest = tl.load(qkv + row * qkv_row + head * qkv_head + later, mask=is_later, other=0.0).to(tl.float32)
    if q_weight is not None:
        squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        if REST:
            squares += tl.sum(rest * rest, 0)
        scale = tl.rsqrt(squares / dim + eps)
        weight = tl.where(is_query, q_weight, k_weight) + column
        weights = offset + tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        dtype = qkv.dtype.element_ty
        first = (first * scale * weights).to(dtype).to(tl.float32)
        weights = offset + tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
        second = (second * scale * weights).to(dtype).to(tl.float32)
        if REST:
            later_weight = tl.where(is_query, q_weight, k_weight) + later
            rest = rest * scale * (offset + tl.load(later_weight, mask=is_later, other=0.0).to(tl.float32))
    angle = table + tl.load(positions + row).to(tl.int64) * table_row + column
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + half, mask=inside, other=0.0)
    turned = (first * cos - second * sin).to(qkv.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(qkv.dtype.element_ty)
    if is_query:
        tl.store(place, turned, mask=inside)
        tl.store(place + half, turned_second, mask=inside)
        if REST:
            tl.store(qkv + row * qkv_row + head * qkv_head + later, rest.to(qkv.dtype.element_ty), mask=is_later)
    else:
        slot = tl.load(slots + row)
        key = keys + slot * k_slot + (head - heads) * k_head + column
        tl.store(key, turned, mask=inside)
        tl.store(key + half, turned_second, mask=inside)
        source = place + kv_heads * qkv_head
        value = values + slot * v_slot + (head - heads) * v_head + column
        tl.store(value, tl.load(source, mask=inside), mask=inside)
        tl.store(value + half, tl.load(source + half, mask=inside), mask=inside)
        if REST:
            later_key = keys + slot * k_slot + (head - heads) * k_head + later
            tl.store(later_key, rest.to(qkv.dtype.element_ty), mask=is_later)
            copied = tl.load(qkv + row * qkv_row + (head + kv_heads) * qkv_head + later, mask=is_later)
            tl.store(values + slot * v_slot + (head - heads) * v_head + later, copied, mask=is_later)
