"""LFM2 and LFM2-MoE: Qwen3's layer, with a short convolution in the place of attention in most layers.

In LFM2-MoE all layers but the first ones have experts, chosen as DeepSeek-V3 chooses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import CheckpointError, ModelConfig, MoEConfig
from eagle_server.models.config_json import integer, recurrent_layers
from eagle_server.models.layers import Attention, DecoderLayer
from eagle_server.models.moe import feed_forward
from eagle_server.models.short_convolution import ShortConvolution
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.ops.recurrent.nodes import RecurrentShape

_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1_000_000.0, "conv_L_cache": 3}
_RENAMES = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
}


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    attending = raw.get("full_attn_idxs")
    regular = ["full_attention" if attending is None or i in attending else "conv" for i in range(config.num_layers)]
    layers = recurrent_layers(raw.get("layer_types") or regular, config.num_layers, source, "conv")
    kernel, bias = integer(raw, "conv_L_cache", source), bool(raw.get("conv_bias", False))
    shape = RecurrentShape(1, 1, key_dim=0, value_dim=config.hidden_size, kernel=kernel, rule="convolution")
    return replace(config, qk_norm=True, recurrent_bias=bias, conv_bias=bias).with_states(layers, shape)


def _add_dense_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    return replace(_add_flags(config, raw, source), intermediate_size=_width(raw, source))


def _width(raw: Mapping[str, Any], source: str) -> int:
    """Of the MLP: config.json tells that of an MLP without a gate, from which a third is taken."""
    width = integer(raw, "intermediate_size", source)
    if raw.get("block_auto_adjust_ff_dim") is False:
        return width
    factor, multiple = raw.get("block_ffn_dim_multiplier"), integer(raw, "block_multiple_of", source, default=256)
    width = int(2 * width / 3)
    width = width if factor is None else int(float(factor) * width)
    return -(-width // multiple) * multiple


def _add_moe_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    experts, chosen = integer(raw, "num_experts", source), integer(raw, "num_experts_per_tok", source)
    if chosen > experts:
        raise CheckpointError(f"{source}: num_experts_per_tok {chosen} of num_experts {experts}")
    dense, scale = raw.get("num_dense_layers", 2), raw.get("routed_scaling_factor")
    moe = MoEConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=integer(raw, "moe_intermediate_size", source),
        shared_experts=0,
        dense_layers=frozenset(range(int(dense))),
        scoring="sigmoid",
        routing="greedy" if raw.get("use_expert_bias") is False else "noaux_tc",
        groups=1,
        topk_groups=1,
        normalize=raw.get("norm_topk_prob") is not False,
        scale=1.0 if scale is None else float(scale),
    )
    return replace(_add_flags(config, raw, source), moe=moe)


def _layer(config: ModelConfig, layer: int) -> DecoderLayer:
    attends = config.attends(layer)
    mixer = Attention(config, layer, config.hidden_size) if attends else ShortConvolution(config, layer)
    return DecoderLayer(config, mixer, feed_forward(config, layer))


_ALIASES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
LFM2 = TargetFamily("Lfm2ForCausalLM", "lfm2", _add_dense_flags, _layer, _DEFAULTS, aliases=_ALIASES, renames=_RENAMES)
LFM2_MOE = TargetFamily(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    _add_moe_flags,
    _layer,
    {**_DEFAULTS, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
    aliases=_ALIASES,
    renames=_RENAMES,
)
