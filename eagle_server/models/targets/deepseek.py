"""Which layers a target is made of; DeepSeek's have latent attention, and experts in all layers but the first few."""

from __future__ import annotations

from torch import nn

from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import DecoderLayer, GatedMLP, llama_layer
from eagle_server.models.mla import MLAAttention
from eagle_server.models.moe import MixtureOfExperts


def decoder_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    """Layer `layer` of a target of this shape."""
    if config.mla is None:
        return llama_layer(config, layer)
    moe = config.moe
    mlp: nn.Module = MixtureOfExperts(config, moe) if moe is not None and moe.is_sparse(layer) else GatedMLP(config)
    return DecoderLayer(config, MLAAttention(config, config.mla, layer), mlp)
