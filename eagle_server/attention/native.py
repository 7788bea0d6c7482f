"""The CPU's attention by compiled kernels: see `ops.native.decoder`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, BoundAttention, Causal, LayerSpec
from eagle_server.cache.pool import Pool
from eagle_server.ops.native.decoder import AttentionShape, NativeRows, attends
from eagle_server.ops.native.library import floats


@dataclass(frozen=True)
class NativePlan:
    """See `AttentionPlan`. There is nothing to plan. `caches`: keys and values of each layer."""

    caches: tuple[tuple[Tensor, Tensor], ...]
    graph_key: None = None

    @classmethod
    def of(cls, pool: Pool) -> NativePlan | None:
        """None: compiled kernels cannot attend to this pool."""
        caches = tuple(zip(pool.keys, pool.values, strict=True))
        return cls(caches) if all(attends(*pair) for pair in caches) else None

    def bind(self, batch: AttentionBatch) -> BoundNative:
        qo_indptr = torch.tensor([0, *accumulate(batch.layout.q_lens)], dtype=torch.int32, device=batch.kv_lens.device)
        mask = batch.mask
        requests = (batch.req_pool_indices, batch.kv_lens, batch.req_to_token)
        masks = None if isinstance(mask, Causal) else (mask.visible, mask.row_depths, mask.column_depths)
        rows = NativeRows(self.caches, batch.out_cache_loc, qo_indptr, requests, masks)
        return BoundNative(rows, recurrent=batch.recurrent)


@dataclass(frozen=True)
class BoundNative(BoundAttention):
    """See `BoundAttention`."""

    native_rows: NativeRows

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.run`."""
        return self.native_rows.attend(q, (k, v), layer.index, self._shape(q, layer))

    def attend(self, q: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.attend`."""
        return self.native_rows.attend(q, None, layer.index, self._shape(q, layer))

    def _shape(self, q: Tensor, layer: LayerSpec) -> AttentionShape:
        sinks = None if layer.sinks is None else floats(layer.sinks)
        sizes = (q.shape[1], self.native_rows.caches[layer.index][0].shape[1], q.shape[2])
        return AttentionShape(*sizes, layer.scale, layer.softcap, layer.sliding_window, sinks)
