"""Granite 4: Mamba-2 in most layers, attention mostly without positions, and four factors.

After attention there is an MLP, and in models with experts they work beside it. Embeddings, what is added to the
stream, attention's scores and the logits have a factor each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from eagle_server.models.config import CheckpointError, ModelConfig, MoEConfig, RopeConfig
from eagle_server.models.config_json import integer, recurrent_layers
from eagle_server.models.layers import DecoderLayer, GatedMLP, Views
from eagle_server.models.mamba2 import with_mamba2
from eagle_server.models.moe import MixtureOfExperts
from eagle_server.models.targets.hybrids.bamba import mamba2_or_attention
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.ops.native.decoder import FeedForwardWeights

_DEFAULTS = {"mamba_n_heads": 128, "mamba_d_state": 256, "mamba_d_conv": 4, "shared_intermediate_size": 1024}
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # as published files have them


class SharedAndExperts(nn.Module):
    """The sum of an MLP and of experts."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, shared: GatedMLP) -> None:
        super().__init__()
        self.experts, self.shared = MixtureOfExperts(config, moe), shared

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x) + self.shared(x)
        return y

    def native_weights(self) -> FeedForwardWeights | None:
        """See `FeedForward`."""
        routed, shared = self.experts.native_weights(), self.shared.native_weights()
        return None if routed is None or shared is None else replace(shared, experts=routed.experts)

    def weight_views(self, prefix: str) -> Views:
        yield from self.experts.router.weight_views(f"{prefix}gate.")
        yield from self.experts.experts.weight_views(f"{prefix.removesuffix('mlp.')}experts.")
        yield from self.shared.weight_views(prefix)


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    positions, bias = raw.get("position_embedding_type"), bool(raw.get("attention_bias", False))
    if positions not in (None, "nope", "rope"):
        raise CheckpointError(
            f"{source}: position_embedding_type {positions!r} is not supported, only 'rope' and 'nope'"
        )
    kinds = [_KINDS.get(kind, kind) for kind in raw.get("layer_types") or ["linear_attention"] * config.num_layers]
    layers = recurrent_layers(kinds, config.num_layers, source, "linear_attention")
    config = replace(
        config,
        intermediate_size=integer(raw, "shared_intermediate_size", source),
        qkv_bias=bias,
        o_bias=bias,
        rope=config.rope if positions == "rope" else RopeConfig("none"),
        attention_scale=float(raw.get("attention_multiplier") or 1.0),
        embed_scale=float(raw.get("embedding_multiplier") or 1.0),
        residual_scale=float(raw.get("residual_multiplier") or 1.0),
        logits_divisor=float(raw.get("logits_scaling") or 1.0),
        moe=_experts(raw, source),
    )
    return with_mamba2(config, raw, layers, source)


def _experts(raw: Mapping[str, Any], source: str) -> MoEConfig | None:
    if not raw.get("num_local_experts", 8):
        return None
    experts = integer(raw, "num_local_experts", source, default=8)
    chosen = integer(raw, "num_experts_per_tok", source, default=2)
    if chosen > experts:
        raise CheckpointError(f"{source}: num_experts_per_tok {chosen} of num_local_experts {experts}")
    return MoEConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=integer(raw, "intermediate_size", source),
        shared_experts=0,
        dense_layers=frozenset(),
        scoring="softmax",
        routing="greedy",
        groups=1,
        topk_groups=1,
        normalize=True,
        scale=1.0,
    )


def _layer(config: ModelConfig, layer: int) -> DecoderLayer:
    mlp: nn.Module = GatedMLP(config)
    if config.moe is not None:
        mlp = SharedAndExperts(config, config.moe, mlp)  # type: ignore[arg-type]
    return DecoderLayer(config, mamba2_or_attention(config, layer), mlp)


GRANITE_HYBRID = TargetFamily(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    _add_flags,
    _layer,
    _DEFAULTS,
    renames={
        ".block_sparse_moe.input_linear.weight": ".experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".experts.down_proj",
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
        ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.down_proj.",
    },
)
