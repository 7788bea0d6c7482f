"""Kimi Delta Attention, the recurrent layer of Kimi Linear, in the place of attention.

    q, k, v = projections(x);  b = b_proj(x);  a = f_b_proj(f_a_proj(x)), a number per key channel
    o = delta rule(silu(convolution(q, k, v)), b, a)        see `ops.recurrent`, rule kda
    y = o_proj(o / rms(o) * weight * sigmoid(g_b_proj(g_a_proj(x)))),  by head

Source: Kimi Linear (arXiv 2510.26692); transformers' `KimiLinearDeltaAttention`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import Linear, Views
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.layers.fused import Rotation
from eagle_server.ops.native.decoder import RecurrentWeights
from eagle_server.ops.native.recurrent import NativeStates
from eagle_server.ops.recurrent.nodes import RecurrentLayer


class KimiDelta(nn.Module):
    """The attention of a recurrent layer. It has no positions: the rotation is not used."""

    name = "self_attn"  # in checkpoints

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.recurrent is not None, "a config with recurrent layers"
        shape, hidden = config.recurrent, config.hidden_size
        self.shape, self.index = shape, config.recurrent_layers.index(layer)
        self.keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        heads, rank = shape.value_heads, shape.key_dim
        projections = [("q_proj", self.keys), ("k_proj", self.keys), ("v_proj", values), ("b_proj", heads)]
        self.in_proj = Linear(hidden, [*projections, ("f_a_proj", rank), ("g_a_proj", rank)])
        self.decay = Linear(rank, [("f_b_proj", shape.decays)])
        self.gate = Linear(rank, [("g_b_proj", values)])
        self.conv = nn.Parameter(torch.empty(shape.channels, shape.kernel))
        self.a_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(shape.decays, dtype=torch.float32))
        self.norm, self.eps = nn.Parameter(torch.ones(shape.value_dim)), config.rms_norm_eps
        self.out = Linear(values, [("o_proj", hidden)])

    @property
    def spec(self) -> RecurrentLayer:
        """What `BoundAttention.recur` computes with."""
        return RecurrentLayer(self.index, self.shape, self.conv, self.a_log, self.dt_bias)

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> Tensor:
        shape = self.shape
        sizes = [shape.channels, shape.value_heads, shape.key_dim, shape.key_dim]
        inputs, rates, decay, gate = self.in_proj(x).split_with_sizes(sizes, dim=1)
        gates = torch.cat([rates, self.decay(decay.contiguous())], dim=1)
        out = attention.recur(inputs, gates, self.spec)  # [rows, value_heads, value_dim]
        normed = F.rms_norm(out, (shape.value_dim,), self.norm.to(out.dtype), self.eps)
        gated = normed * self.gate(gate.contiguous()).to(out.dtype).sigmoid().view_as(out)
        projected: Tensor = self.out(gated.to(x.dtype).flatten(1))
        return projected

    def native_weights(self, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> RecurrentWeights | None:
        """See `Mixer`."""
        projections, decay, gate, out = self.in_proj.native, self.decay.native, self.gate.native, self.out.native
        if projections is None or decay is None or gate is None or out is None or not NativeStates.fits(self.shape):
            return None
        return RecurrentWeights(projections, out, self.spec, decay, self.norm, state_gate=gate)

    def weight_views(self, prefix: str) -> Views:
        yield from self.in_proj.weight_views(prefix)
        yield from self.decay.weight_views(prefix)
        yield from self.gate.weight_views(prefix)
        sizes = [self.keys, self.keys, self.shape.channels - 2 * self.keys]
        for name, part in zip("qkv", self.conv.split_with_sizes(sizes), strict=True):
            yield f"{prefix}{name}_conv1d.weight", part.unsqueeze(1)
        yield f"{prefix}A_log", self.a_log.view(1, 1, -1, 1)
        yield f"{prefix}dt_bias", self.dt_bias
        yield f"{prefix}o_norm.weight", self.norm
        yield from self.out.weight_views(prefix)
