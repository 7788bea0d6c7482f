"""The one attention contract: ragged queries over paged KV, causal or under a tree mask.

A backend's `plan(batch)` runs once per forward and gives a `Planned`; the model calls its `run(q, k, v, layer)` once
per layer. Models know nothing else of attention, so one model file serves every backend and training too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LayerSpec:
    """What attention must know of a layer: its index in the KV pool, softmax scale and sliding window (0 = full)."""

    index: int
    scale: float
    window: int = 0


@dataclass(frozen=True)
class Causal:
    """The queries of a request are the last tokens of its KV, in order."""


@dataclass(frozen=True)
class TreeMask:
    """The queries of a request see its whole prefix and, of the window behind it, what `window` allows.

    Every request has the same number of rows R and of window columns W. `depths` are positions relative to the
    window's first column, which sliding windows are measured by.
    """

    window: Tensor  # bool [bs, R, W], True = attend
    row_depths: Tensor  # int64 [bs, R]
    column_depths: Tensor  # int64 [bs, W]


@dataclass(frozen=True)
class AttentionBatch:
    """One forward pass, as the device sees it; the *_host fields are the same facts known to the host.

    Query rows are concatenated by request. KV of request r is `kv_indices[kv_indptr[r] : kv_indptr[r + 1]]`: slots in
    token order, those of this forward's own tokens included. `out_slots` is where the rows' new K and V are written.
    """

    qo_indptr: Tensor  # int32 [bs + 1]
    kv_indptr: Tensor  # int32 [bs + 1]
    kv_indices: Tensor  # int32 [sum of KV lengths], slots
    out_slots: Tensor  # int64 [rows]
    mask: Causal | TreeMask
    q_lens_host: tuple[int, ...]
    kv_lens_host: tuple[int, ...]


class Planned(Protocol):
    """Attention of one planned forward."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """Store k, v [T, kv_heads, head_dim] and attend with q [T, heads, head_dim]; returns the shape of q."""
        ...


class AttentionBackend(Protocol):
    """Attention over one KV pool."""

    def plan(self, batch: AttentionBatch) -> Planned:
        """Prepare one forward; everything that is the same for all layers happens here."""
        ...
