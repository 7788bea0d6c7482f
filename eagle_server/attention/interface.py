"""The one attention contract: ragged queries over paged KV, causal or under a tree mask.

A forward is planned in two steps: `prepare(layout)` with what the host knows, `bind(batch)` with the device's tensors.
That gives a `BoundAttention`, whose `run(q, k, v, layer)` the model calls once per layer. Models know nothing else of
attention, so one model file serves every backend and training too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from eagle_server.cache.pool import Pool


@dataclass(frozen=True)
class LayerSpec:
    """What attention must know of a layer: its index in the KV pool, softmax scale and sliding window (0 = full).

    `softcap` c > 0 puts c * tanh(score / c) in the place of every scaled score (Gemma 2).
    """

    index: int
    scale: float
    window: int = 0
    softcap: float = 0.0


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
class Layout:
    """What the host knows of a forward before any of its device work: lengths, and whether a tree mask comes.

    `window` is the number of columns W of the tree mask; None means causal. `seen`, where it is given, is how many of
    them each row sees: a draft step's nodes see their ancestors and themselves.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]  # this forward's own tokens included
    window: int | None = None
    seen: int | None = None

    @property
    def q_len(self) -> int | None:
        """Query rows per request if all have the same number, else None."""
        first = self.q_lens[0]
        return first if all(n == first for n in self.q_lens) else None


@dataclass(frozen=True)
class AttentionBatch:
    """One forward pass on the device. Query rows are concatenated by request; `layout` is the host's side of it.

    KV of request r is `req_to_token[rows[r], : kv_lens[r]]`: slots in token order, those of this forward's own tokens
    included. `out_slots` is where the rows' new K and V are written.
    """

    rows: Tensor  # int64 [bs]
    kv_lens: Tensor  # int64 [bs]
    req_to_token: Tensor  # int32 [rows of the table, width]
    out_slots: Tensor  # int64 [query rows]
    mask: Causal | TreeMask
    layout: Layout


class BoundAttention(Protocol):
    """Attention of one planned forward."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """Store k, v and attend.

        q [T, heads, head_dim], k [T, kv_heads, head_dim], v [T, kv_heads, value_dim] -> [T, heads, value_dim]. Over a
        `LatentPool` v is the front of k, and only k is stored.
        """
        ...


class AttentionPlan(Protocol):
    """A forward whose host side is planned. What `bind` does may be captured in a CUDA graph, `prepare` may not."""

    @property
    def graph_key(self) -> Hashable | None:
        """Equal keys share buffers, so a graph captured with one replays with the other; None: not to be captured."""
        ...

    def bind(self, batch: AttentionBatch) -> BoundAttention:
        """Give the forward its device tensors; everything that is the same for all layers happens here."""
        ...


class AttentionBackend(Protocol):
    """Attention over one KV pool."""

    @property
    def pool(self) -> Pool:
        """Where its keys and values live."""
        ...

    def plan(self, layout: Layout) -> AttentionPlan:
        """Plan one forward from host values alone: nothing is read from the device."""
        ...
