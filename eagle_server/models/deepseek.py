"""DeepSeek's decoder layer: latent attention, and a mixture of experts in all layers but the first few."""

from __future__ import annotations

from torch import Tensor, nn

from eagle_server.attention.interface import Planned
from eagle_server.models.config import MLAConfig, ModelConfig
from eagle_server.models.layers import DecoderLayer, GatedMLP, RMSNorm, Views
from eagle_server.models.mla import MLAAttention
from eagle_server.models.moe import MixtureOfExperts
from eagle_server.ops.fused import Rotation


class DeepseekLayer(nn.Module):
    """A `DecoderLayer` with other parts."""

    def __init__(self, config: ModelConfig, mla: MLAConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = MLAAttention(config, mla, layer)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        moe = config.moe
        self.mlp = MixtureOfExperts(config, moe) if moe is not None and moe.is_sparse(layer) else GatedMLP(config)

    def forward(self, x: Tensor, residual: Tensor | None, rope: Rotation, attention: Planned) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.forward`."""
        normed, residual = (self.input_norm(x), x) if residual is None else self.input_norm.after_add(x, residual)
        normed, residual = self.post_norm.after_add(self.attention(normed, rope, attention), residual)
        return self.mlp(normed), residual

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight
        yield f"{prefix}post_attention_layernorm.weight", self.post_norm.weight
        yield from self.attention.weight_views(f"{prefix}self_attn.")
        yield from self.mlp.weight_views(f"{prefix}mlp.")


def decoder_layer(config: ModelConfig, layer: int) -> DecoderLayer | DeepseekLayer:
    """The layer that a target of this shape is made of."""
    return DecoderLayer(config, layer) if config.mla is None else DeepseekLayer(config, config.mla, layer)
