"""The CPU's attention by compiled kernels: see `ops.native.decoder`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Self

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, BoundAttention, Causal, LayerSpec, Layout
from eagle_server.cache.pool import Pool
from eagle_server.ops.native.decoder import AttentionShape, NativeDecoder, NativeRows, attends
from eagle_server.ops.native.library import floats


@dataclass(frozen=True)
class NativeAttention:
    """`AttentionBackend` over one KV pool, and its own plan: there is nothing to plan.

    `native_caches`: keys and values of each layer.
    """

    pool: Pool
    native_caches: tuple[tuple[Tensor, Tensor], ...]
    ragged_trees: ClassVar[bool] = True
    plans_on_device: ClassVar[bool] = False
    graph_key: ClassVar[None] = None

    @classmethod
    def of(cls, pool: Pool) -> NativeAttention | None:
        """None: compiled kernels cannot attend to this pool."""
        caches = tuple(_cache(*pair) for pair in zip(pool.keys, pool.values, strict=True))
        return cls(pool, caches) if all(attends(*pair) for pair in caches) else None

    def key_of(self, layout: Layout) -> None:
        return None

    def plan(self, layout: Layout) -> Self:
        return self

    def bind(self, batch: AttentionBatch) -> BoundNative:
        qo_indptr = torch.tensor([0, *accumulate(batch.layout.q_lens)], dtype=torch.int32, device=batch.kv_lens.device)
        mask = batch.mask
        requests = (batch.req_pool_indices, batch.kv_lens, batch.req_to_token)
        masks = None if isinstance(mask, Causal) else (mask.visible, mask.row_depths, mask.column_depths)
        rows = NativeRows(self.native_caches, batch.out_cache_loc, qo_indptr, requests, masks)
        return BoundNative(rows, recurrent=batch.recurrent)


@dataclass(frozen=True)
class BoundNative(BoundAttention):
    """See `BoundAttention`."""

    native_rows: NativeRows

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.run`."""
        if v.shape[2] < k.shape[2]:  # latents
            return self.native_rows.attend(q, (k, k), layer.index, self._shape(q, layer))[..., : v.shape[2]]
        return self.native_rows.attend(q, (k, v), layer.index, self._shape(q, layer))

    def attend(self, q: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.attend`."""
        return self.native_rows.attend(q, None, layer.index, self._shape(q, layer))

    def decode(
        self,
        decoder: NativeDecoder | None,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        aux_boundaries: Sequence[int] = (),
        layer_inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """See `BoundAttention.decode`."""
        recurrent = None if self.recurrent is None else self.recurrent.native
        if decoder is None or (recurrent is None and self.recurrent is not None):
            return None
        return decoder(x, residual, positions, self.native_rows, aux_boundaries, layer_inputs, recurrent)

    def _shape(self, q: Tensor, layer: LayerSpec) -> AttentionShape:
        sinks = None if layer.sinks is None else floats(layer.sinks)
        sizes = (q.shape[1], self.native_rows.caches[layer.index][0].shape[1], q.shape[2])
        return AttentionShape(*sizes, layer.scale, layer.softcap, layer.sliding_window, sinks)


def _cache(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's keys and values. The values of latents are the first numbers of the keys, which stand for both."""
    return (keys, keys) if values.data_ptr() == keys.data_ptr() else (keys, values)
