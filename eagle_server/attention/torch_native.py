"""The torch_native backend, for any device: gather each request's KV by slot, then attend in padded groups.

On a CPU with a compiler, `attention.native` attends instead, where it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.batches import attn_args_prefill
from eagle_server.attention.dense import with_sinks
from eagle_server.attention.interface import AttentionBatch, BoundAttention, LayerSpec, Layout, TreeMask
from eagle_server.attention.native import NativeAttention
from eagle_server.cache.pool import Pool
from eagle_server.ops.device import mirrors, upload

MANY_TREES, SMALL_TREE = 8, 4  # requests from which trees are grouped by size, and nodes of a small one
SHORT_QUERY = 32  # requests with at most this many query rows share one padded group; each longer one has its own


@dataclass
class _Group:
    """Requests that are computed together, padded to Q query rows and L columns.

    `rows` [g * Q] are indices into the forward's query rows. None: the group has all of them, in order. Padding repeats
    row 0; `kept` are the places of the others in `rows`. `slots` is flat, [g * L].
    """

    size: int
    q_len: int
    kv_len: int
    rows: Tensor | None
    kept: Tensor | None
    slots: Tensor
    positions: Tensor  # int64 [g, Q], position of each query, in a tree its depth after the prefix
    columns: Tensor  # int64 [g, L], position of each column, counted in the same way
    allowed: Tensor | None  # bool [g, Q, L] without sliding windows; None: every query sees every column
    biases: dict[tuple[int, torch.dtype, int], Tensor | None] = field(default_factory=dict)

    def bias(self, window: int, heads_per_kv: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [g, 1, heads_per_kv * Q, L], made once per forward and window. None if nothing is masked."""
        key = (window, dtype, heads_per_kv)
        if key not in self.biases:
            allowed = self.allowed
            if window:
                near = self.columns[:, None, :] > self.positions[:, :, None] - window
                allowed = near if allowed is None else allowed & near
            self.biases[key] = None if allowed is None else _additive(allowed, dtype, heads_per_kv)
        return self.biases[key]


def torch_native(pool: Pool) -> NativeAttention | TorchNativeAttention:
    """The backend of `--attention-backend torch_native` over a pool."""
    return NativeAttention.of(pool) or TorchNativeAttention(pool)


@dataclass(frozen=True)
class TorchNativeAttention:
    """`AttentionBackend` over one KV pool, and its own plan. Shapes depend on the lengths: graphs cannot capture it."""

    pool: Pool
    native_caches: ClassVar[None] = None
    plans_on_device: ClassVar[bool] = False
    graph_key: ClassVar[None] = None

    @property
    def ragged_trees(self) -> bool:
        """On a CPU only. Elsewhere the host would have to wait for the numbers of rows."""
        return not mirrors(self.pool.keys[0].device)

    def key_of(self, layout: Layout) -> None:
        return None

    def plan(self, layout: Layout) -> Self:
        return self

    def bind(self, batch: AttentionBatch) -> BoundTorchNative:
        return BoundTorchNative(self.pool, batch.out_cache_loc, tuple(_groups(batch)), recurrent=batch.recurrent)


@dataclass(frozen=True)
class BoundTorchNative(BoundAttention):
    """See `BoundAttention`."""

    pool: Pool
    out_cache_loc: Tensor
    groups: tuple[_Group, ...]

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.run`."""
        self.pool.write(layer.index, self.out_cache_loc, k, v)
        return self.attend(q, layer)

    def attend(self, q: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.attend`."""
        if len(self.groups) == 1 and self.groups[0].rows is None:
            return self._attend(q, self.groups[0], layer)
        out = q.new_empty(*q.shape[:2], self.pool.values[layer.index].shape[2])
        for group in self.groups:
            assert group.rows is not None and group.kept is not None
            attended = self._attend(q.index_select(0, group.rows), group, layer)
            out.index_copy_(0, group.rows.index_select(0, group.kept), attended.index_select(0, group.kept))
        return out

    def _attend(self, q: Tensor, group: _Group, layer: LayerSpec) -> Tensor:
        """Attend in one group. Query heads that share a KV head become rows of one product, so KV is not expanded."""
        heads, dim = q.shape[1:]
        keys, values = (  # [g, kv_heads, L, *]
            pool[layer.index].index_select(0, group.slots).unflatten(0, (group.size, group.kv_len)).transpose(1, 2)
            for pool in (self.pool.keys, self.pool.values)
        )
        kv_heads, width = values.shape[1], values.shape[3]
        shared = heads // kv_heads
        queries = q.view(group.size, group.q_len, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(group.size, kv_heads, shared * group.q_len, dim)
        bias = group.bias(layer.sliding_window, shared, q.dtype)
        if layer.sinks is not None:
            of_rows = layer.sinks.view(kv_heads, shared).repeat_interleave(group.q_len, dim=1)
            keys, values, bias = with_sinks(keys, values, bias, of_rows)
        if layer.softcap:
            out = _capped(queries, keys, values, bias, layer)
        else:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=layer.scale)
        out = out.view(group.size, kv_heads, shared, group.q_len, width).permute(0, 3, 1, 2, 4)
        return out.reshape(group.size * group.q_len, heads, width)


def _capped(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, layer: LayerSpec) -> Tensor:
    """Attention [.., Q, value_dim] with scores capped by tanh at `layer.softcap`. The softmax is in float32."""
    scores = queries @ keys.transpose(-1, -2) * layer.scale
    scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if bias is not None:
        scores = scores + bias
    return scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values


@dataclass(frozen=True)
class _Indices:
    """The index arrays of a forward, and its layout on the host."""

    kv_indices: Tensor  # int32 [sum of kv_lens]
    kv_indptr: Tensor  # int32 [bs + 1]
    qo_indptr: Tensor  # int32 [bs + 1]
    layout: Layout

    def padded_slots(self, members: list[int]) -> tuple[Tensor, Tensor]:
        """Slots [g, L] and lengths [g, 1] of some requests. Slots are padded with slot 0."""
        lens = [self.layout.kv_lens[i] for i in members]
        first, last = self.kv_indptr[:-1, None], self.kv_indptr[1:, None]
        if len(members) < len(self.layout.kv_lens):
            index = upload(members, first.device)
            first, last = first.index_select(0, index), last.index_select(0, index)
        elif min(lens) == max(lens):
            return self.kv_indices.view(len(lens), -1), last - first
        place = first + torch.arange(max(lens), device=first.device)
        slots = self.kv_indices[place.clamp(max=len(self.kv_indices) - 1)]
        return torch.where(place < last, slots, 0), last - first

    def padded_rows(self, members: list[int]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Numbers of query rows [g, 1] of some requests, and `rows` and `kept` as in `_Group`."""
        lens, device = [self.layout.q_lens[i] for i in members], self.qo_indptr.device
        counts = upload(lens, device)[:, None]
        if len(members) == len(self.layout.q_lens) and min(lens) == max(lens):
            return counts, None, None
        steps = torch.arange(max(lens), device=device)
        is_row = steps < counts
        first = self.qo_indptr.index_select(0, upload(members, device))
        rows = (first[:, None] + steps) * is_row
        return counts, rows.view(-1), is_row.view(-1).nonzero()[:, 0]


def _groups(batch: AttentionBatch) -> Iterator[_Group]:
    kv_indices, kv_indptr, qo_indptr, mask = attn_args_prefill(batch)
    indices, lens = _Indices(kv_indices, kv_indptr, qo_indptr, batch.layout), batch.layout.q_lens
    if mask is not None:
        yield from _tree_groups(indices, mask)
    causal = range(0 if mask is None else len(mask.visible), len(lens))
    short = [i for i in causal if lens[i] <= SHORT_QUERY]
    if short:
        yield _causal_group(indices, short)
    for i in causal:
        if lens[i] > SHORT_QUERY:
            yield _causal_group(indices, [i])


def _causal_group(indices: _Indices, members: list[int]) -> _Group:
    """A causal group: with n queries and m columns, query j sees the columns up to m - n + j."""
    slots, kv_lens = indices.padded_slots(members)
    counts, rows, kept = indices.padded_rows(members)
    longest, width = max(indices.layout.q_lens[i] for i in members), slots.shape[1]
    columns = torch.arange(width, device=slots.device)[None].expand(len(members), -1)
    positions = kv_lens - counts + torch.arange(longest, device=slots.device)
    allowed = None if longest == 1 and len(members) == 1 else columns[:, None, :] <= positions[:, :, None]
    return _Group(len(members), longest, width, rows, kept, slots.reshape(-1), positions, columns, allowed)


def _tree_groups(indices: _Indices, mask: TreeMask) -> Iterator[_Group]:
    """One group; or with many requests of different numbers of rows several, so that few rows are padding."""
    lens = indices.layout.q_lens[: len(mask.visible)]
    if len(lens) < MANY_TREES or min(lens) == max(lens):
        yield _tree_group(indices, mask, list(range(len(lens))))
        return
    alone = [i for i, n in enumerate(lens) if n == 1]
    if alone:  # a root sees everything before it
        yield _causal_group(indices, alone)
    small = [i for i, n in enumerate(lens) if 1 < n <= SMALL_TREE]
    large = [i for i, n in enumerate(lens) if n > SMALL_TREE]
    for members in (small, large):
        if members:
            member_rows, size = upload(members, mask.visible.device), max(lens[i] for i in members)
            cut = TreeMask(
                mask.visible.index_select(0, member_rows)[:, :size, :size],
                row_depths=mask.row_depths.index_select(0, member_rows)[:, :size],
                column_depths=mask.column_depths.index_select(0, member_rows)[:, :size],
            )
            yield _tree_group(indices, cut, members)


def _tree_group(indices: _Indices, mask: TreeMask, members: list[int]) -> _Group:
    """A tree group: every query sees the prefix. In the window after it, a query sees what the members' mask allows.

    A request with fewer rows has as many fewer columns. The mask needs no cut there, because no node sees padding.
    """
    size, longest, window = mask.visible.shape
    slots, kv_lens = indices.padded_slots(members)
    counts, rows, kept = indices.padded_rows(members)
    lens = [indices.layout.kv_lens[i] for i in members]
    prefix = kv_lens - window + longest - counts  # [g, 1]
    columns = torch.arange(slots.shape[1], device=slots.device)[None].expand(size, -1)
    if rows is None and min(lens) == max(lens):
        everything = mask.visible.new_ones(size, longest, slots.shape[1] - window)
        allowed = torch.cat([everything, mask.visible], dim=2)
        depths = mask.column_depths + prefix
        where = torch.cat([columns[:, : slots.shape[1] - window], depths], dim=1)
    else:
        offset = columns - prefix  # [g, L]
        inside = (offset >= 0) & (offset < window)
        clamped = offset.clamp(0, window - 1)
        in_window = mask.visible.gather(2, clamped[:, None].expand(-1, longest, -1)) & inside[:, None]
        allowed = in_window | (offset < 0)[:, None]
        where = torch.where(inside, mask.column_depths.gather(1, clamped) + prefix, columns)
    positions = mask.row_depths + prefix
    return _Group(size, longest, slots.shape[1], rows, kept, slots.reshape(-1), positions, where, allowed)


def _additive(allowed: Tensor, dtype: torch.dtype, heads_per_kv: int) -> Tensor:
    """0 where allowed, -inf elsewhere: [g, Q, L] -> [g, 1, heads_per_kv * Q, L]."""
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    return bias.repeat(1, heads_per_kv, 1)[:, None]
