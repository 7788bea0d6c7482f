"""Per-layer embeddings: a vector per token and layer, from a second table, which each layer mixes into the stream.

    input_l = (norm(W x / sqrt(H)) + sqrt(d) e)_l / sqrt(2)          x: the scaled embedding, e: the second table's row
    s <- factor * (s + norm(P (activation(G s) * input_l)))          after the layer's MLP

Source: transformers' Gemma4TextModel and Gemma4TextDecoderLayer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.config import LayerInputSizes, ModelConfig
from eagle_server.models.layers import Linear, Views, norm_of


class LayerInputs(nn.Module):
    """The vectors of all layers, from tokens and their embeddings."""

    def __init__(self, config: ModelConfig, sizes: LayerInputSizes) -> None:
        super().__init__()
        self.layers, self.size = config.num_layers, sizes.size
        self.embed = nn.Parameter(torch.empty(sizes.vocab, self.layers * self.size))
        self.projection = Linear(config.hidden_size, [("per_layer_model_projection", self.layers * self.size)])
        self.norm = norm_of(config, self.size)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """tokens int64 [rows], x [rows, H] -> [rows, layers, size]."""
        shape = (len(tokens), self.layers, self.size)
        projected = self.norm((self.projection(x) * x.shape[1] ** -0.5).view(shape))
        looked_up = F.embedding(tokens, self.embed).view(shape)
        return (projected + looked_up * x.new_tensor(self.size**0.5)) * 2**-0.5  # type: ignore[no-any-return]

    def weight_views(self) -> Views:
        yield "model.embed_tokens_per_layer.weight", self.embed
        yield from self.projection.weight_views("model.")
        yield "model.per_layer_projection_norm.weight", self.norm.weight


class LayerTail(nn.Module):
    """The end of a layer. Without per-layer inputs (`size` 0) it is the factor alone."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, [("per_layer_input_gate", size)]) if size else None
        self.projection = Linear(size, [("per_layer_projection", config.hidden_size)]) if size else None
        self.norm = norm_of(config, config.hidden_size) if size else None
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, stream: Tensor, layer_input: Tensor | None) -> Tensor:
        """stream [rows, H], layer_input [rows, size] -> the stream after the layer."""
        if self.gate is not None and self.projection is not None and self.norm is not None:
            assert layer_input is not None, "the model has per-layer inputs"
            gated = F.gelu(self.gate(stream), approximate="tanh") * layer_input
            stream = stream + self.norm(self.projection(gated)).to(stream.dtype)
        return stream * self.factor

    def weight_views(self, prefix: str) -> Views:
        if self.gate is not None and self.projection is not None and self.norm is not None:
            yield from self.gate.weight_views(prefix)
            yield from self.projection.weight_views(prefix)
            yield f"{prefix}post_per_layer_input_norm.weight", self.norm.weight
        yield f"{prefix}layer_scalar", self.factor
