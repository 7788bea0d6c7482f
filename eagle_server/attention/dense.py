"""Dense causal attention over sequences of equal length, without a KV pool: for training, and as reference in tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.interface import BoundAttention, LayerSpec


@dataclass(frozen=True)
class DenseCausal(BoundAttention):
    """The rows are `batch` concatenated sequences of equal length. `bias` [length, length] replaces the causal mask."""

    batch: int
    bias: Tensor | None = None

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """q, k [batch * length, heads or kv_heads, head_dim], v [.., kv_heads, value_dim] -> [.., heads, value_dim]."""
        q4, k4, v4 = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        bias = self.bias
        if layer.sliding_window and bias is None:
            raise ValueError("a sliding-window layer needs an explicit bias here")
        out = F.scaled_dot_product_attention(
            q4, k4, v4, attn_mask=bias, is_causal=bias is None, scale=layer.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(*q.shape[:2], v.shape[2])
