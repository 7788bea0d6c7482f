"""KV pools. Target and draft pools are different buffers addressed by the same slot ids."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Keys and values of all layers: `data` [2, layers, slots, kv_heads, head_dim]. Slot 0's page is padding."""

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Not zeroed: memory that no request ever reaches is then never touched. The padding slot is read, masked.
        self.data = torch.empty(2, layers, slots, kv_heads, head_dim, dtype=dtype, device=device)
        self.data[:, :, 0].zero_()
        self.keys = tuple(self.data[0].unbind(0))
        self.values = tuple(self.data[1].unbind(0))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [rows, kv_heads, head_dim] in `slots` int64 [rows]."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to `target`, int64 [n], in every layer; all reads come before all writes."""
        self.data.index_copy_(2, target, self.data.index_select(2, source))

    def poison(self, slots: Tensor) -> None:
        """Fill `slots` int64 [n] with NaN, so that a read of unwritten KV shows (tests)."""
        self.data.index_fill_(2, slots, float("nan"))

    @staticmethod
    def bytes_per_slot(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize
