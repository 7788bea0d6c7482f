"""Dense causal attention over sequences of equal length, without a KV pool: for training, and as reference in tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.attention.recurrent import DenseRows
from eagle_server.ops.recurrent.nodes import RecurrentLayer


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
        if layer.sinks is not None:
            bias = bias if bias is not None else causal_bias(q4.shape[2], q4.dtype, q4.device)
            k4, v4, bias = with_sinks(k4, v4, bias, layer.sinks[:, None])
        out = F.scaled_dot_product_attention(
            q4, k4, v4, attn_mask=bias, is_causal=bias is None, scale=layer.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(*q.shape[:2], v.shape[2])

    def recur(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        """See `BoundAttention.recur`. The texts begin with the rows."""
        return DenseRows(self.batch).run(x, gates, layer)


def causal_bias(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a row may look, -inf elsewhere: [length, length]."""
    return torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1)


def with_sinks(keys: Tensor, values: Tensor, bias: Tensor | None, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [.., L + 1, dim] and a bias [.., Q, L + 1] with one more column: a sink's score, and no value.

    The new column's key is zero, so its score is its bias. sinks: [.., Q] or [.., 1], which broadcasts like `bias`.
    """
    pad = (0, 0, 0, 1)
    if bias is None:
        bias = keys.new_zeros(1, 1, 1, keys.shape[-2])
    column = sinks.to(keys.dtype).unsqueeze(-1)  # [.., Q or 1, 1]
    shape = torch.broadcast_shapes(bias.shape[:-1], column.shape[:-1])
    return F.pad(keys, pad), F.pad(values, pad), torch.cat([bias.expand(*shape, -1), column.expand(*shape, 1)], dim=-1)
