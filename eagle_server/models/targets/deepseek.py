"""DeepSeek-V2 and V3: multi-head latent attention, and a mixture of experts in all layers but the first few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from eagle_server.models.config import CheckpointError, MLAConfig, ModelConfig, MoEConfig, Routing, Scoring
from eagle_server.models.config_json import integer
from eagle_server.models.layers import DecoderLayer
from eagle_server.models.mla import MLAAttention
from eagle_server.models.moe import feed_forward
from eagle_server.models.targets.interface import TargetFamily


def latent_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    """Latent attention, then an MLP or experts."""
    assert config.mla is not None, "a config with MLA"
    return DecoderLayer(config, MLAAttention(config, config.mla, layer), feed_forward(config, layer))


def _add_v2_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    config = with_mla(config, raw, source)
    moe = routed_experts(raw, source, scoring="softmax", routing="greedy", normalize=False)
    return replace(config, mlp_bias=bool(raw.get("mlp_bias", False)), moe=moe)


def _add_v3_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    config = with_mla(config, raw, source)
    moe = routed_experts(raw, source, scoring="sigmoid", routing="noaux_tc", normalize=True)
    return replace(config, moe=moe)


def with_mla(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    """`config` with the sizes of latent attention."""
    bias = bool(raw.get("attention_bias", False))
    mla = MLAConfig(
        q_lora_rank=None if raw.get("q_lora_rank") is None else integer(raw, "q_lora_rank", source),
        kv_lora_rank=integer(raw, "kv_lora_rank", source),
        qk_nope_head_dim=integer(raw, "qk_nope_head_dim", source),
        qk_rope_head_dim=integer(raw, "qk_rope_head_dim", source),
        v_head_dim=integer(raw, "v_head_dim", source),
        rope_interleaved=raw.get("rope_interleave") is not False,
    )
    return replace(config, qkv_bias=bias, o_bias=bias, head_dim=mla.qk_rope_head_dim, mla=mla)


def routed_experts(
    raw: Mapping[str, Any], source: str, *, scoring: Scoring, routing: Routing, normalize: bool
) -> MoEConfig | None:
    """The experts, None for a dense model. `scoring`, `routing` and `normalize` are the family's defaults."""
    if not raw.get("n_routed_experts"):
        return None
    scoring = cast(Scoring, raw.get("scoring_func") or scoring)
    routing = cast(Routing, raw.get("topk_method") or routing)
    for key, value, known in (("scoring_func", scoring, Scoring), ("topk_method", routing, Routing)):
        if value not in get_args(known):
            raise CheckpointError(f"{source}: {key} {value!r} is not supported; supported are {get_args(known)}")
    experts, chosen = (integer(raw, key, source) for key in ("n_routed_experts", "num_experts_per_tok"))
    groups, topk_groups = (1, 1) if routing == "greedy" else (int(raw.get(k) or 1) for k in ("n_group", "topk_group"))
    if experts % groups or topk_groups > groups or chosen > topk_groups * (experts // groups):
        raise CheckpointError(
            f"{source}: n_routed_experts {experts}, n_group {groups}, topk_group {topk_groups} and num_experts_per_tok "
            f"{chosen} do not fit together"
        )
    declared = raw.get("norm_topk_prob")
    first, frequency = int(raw.get("first_k_dense_replace") or 0), int(raw.get("moe_layer_freq") or 1)
    layers = range(integer(raw, "num_hidden_layers", source))
    return MoEConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=integer(raw, "moe_intermediate_size", source),
        shared_experts=int(raw.get("n_shared_experts") or 0),
        dense_layers=frozenset(layer for layer in layers if layer < first or layer % frequency),
        scoring=scoring,
        routing=routing,
        groups=groups,
        topk_groups=topk_groups,
        normalize=normalize if declared is None else bool(declared),
        scale=float(raw.get("routed_scaling_factor") or 1.0),
    )


DEEPSEEK_V2 = TargetFamily("DeepseekV2ForCausalLM", "deepseek_v2", _add_v2_flags, latent_layer)
DEEPSEEK_V3 = TargetFamily("DeepseekV3ForCausalLM", "deepseek_v3", _add_v3_flags, latent_layer)
