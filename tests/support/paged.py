"""Requests with KV in shuffled slots, forwards over them, and the expected results from dense attention in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.batches import mixed_batch, mixed_layout, prefill_batch
from eagle_server.attention.interface import AttentionBatch, BoundAttention, Causal, LayerSpec, Layout, TreeMask
from eagle_server.cache.pool import KVPool, KVShape, LatentPool, LatentShape, Pool

CPU = torch.device("cpu")


class World:
    """KV of `rows` requests of up to `width` positions in every layer. Slots that no pass has written hold NaN.

    Every second layer has attention sinks, if it is not latent.
    """

    def __init__(
        self,
        layers: Sequence[tuple[float, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        rank: int = 0,
        rows: int = 6,
        width: int = 48,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        self.heads, self.dim, self.width = heads, dim, width
        self.generator = torch.Generator().manual_seed(seed)
        sinks = [
            None if rank or i % 2 == 0 else 2 * torch.randn(heads, generator=self.generator) for i in range(len(layers))
        ]
        self.layers = [LayerSpec(i, *layer, sinks=sinks[i]) for i, layer in enumerate(layers)]
        self.req_to_token = torch.randperm(rows * width, generator=self.generator).view(rows, width).int() + 1
        slots = rows * width + 1
        self.pool: Pool
        if rank:
            self.pool = LatentPool([LatentShape(rank, dim - rank)] * len(layers), slots, dtype, CPU)
            kv_heads = 1
        else:
            self.pool = KVPool([KVShape(kv_heads, dim)] * len(layers), slots, dtype, CPU)
        self.keys = self.normal(len(layers), rows, width, kv_heads, dim)
        self.values = self.keys[..., :rank] if rank else self.normal(*self.keys.shape)
        self.forget()

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(self.dtype)

    def forget(self) -> None:
        """Reset every slot to NaN."""
        self.pool.poison(torch.arange(1, len(self.pool.keys[0])))

    def store(self, row: int, positions: Sequence[int]) -> None:
        """Write positions in all layers, as earlier passes would."""
        slots = self.req_to_token[row, list(positions)].long()
        for layer in self.layers:
            k, v = (x[layer.index, row, list(positions)] for x in (self.keys, self.values))
            self.pool.write(layer.index, slots, k, v)


@dataclass
class Case:
    """One forward: the backend's input, and the keys that each query row attends to."""

    world: World
    batch: AttentionBatch
    new: list[tuple[int, range]]  # (req_pool_index, positions that this forward writes) per request
    visible: list[Tensor]  # bool [q_len, kv_len] per request, before sliding windows
    row_positions: list[Tensor]  # int64 [q_len], in depth
    column_positions: list[Tensor]  # int64 [kv_len]

    @property
    def layout(self) -> Layout:
        return self.batch.layout

    def arrive(self) -> None:
        """Write all positions before this forward, and reset the others."""
        self.world.forget()
        for row, positions in self.new:
            self.world.store(row, range(positions.start))

    def queries(self) -> Tensor:
        rows = sum(len(positions) for _, positions in self.new)
        return self.world.normal(len(self.world.layers), rows, self.world.heads, self.world.dim)

    def run(self, planned: BoundAttention, queries: Tensor) -> Tensor:
        """The attention output of all layers: [layers, rows, heads, value_dim]."""
        world, out = self.world, []
        for layer in world.layers:
            k, v = (
                torch.cat([x[layer.index, row, p.start : p.stop] for row, p in self.new])
                for x in (world.keys, world.values)
            )
            out.append(planned.run(*as_projected(queries[layer.index], k, v), layer))
        return torch.stack(out)

    def expected(self, queries: Tensor) -> Tensor:
        """The same by dense attention in float64."""
        world, layers = self.world, []
        for layer in world.layers:
            parts, start = [], 0
            for i, (row, _) in enumerate(self.new):
                seen = self.visible[i]
                if layer.sliding_window:
                    seen = seen & (self.column_positions[i] > self.row_positions[i][:, None] - layer.sliding_window)
                q = queries[layer.index, start : start + len(seen)].double()
                start += len(seen)
                k, v = (x[layer.index, row, : seen.shape[1]].double() for x in (world.keys, world.values))
                parts.append(_dense(q, k, v, seen, layer))
            layers.append(torch.cat(parts))
        return torch.stack(layers)


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, layer: LayerSpec) -> Tensor:
    """q [rows, heads, dim], k and v [columns, kv_heads, dim], seen [rows, columns] -> [rows, heads, value_dim]."""
    if layer.sinks is None:
        out = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=seen, scale=layer.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    shared = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    scores = (torch.einsum("rhd,chd->hrc", q, keys) * layer.scale).masked_fill(~seen, float("-inf"))
    sinks = layer.sinks.double()[:, None, None].expand(-1, len(q), 1)
    return torch.einsum("hrc,chd->rhd", torch.cat([scores, sinks], dim=2).softmax(2)[..., :-1], values)


def as_projected(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same values in views of one projection, as models pass them; with a latent, v is the first part of k."""
    if k.shape != v.shape:
        return q.contiguous(), k.contiguous(), k.contiguous()[..., : v.shape[2]]
    q, k, v = torch.cat([q, k, v], dim=1).split_with_sizes([q.shape[1], k.shape[1], v.shape[1]], dim=1)
    return q, k, v


def causal(
    world: World, rows: Sequence[int], q_lens: Sequence[int], kv_lens: Sequence[int], seen: int | None = None
) -> Case:
    """A causal forward. The queries are the last tokens of each request."""
    layout = Layout(tuple(q_lens), tuple(kv_lens), num_visible=seen)
    batch = prefill_batch(torch.tensor(rows), torch.tensor(kv_lens), world.req_to_token, Causal(), layout)
    lens = list(zip(q_lens, kv_lens, strict=True))
    at = [torch.arange(n - q, n) for q, n in lens]
    columns = [torch.arange(n) for n in kv_lens]
    visible = [c <= r[:, None] for r, c in zip(at, columns, strict=True)]
    new = [(row, range(n - q, n)) for row, (q, n) in zip(rows, lens, strict=True)]
    return Case(world, batch, new, visible, at, columns)


def verify(world: World, rows: Sequence[int], prefixes: Sequence[int], size: int = 7, seed: int = 0) -> Case:
    """A verify forward: a random tree of `size` nodes after each prefix."""
    rng = random.Random(seed)
    mask = torch.eye(size, dtype=torch.bool).repeat(len(rows), 1, 1)
    for tree in mask:
        for node in range(1, size):
            tree[node] |= tree[rng.randrange(node)]  # a parent's ancestors
    depths = mask.sum(-1) - 1
    return _tree(world, rows, prefixes, TreeMask(mask, depths, depths), seen=None)


def draft_step(
    world: World, rows: Sequence[int], prefixes: Sequence[int], step: int, topk: int = 3, seed: int = 0
) -> Case:
    """Draft step `step`: topk nodes, each with one ancestor in every level above, in any column."""
    rng = random.Random(seed)
    window = (step + 1) * topk
    ancestor_mask = torch.zeros(len(rows), topk, window, dtype=torch.bool)
    for b in range(len(rows)):
        for node in range(topk):
            ancestor_mask[b, node, step * topk + node] = True
            for level in range(step):
                ancestor_mask[b, node, level * topk + rng.randrange(topk)] = True
    depths = torch.arange(step + 1).repeat_interleave(topk).repeat(len(rows), 1)
    mask = TreeMask(ancestor_mask, torch.full((len(rows), topk), step), depths)
    return _tree(world, rows, prefixes, mask, seen=step + 1)


def _tree(world: World, rows: Sequence[int], prefixes: Sequence[int], mask: TreeMask, seen: int | None) -> Case:
    _, nodes, window = mask.visible.shape
    kv_lens = tuple(n + window for n in prefixes)
    layout = Layout((nodes,) * len(rows), kv_lens, mask_width=window, num_visible=seen)
    batch = prefill_batch(torch.tensor(rows), torch.tensor(kv_lens), world.req_to_token, mask, layout)
    visible, at, columns = [], [], []
    for b, prefix in enumerate(prefixes):
        visible.append(torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), mask.visible[b]], dim=1))
        at.append(prefix + mask.row_depths[b])
        columns.append(torch.cat([torch.arange(prefix), prefix + mask.column_depths[b]]))
    new = [(row, range(n - nodes, n)) for row, n in zip(rows, kv_lens, strict=True)]
    return Case(world, batch, new, visible, at, columns)


def mixed(trees: Case, chunks: Case) -> Case:
    """A verify forward and prompt chunks in one."""
    batch = mixed_batch(trees.batch, chunks.batch, mixed_layout(trees.layout, chunks.layout))
    parts = ("new", "visible", "row_positions", "column_positions")
    return Case(trees.world, batch, *(getattr(trees, part) + getattr(chunks, part) for part in parts))


def replay_with(batch: AttentionBatch, other: AttentionBatch) -> None:
    """Copy `other`'s values into `batch`'s tensors, as before the replay of a graph. The layout does not change."""
    batch.req_pool_indices.copy_(other.req_pool_indices)
    batch.kv_lens.copy_(other.kv_lens)
    batch.out_cache_loc.copy_(other.out_cache_loc)
    if isinstance(batch.mask, TreeMask):
        assert isinstance(other.mask, TreeMask)
        batch.mask.visible.copy_(other.mask.visible)
        batch.mask.row_depths.copy_(other.mask.row_depths)
        batch.mask.column_depths.copy_(other.mask.column_depths)
