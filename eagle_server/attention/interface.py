"""The one attention contract: ragged queries over paged KV, causal or under a tree mask.

A forward is planned in two steps: `prepare(layout)` with what the host knows, `bind(batch)` with the device's tensors.
That gives a `BoundAttention`, whose `run(q, k, v, layer)` the model calls once per layer. Models know nothing else of
attention, so one model file serves every backend and training too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


AttnArgs = tuple[Tensor, Tensor, Tensor, TreeMask | None]  # kv_indices, kv_indptr, qo_indptr, custom mask


class SpecInput(Protocol):
    """What a speculative forward knows of its own attention: an EagleDraftInput or an EagleVerifyInput."""

    @property
    def tree_mask(self) -> TreeMask | None:
        """None: the forward is causal."""
        ...

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        req_to_token: Tensor,
        kv_lens_sum: int | None = None,
        out: Tensor | None = None,
    ) -> AttnArgs:
        """All rows of a request over one list of slots. kv_lens_sum and out as in `batches.kv_arguments`."""
        ...


@runtime_checkable
class DraftStepInput(SpecInput, Protocol):
    """A `SpecInput` whose rows may also be computed one by one."""

    def generate_attn_arg_decode(
        self, req_pool_indices: Tensor, paged_kernel_lens: Tensor, req_to_token: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """kv_indices, kv_indptr, qo_indptr: every row is a query with its own list of slots."""
        ...


@dataclass(frozen=True)
class AttentionBatch:
    """One forward on the device. Query rows are concatenated by request; `layout` is the host's side of it.

    KV of request r is `req_to_token[req_pool_indices[r], : kv_lens[r]]`: slots in token order, those of this forward's
    own tokens included. `batches.py` makes all batches.
    """

    req_pool_indices: Tensor  # int64 [bs], rows of req_to_token
    kv_lens: Tensor  # int64 [bs], slots read
    req_to_token: Tensor  # int32 [max requests, width]
    out_cache_loc: Tensor  # int64 [query rows], slots that the rows' K and V are written to
    mask: Causal | TreeMask
    layout: Layout
    spec_info: SpecInput | None = None
    paged_kernel_lens: Tensor | None = None  # int64 [bs], the lengths that spec_info's generators take; None: kv_lens

    @property
    def spec_lens(self) -> Tensor:
        """What to give spec_info's generators as paged_kernel_lens."""
        return self.kv_lens if self.paged_kernel_lens is None else self.paged_kernel_lens


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
