"""The buffers that `bind` fills for FlashInfer's kernels: KV slots and packed tree masks; with modes and limits.

They are filled on the device. Shapes depend only on batch size, rows and window, so a CUDA graph may capture this.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle_server.attention.batches import attn_args_decode, attn_args_prefill
from eagle_server.attention.interface import AttentionBatch, TreeMask
from eagle_server.attention.spec_info import kv_arguments
from eagle_server.ops.kv.indices import window_slots
from eagle_server.ops.tree.mask import SlidingWindow, pack_tree_mask

# How a forward is computed.
#   decode   causal, one query row per request
#   prefill  causal, any number of query rows
#   paged    a few rows per request, causal or under a tree mask, by a kernel of our own, which needs no plan
#   mask     with a bit mask over prefix and window
#   cascade  the prefix without a mask and the tree's block separately, then merged
#   per_node each node of a draft step as a decode query with its own list of slots
Mode = Literal["decode", "prefill", "paged", "mask", "cascade", "per_node"]

LONG_ROWS = 64  # a causal forward counts as prompt chunks if a request has at least this many query rows


@dataclass(frozen=True)
class AttentionLimits:
    """The size of the largest forward, and which forwards CUDA graphs may capture."""

    batch: int  # most requests in a forward
    kv_len: int  # most slots of one request, its window included
    graph_batches: Collection[int] = ()  # batch sizes with static buffers
    graph_rows: Collection[int] = ()  # numbers of query rows per request with static buffers


@dataclass(frozen=True)
class PackedMask:
    """The buffers of a packed tree mask."""

    bits: Tensor  # uint8 [capacity]
    indptr: Tensor  # int32 [bs + 1], in bytes


@dataclass(frozen=True)
class TreeBlock:
    """The window's part of a cascade: its slots and its mask."""

    slots: Tensor  # int32 [bs, W]
    mask: Tensor  # bool [bs, R, W]


class Scratch:
    """The slots and masks that `bind` writes and kernels read. A backend has one set; each forward overwrites it.

    Invariant: `owner` is the token of the last forward that wrote the buffers. Another forward would read wrong slots.
    """

    def __init__(self, limits: AttentionLimits, device: torch.device) -> None:
        self.owner: object = None
        self.limits, self._device = limits, device
        self._slots: dict[Hashable, Tensor] = {}
        self._bits: dict[Hashable, Tensor] = {}
        self._masks: dict[Hashable, PackedMask] = {}

    def slots(self, mode: Mode, batch: int, rows: int) -> Tensor:
        """int32 buffer for the slots of the longest forward of `batch` requests. Beams have `rows` lists for each."""
        limits, lists = self.limits, rows if mode == "per_node" else 1
        key = (mode if mode in ("per_node", "cascade") else "all", lists)
        if key not in self._slots:
            self._slots[key] = int_buffer(limits.batch * lists * limits.kv_len, self._device)
        return self._slots[key][: batch * lists * limits.kv_len]

    def mask(self, batch: int, rows: int, sliding: int) -> PackedMask:
        """Buffers for the longest mask of `batch` requests with `rows` query rows each."""
        key, size = (rows, sliding), -(-rows * self.limits.kv_len // 8)
        if key not in self._bits:
            self._bits[key] = torch.zeros(self.limits.batch * size, dtype=torch.uint8, device=self._device)
        if (batch, *key) not in self._masks:
            indptr = int_buffer(batch + 1, self._device)
            self._masks[batch, *key] = PackedMask(self._bits[key][: batch * size], indptr)
        return self._masks[batch, *key]

    def write_slots(self, mode: Mode, batch: AttentionBatch) -> Tensor:
        """Write the kv_indices of a forward in this mode, and return their kv_indptr."""
        layout = batch.layout
        out = self.slots(mode, len(layout.q_lens), layout.q_len or 0)
        if mode == "per_node":
            return attn_args_decode(batch, out)[1]
        if mode == "cascade":
            assert layout.mask_width is not None
            prefix = batch.kv_lens - layout.mask_width
            return kv_arguments(batch.req_pool_indices, prefix, batch.req_to_token, out=out)[0]
        return attn_args_prefill(batch, out)[1]

    def write_mask(self, batch: AttentionBatch, mask: TreeMask, sliding: int) -> None:
        """Pack the tree mask over prefix and window, for layers with this sliding window."""
        size, rows, _ = mask.visible.shape
        out = self.mask(size, rows, sliding)
        window = SlidingWindow(sliding, mask.row_depths, mask.column_depths) if sliding else None
        pack_tree_mask(mask.visible, batch.kv_lens, out.bits, out.indptr, window)


def window_of(batch: AttentionBatch, mask: TreeMask) -> Tensor:
    """The slots of the tree mask's columns, int64 [bs, W]."""
    width = mask.visible.shape[2]
    return window_slots(batch.req_to_token, batch.req_pool_indices, batch.kv_lens, width, offset=-width)


def int_buffer(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
