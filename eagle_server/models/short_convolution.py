"""The short convolution of LFM2, in the place of attention. It keeps its last inputs per request, and no state.

    B, C, u = in_proj(x)
    y = out_proj(C * convolution(B * u))

Source: transformers' `Lfm2ShortConv`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import Linear, Views
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.layers.fused import Rotation
from eagle_server.ops.native.decoder import RecurrentWeights
from eagle_server.ops.native.recurrent import NativeStates
from eagle_server.ops.recurrent.nodes import RecurrentLayer


class ShortConvolution(nn.Module):
    """The attention of a recurrent layer. It has no positions: the rotation is not used."""

    name = "conv"  # in checkpoints

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.recurrent is not None, "a config with recurrent layers"
        hidden, bias = config.hidden_size, config.recurrent_bias
        self.shape, self.index = config.recurrent, config.recurrent_layers.index(layer)
        self.in_proj = Linear(hidden, [("in_proj", 3 * hidden)], bias=bias)
        self.conv = nn.Parameter(torch.empty(hidden, self.shape.kernel))
        self.conv_bias = nn.Parameter(torch.zeros(hidden)) if config.conv_bias else None
        self.out = Linear(hidden, [("out_proj", hidden)], bias=bias)

    @property
    def spec(self) -> RecurrentLayer:
        """What `BoundAttention.recur` computes with."""
        nothing = self.conv.new_empty(0)
        return RecurrentLayer(self.index, self.shape, self.conv, nothing, nothing, self.conv_bias)

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> Tensor:
        before, after, inputs = self.in_proj(x).chunk(3, dim=1)
        inputs = before * inputs
        mixed = attention.recur(inputs, inputs[:, :0], self.spec).flatten(1)
        projected: Tensor = self.out((after.to(mixed.dtype) * mixed).to(x.dtype))
        return projected

    def native_weights(self, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> RecurrentWeights | None:
        """See `Mixer`."""
        projections, out = self.in_proj.native, self.out.native
        if projections is None or out is None or not NativeStates.fits(self.shape):
            return None
        return RecurrentWeights(projections, out, self.spec)

    def weight_views(self, prefix: str) -> Views:
        yield from self.in_proj.weight_views(prefix)
        yield f"{prefix}conv.weight", self.conv.unsqueeze(1)
        if self.conv_bias is not None:
            yield f"{prefix}conv.bias", self.conv_bias
        yield from self.out.weight_views(prefix)
