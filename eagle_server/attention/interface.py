"""The attention interface: ragged queries over paged KV, causal or with a tree mask.

A forward is set up in two steps. `plan(layout)` takes the lengths that the host knows and returns an `AttentionPlan`.
`bind(batch)` takes the device tensors and returns a `BoundAttention`. The model asks it to `decode` all layers at once,
or calls `run` or `rotate_and_attend` once per layer. A model uses nothing else of attention, so one model file works
with every backend and in training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from eagle_server.attention.recurrent import RecurrentRows
from eagle_server.cache.pool import Pool
from eagle_server.ops.captured import in_place
from eagle_server.ops.layers.fused import Rotation, apply_rope, rms_norm
from eagle_server.ops.layers.rope_kv import HeadNorms
from eagle_server.ops.native.decoder import NativeDecoder, NativeRows
from eagle_server.ops.recurrent.nodes import RecurrentLayer

# How FlashInfer computes attention under a tree mask, see `attention.flashinfer.scratch.Mode`. Only draft steps can be
# computed per node.
TreeMode = Literal["auto", "paged", "mask", "cascade", "per_node"]


@dataclass(frozen=True)
class LayerSpec:
    """The attention parameters of a layer: its index in the KV pool, softmax scale and sliding window (0: none).

    softcap: c > 0 replaces every scaled score by c * tanh(score / c) (Gemma 2).
    sinks: float32 [heads], one more score for every row of a head, whose value is zero (gpt-oss). With the output and
        the log-sum-exp of attention without it, out = output * sigmoid(lse - sink), under any mask.
    writes: False: an earlier layer writes the pool at `index`, and the model calls `BoundAttention.attend`.
    heads: query heads of the layer; 0: all layers have as many.
    """

    index: int
    scale: float
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = field(default=None, compare=False)
    writes: bool = True
    heads: int = 0


@dataclass(frozen=True)
class Causal:
    """The queries of a request are the last tokens of its KV, in order."""


@dataclass(frozen=True)
class TreeMask:
    """The queries of a request see the whole prefix. In the window after the prefix they see what `visible` allows.

    R and W are the largest numbers of rows and window columns. A request with fewer rows has as many fewer columns; the
    last ones are padding. The depths are positions relative to the window's first column. Sliding windows are measured
    by these depths. `bs` are the first requests of a batch that ends with prompt chunks, see `Layout.chunks`.
    """

    visible: Tensor  # bool [bs, R, W], True = attend
    row_depths: Tensor  # int64 [bs, R]
    column_depths: Tensor  # int64 [bs, W]


@dataclass(frozen=True)
class Layout:
    """What the host knows about a forward before its device work: the lengths, and the size of the tree mask.

    `mask_width` is the number of columns W of the tree mask; None means causal. `num_visible`, if given, is the number
    of these columns that each row sees: a node of a draft step sees its ancestors and itself. `chunks`: so many
    of the last requests are prompt chunks, causal whatever the others are.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]  # this forward's own tokens included
    mask_width: int | None = None
    num_visible: int | None = None
    chunks: int = 0

    @property
    def parts(self) -> tuple[Layout, Layout]:
        """The layouts of the requests before the chunks, and of the chunks."""
        trees = len(self.q_lens) - self.chunks
        before = Layout(self.q_lens[:trees], self.kv_lens[:trees], mask_width=self.mask_width)
        return before, Layout(self.q_lens[trees:], self.kv_lens[trees:])

    @property
    def q_len(self) -> int | None:
        """Query rows per request if all have the same number, else None."""
        first = self.q_lens[0]
        return first if self.q_lens.count(first) == len(self.q_lens) else None


@dataclass(frozen=True)
class PagedRequests:
    """Requests of a batch: their rows in the page table, and their lengths."""

    req_pool_indices: Tensor  # int64 [bs], rows of req_to_token
    seq_lens: Tensor  # int64 [bs]
    req_to_token: Tensor = in_place()  # int32 [max requests, width]


AttnArgs = tuple[Tensor, Tensor, Tensor, TreeMask | None]  # kv_indices, kv_indptr, qo_indptr, custom mask


class SpecInput(Protocol):
    """The speculative input of a forward, which makes its attention arguments: EagleDraftInput or EagleVerifyInput."""

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
        """All query rows of a request read one list of slots. kv_lens_sum and out: see `spec_info.kv_arguments`."""
        ...


@dataclass(frozen=True)
class AttentionBatch:
    """The device tensors of one forward. Query rows are concatenated by request; `layout` has the host's lengths.

    Request r reads the KV slots `req_to_token[req_pool_indices[r], : kv_lens[r]]`. They are in token order and include
    the slots of this forward's own tokens. `batches.py` makes all batches.
    """

    req_pool_indices: Tensor  # int64 [bs], rows of req_to_token
    kv_lens: Tensor  # int64 [bs], slots read
    req_to_token: Tensor  # int32 [max requests, width]
    out_cache_loc: Tensor  # int64 [query rows], where K and V of each query row are written
    mask: Causal | TreeMask
    layout: Layout
    spec_info: SpecInput | None = None
    paged_kernel_lens: Tensor | None = None  # int64 [bs], for spec_info's methods (see there); None: kv_lens
    keeps_slots: bool = False  # reads the same slots as the batch that its plan was last bound to
    recurrent: RecurrentRows | None = None  # the rows over their requests' states, for a model with recurrent layers
    # int64 [rows of the prompt chunks], if some are padding: the slots of their columns. The page table may name any
    # slot there, and masked columns must be finite. None: the page table has them.
    row_slots: Tensor | None = None

    @property
    def spec_lens(self) -> Tensor:
        """The paged_kernel_lens argument of spec_info's methods, int64 [bs]."""
        return self.kv_lens if self.paged_kernel_lens is None else self.paged_kernel_lens


@dataclass(frozen=True, kw_only=True)
class BoundAttention(ABC):
    """The attention of one forward, planned and bound to its tensors. All but `run` has a default.

    native_rows: the forward's rows as native kernels take them; None: they do not attend here.
    recurrent: the rows over their requests' states; None: the model has no recurrent layers.
    """

    native_rows: NativeRows | None = None
    recurrent: RecurrentRows | None = None

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """Write k and v to the pool, then attend.

        q [T, heads, head_dim], k [T, kv_heads, head_dim], v [T, kv_heads, value_dim] -> [T, heads, value_dim]. With a
        `LatentPool` v is the first part of k, and only k is stored.
        """

    def attend(self, q: Tensor, layer: LayerSpec) -> Tensor:
        """Attend to what an earlier layer of this forward wrote: q [T, heads, head_dim] -> [T, heads, value_dim]."""
        raise NotImplementedError(f"{type(self).__name__} keeps no keys and values")

    def rotate_and_attend(
        self, qkv: Tensor, heads: int, rotation: Rotation, norms: HeadNorms | None, layer: LayerSpec
    ) -> Tensor:
        """`run` after the norms and the rotation of queries and keys, which a backend may fuse with the write.

        qkv [T, heads + 2 * kv_heads, head_dim] -> [T, heads, head_dim]. May overwrite qkv.
        """
        kv_heads = (qkv.shape[1] - heads) // 2
        queries_keys, v = qkv.split_with_sizes([heads + kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = queries_keys.split_with_sizes([heads, kv_heads], dim=1)
            weights, eps, offset = norms[:2], norms.eps, norms.offset
            normed = (rms_norm(x, weight, eps, offset) for x, weight in zip((q, k), weights, strict=True))
            queries_keys = torch.cat(tuple(normed), dim=1)
        q, k = apply_rope(queries_keys, rotation).split_with_sizes([heads, kv_heads], dim=1)
        return self.run(q, k, v, layer)

    def recur(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        """A recurrent layer over the texts before the rows, see `ops.recurrent`.

        x [T, channels], gates [T, gates] -> [T, value_heads, value_dim], in at least float32.
        """
        assert self.recurrent is not None, "the batch was made without the states of its requests"
        return self.recurrent.run(x, gates, layer)

    def decode(
        self,
        decoder: NativeDecoder | None,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        aux_boundaries: Sequence[int] = (),
        layer_inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """All layers in one native call (see `NativeDecoder`); None: the model computes them one by one."""
        return None


class AttentionPlan(Protocol):
    """A planned forward without its device tensors. CUDA graphs may capture `bind`, but not `AttentionBackend.plan`."""

    @property
    def graph_key(self) -> Hashable | None:
        """Plans with equal keys share buffers, so one captured graph replays for all of them. None: do not capture."""
        ...

    def bind(self, batch: AttentionBatch) -> BoundAttention:
        """Bind the plan to device tensors. All work that the layers share is done here."""
        ...


class AttentionBackend(Protocol):
    """Attention over one KV pool."""

    @property
    def pool(self) -> Pool:
        """The pool with the keys and values."""
        ...

    @property
    def ragged_trees(self) -> bool:
        """Whether requests may have different numbers of rows under a tree mask. If not, padding is computed too."""
        ...

    @property
    def plans_on_device(self) -> bool:
        """Whether captured forwards of several rows are planned from lengths on the device.

        The host's lengths may then be out of date.
        """
        ...

    @property
    def native_caches(self) -> Sequence[tuple[Tensor, Tensor]] | None:
        """Keys and values of each layer, if native kernels attend to them in every forward; else None."""
        ...

    def key_of(self, layout: Layout) -> Hashable | None:
        """The `graph_key` of the plan that `plan` makes."""
        ...

    def plan(self, layout: Layout) -> AttentionPlan:
        """Plan one forward from host values only. Nothing is read from the device."""
        ...
