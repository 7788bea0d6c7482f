"""Kimi Linear: Kimi Delta Attention in most layers, DeepSeek's latent attention without positions, and its experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from eagle_server.models.config import CheckpointError, ModelConfig, RopeConfig
from eagle_server.models.config_json import integer, recurrent_layers
from eagle_server.models.kimi_delta import KimiDelta
from eagle_server.models.layers import DecoderLayer
from eagle_server.models.mla import MLAAttention
from eagle_server.models.moe import feed_forward
from eagle_server.models.targets.deepseek import routed_experts, with_mla
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.ops.recurrent.nodes import RecurrentShape

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_PUBLISHED = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}  # of linear_attn_config
_PUBLISHED["short_conv_kernel_size"] = "linear_conv_kernel_dim"


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    published = raw.get("linear_attn_config") or {}
    raw = {**raw, **{ours: published[key] for key, ours in _PUBLISHED.items() if key in published}}
    if raw.get("mla_use_nope") is False:
        raise CheckpointError(f"{source}: mla_use_nope false is not supported, as transformers has no rotation here")
    kinds = raw.get("layer_types") or _kinds(published, config.num_layers, source)
    layers = recurrent_layers(kinds, config.num_layers, source, "linear_attention")
    heads, dim = integer(raw, "linear_num_heads", source), integer(raw, "linear_head_dim", source)
    kernel = integer(raw, "linear_conv_kernel_dim", source)
    shape = RecurrentShape(heads, heads, key_dim=dim, value_dim=dim, kernel=kernel, rule="kda")
    moe = routed_experts(raw, source, scoring="sigmoid", routing="noaux_tc", normalize=True)
    if moe is not None:
        moe = replace(moe, dense_layers=_dense_layers(raw, config.num_layers))
    config = with_mla(config, raw, source)
    return replace(config, rope=RopeConfig("none"), moe=moe).with_states(layers, shape)


def _kinds(published: Mapping[str, Any], layers: int, source: str) -> list[str]:
    """From the lists of published files, which count from 1; or every fourth layer attends, but the first."""
    if not published:
        return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(layers)]
    try:
        attending = {int(layer) for layer in published["full_attn_layers"]}
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{source}: linear_attn_config: full_attn_layers must be a list of layers") from None
    return ["full_attention" if layer + 1 in attending else "linear_attention" for layer in range(layers)]


def _dense_layers(raw: Mapping[str, Any], layers: int) -> frozenset[int]:
    kinds, first = raw.get("mlp_layer_types"), raw.get("first_k_dense_replace", 1)
    return frozenset(i for i in range(layers) if (kinds[i] == "dense" if kinds else i < first))


def _layer(config: ModelConfig, layer: int) -> DecoderLayer:
    assert config.mla is not None, "a config with MLA"
    attends, pool_layer = config.attends(layer), config.pool_layer(layer)
    mixer: nn.Module = MLAAttention(config, config.mla, pool_layer) if attends else KimiDelta(config, layer)
    return DecoderLayer(config, mixer, feed_forward(config, layer))


KIMI_LINEAR = TargetFamily(
    "KimiLinearForCausalLM",
    "kimi_linear",
    _add_flags,
    _layer,
    _DEFAULTS,
    aliases={
        "model_max_length": "max_position_embeddings",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
        "moe_router_activation_func": "scoring_func",
    },
    renames={".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."},
)
