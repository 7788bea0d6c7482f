"""Gemma 4's experts, which work beside a layer's MLP and read the residual stream themselves.

    u = s / rms(s)                                      s: the stream after attention
    y = norm_1(mlp(norm(s))) + norm_2(experts(u * g))   norm, norm_1, norm_2, g: with gains of their own
    weights = softmax(W (u * scale / sqrt(H))) of the k best, normalized, times a factor of each expert

Source: transformers' Gemma4TextDecoderLayer, Gemma4TextRouter and Gemma4TextExperts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.config import ModelConfig, MoEConfig
from eagle_server.models.layers import GatedMLP, Views, norm_of
from eagle_server.models.moe import Experts, Router, native_experts
from eagle_server.models.ranks import summed
from eagle_server.ops.native.decoder import FeedForwardWeights
from eagle_server.ops.native.experts import NativeExperts


class DenseAndExperts(nn.Module):
    """The MLP of a layer and its experts."""

    reads_stream = True

    def __init__(self, config: ModelConfig, moe: MoEConfig, dense: GatedMLP) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense, self.router = dense, Router(moe, hidden)
        self.experts = Experts(moe, hidden, config.activation)
        self.scale = nn.Parameter(torch.ones(hidden, dtype=torch.float32))
        self.factors = nn.Parameter(torch.ones(moe.experts, dtype=torch.float32))
        self.experts_norm = norm_of(config, hidden)
        self.dense_out_norm, self.experts_out_norm = norm_of(config, hidden), norm_of(config, hidden)
        self.ranks = config.split.ranks if config.split is not None and config.split.experts else None
        self._native: NativeExperts | None = None

    def forward(self, normed: Tensor, stream: Tensor) -> Tensor:
        """normed, stream [rows, H] -> [rows, H]."""
        read, native = self.experts_norm(stream), self._native_experts()
        wide = torch.promote_types(stream.dtype, torch.float32)
        routed = F.rms_norm(stream.to(wide), stream.shape[1:], None, self.experts_norm.eps) * self.router_gain
        if native is None:
            chosen, weights = self.router(routed)
            made = self.experts(read, chosen, weights * self.factors[chosen])
        else:
            made = native(read, routed)
        made = self.experts_out_norm(summed(self.ranks, made))
        out: Tensor = self.dense_out_norm(self.dense(normed)) + made
        return out

    @property
    def router_gain(self) -> Tensor:
        """What the router's input is multiplied by after the norm [H]."""
        gain: Tensor = self.scale * float(self.scale.shape[0]) ** -0.5
        return gain

    def native_weights(self) -> FeedForwardWeights | None:
        """See `FeedForward`."""
        dense, experts = self.dense.native_weights(), self._native_experts()
        if dense is None or experts is None or self.ranks is not None:
            return None
        return replace(
            dense,
            experts=experts,
            router_norm=self.router_gain.detach(),
            experts_norm=self.experts_norm.gain,
            dense_out_norm=self.dense_out_norm.gain,
            experts_out_norm=self.experts_out_norm.gain,
        )

    def _native_experts(self) -> NativeExperts | None:
        if self._native is None:
            self._native = native_experts(self.router, self.experts, self.factors)
        return self._native

    def weight_views(self, prefix: str) -> Views:
        """`prefix` is the MLP's; the experts stand beside it."""
        yield from self.dense.weight_views(prefix)
        layer = prefix.removesuffix("mlp.")
        yield from self.experts.weight_views(f"{layer}experts.")
        yield f"{layer}router.proj.weight", self.router.weight
        yield f"{layer}router.scale", self.scale
        yield f"{layer}router.per_expert_scale", self.factors
        yield f"{layer}pre_feedforward_layernorm_2.weight", self.experts_norm.weight
        yield f"{layer}post_feedforward_layernorm_1.weight", self.dense_out_norm.weight
        yield f"{layer}post_feedforward_layernorm_2.weight", self.experts_out_norm.weight
