"""Gated DeltaNet, the recurrent layer of Qwen3-Next and Qwen3.5, in the place of attention.

    q, k, v, z = in_proj(x);  b, a = gates(x)
    o = delta rule(silu(convolution(q, k, v)), b, a)        see `ops.recurrent`
    y = out_proj(o / rms(o) * weight * silu(z)),  by head

Source: Gated Delta Networks (arXiv 2412.06464); transformers' `Qwen3_5GatedDeltaNet` and `Qwen3NextGatedDeltaNet`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import Linear, Views
from eagle_server.models.ranks import summed
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.layers.fused import Rotation
from eagle_server.ops.native.decoder import RecurrentWeights
from eagle_server.ops.native.recurrent import NativeStates
from eagle_server.ops.recurrent.nodes import RecurrentLayer


class GatedDeltaNet(nn.Module):
    """The attention of a recurrent layer. It has no positions: the rotation is not used.

    `by_key_head`: the checkpoint's projections have the rows of q, k, v and z, and of b and a, of one key head after
    the other (Qwen3-Next). Else all of q, all of k, and so on.
    """

    name = "linear_attn"  # in checkpoints

    def __init__(self, config: ModelConfig, layer: int, *, by_key_head: bool) -> None:
        super().__init__()
        assert config.recurrent is not None, "a config with recurrent layers"
        shape = self.shape = config.recurrent
        hidden, values, self.by_key_head = config.hidden_size, shape.value_heads * shape.value_dim, by_key_head
        heads = shape.value_heads
        projections = [("in_proj_qkv", shape.channels), ("in_proj_z", values)]
        gates = [("in_proj_b", heads), ("in_proj_a", heads)]
        if by_key_head:
            projections, gates = [("in_proj_qkvz", shape.channels + values)], [("in_proj_ba", 2 * heads)]
        self.in_proj, self.gates = Linear(hidden, projections), Linear(hidden, gates)
        self.conv = nn.Parameter(torch.empty(shape.channels, shape.kernel))
        self.a_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.norm, self.eps = nn.Parameter(torch.ones(shape.value_dim)), config.rms_norm_eps
        self.out = Linear(values, [("out_proj", hidden)])
        self.index = config.recurrent_layers.index(layer)
        self.ranks = config.split.ranks if config.split is not None and config.split.recurrent else None

    @property
    def spec(self) -> RecurrentLayer:
        """What `BoundAttention.recur` computes with."""
        return RecurrentLayer(self.index, self.shape, self.conv, self.a_log, self.dt_bias)

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> Tensor:
        shape = self.shape
        mixed, z, gates = self._split(self.in_proj(x), self.gates(x))
        out = attention.recur(mixed, gates, self.spec)  # [rows, value_heads, value_dim]
        normed = F.rms_norm(out, (shape.value_dim,), self.norm.to(out.dtype), self.eps)
        gated = normed * F.silu(z.to(out.dtype)).view_as(out)
        return summed(self.ranks, self.out(gated.to(x.dtype).flatten(1)))

    def _split(self, projected: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the convolution [rows, channels], z [rows, values], b and a [rows, 2 * value_heads]."""
        shape = self.shape
        if not self.by_key_head:
            mixed, z = projected.split_with_sizes([shape.channels, shape.value_heads * shape.value_dim], dim=1)
            return mixed, z, gates
        shared = shape.value_heads // shape.key_heads
        sizes = [shape.key_dim] * 2 + [shared * shape.value_dim] * 2
        q, k, v, z = _by_kind(projected, shape.key_heads, sizes)
        b, a = _by_kind(gates, shape.key_heads, [shared, shared])
        return torch.cat([q, k, v], dim=1), z, torch.cat([b, a], dim=1)

    def native_weights(self, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> RecurrentWeights | None:
        """See `Mixer`."""
        projections, gates, out = self.in_proj.native, self.gates.native, self.out.native
        if self.ranks is not None or projections is None or gates is None or out is None:
            return None
        if not NativeStates.fits(self.shape):
            return None
        return RecurrentWeights(projections, out, self.spec, gates, self.norm, self.by_key_head)

    def weight_views(self, prefix: str) -> Views:
        yield from self.in_proj.weight_views(prefix)
        yield from self.gates.weight_views(prefix)
        yield f"{prefix}conv1d.weight", self.conv.unsqueeze(1)
        yield f"{prefix}A_log", self.a_log
        yield f"{prefix}dt_bias", self.dt_bias
        yield f"{prefix}norm.weight", self.norm
        yield from self.out.weight_views(prefix)


def _by_kind(x: Tensor, heads: int, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of each head [rows, sum of sizes] -> each part of all heads, [rows, heads * size]."""
    return [part.flatten(1) for part in x.unflatten(1, (heads, -1)).split_with_sizes(list(sizes), dim=2)]
