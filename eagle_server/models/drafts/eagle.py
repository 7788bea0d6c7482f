"""The EAGLE-1/2 draft head: a Llama layer without input norm, over fc(cat(embedding of t+1, feature of t)).

    h = fc(cat(e(t+1), f[t]))        f: the target's post-norm hidden state; in later passes the feedback
    u = h + attn(h)
    y = u + mlp(post_attention_layernorm(u))
    logits = target_lm_head(y);  feedback = y

Source: EAGLE (arXiv 2401.15077). EAGLE-2 grows trees differently, with the same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftOutput, HeadConfig, TargetWeights
from eagle_server.models.drafts.post_norm_head import PostNormHead
from eagle_server.models.layers import Attention, GatedMLP, Linear, RMSNorm, Views
from eagle_server.models.native_layers import native_decoder
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.llama import llama_layer
from eagle_server.ops.layers.fused import Rotation
from eagle_server.ops.native.decoder import NativeDecoder
from eagle_server.ops.native.drafting import HeadWeights


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """Sizes and flags of an EAGLE-1/2 head. `layers.hidden_size` equals the target's."""

    fc_bias: bool = True


class EagleLayer(nn.Module):
    """The first layer. Its attention input is not normalized. It returns two summands (see `DecoderLayer`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config, 0, config.hidden_size)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> tuple[Tensor, Tensor]:
        """x [rows, H] -> two summands of the residual stream [rows, H]. May overwrite x."""
        normed, residual = self.post_norm.after_add(self.attention(x, rope, attention), x)
        return self.mlp(normed), residual

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}post_attention_layernorm.weight", self.post_norm.weight
        yield from self.attention.weight_views(f"{prefix}self_attn.")
        yield from self.mlp.weight_views(f"{prefix}mlp.")


class EagleHead(PostNormHead):
    algorithm = "EAGLE"

    def __init__(self, config: EagleConfig, context: int, target: TargetWeights) -> None:
        super().__init__(config.layers, target, own_embed=config.own_embed, own_lm_head=config.own_lm_head)
        self.eagle, hidden = config, config.layers.hidden_size
        self.fc = Linear(2 * hidden, [("fc", hidden)], bias=config.fc_bias)
        self.rope = RotaryEmbedding(config.layers.rope, config.layers.head_dim, context)
        plain = (llama_layer(config.layers, index) for index in range(1, config.layers.num_layers))
        self.layers = nn.ModuleList([EagleLayer(config.layers), *plain])
        self._native: NativeDecoder | None = None

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """tokens, positions [rows], hidden [rows, H] -> feedback and normed [rows, H], equal in this head."""
        joined = self.fc(torch.cat([self.embedded(tokens), hidden], dim=-1))
        at_once = attention.decode(self._native, joined, joined, positions)
        if at_once is not None:
            _, stream, _ = at_once
            return DraftOutput(stream.to(joined.dtype), stream)
        rope = self.rope(positions, joined.dtype)
        first, *rest = self.layers
        x, residual = first(joined, rope, attention)
        for layer in rest:
            x, residual = layer(x, residual, rope, attention)
        stream = residual + x
        return DraftOutput(stream, stream)

    def fuse(self) -> None:
        """See `Fusable`."""
        self._native = native_decoder(self.layers, None, self.rope)

    def native_weights(self) -> HeadWeights | None:
        return self.joined_weights(self._native, self.fc)

    def weight_views(self) -> Views:
        """Every published name with its view of a parameter."""
        if self.embed is not None:
            yield "embed_tokens.weight", self.embed
        yield from self.fc.weight_views("")
        for index, layer in enumerate(self.layers):
            yield from layer.weight_views(f"layers.{index}.")  # type: ignore[operator]
        if self.lm_head is not None:
            yield from self.lm_head.weight_views("")
