"""GLM-4.5 to 4.7 (MoE): Llama's layer with RoPE of a part of each head, and DeepSeek-V3's experts and router.

GLM-4.7-Flash has DeepSeek-V3's latent attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import ModelConfig, MoEConfig
from eagle_server.models.targets.deepseek import latent_layer, routed_experts, with_mla
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.llama import llama_layer

# transformers' defaults, which are GLM-4.7-Flash's.
_FLASH_DEFAULTS = {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    return replace(
        config,
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm=bool(raw.get("use_qk_norm", False)),
        moe=_experts(raw, source),
    )


def _add_flash_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    moe, kinds = _experts(raw, source), raw.get("mlp_layer_types")
    if moe is not None and kinds is not None:
        moe = replace(moe, dense_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "dense"))
    return replace(with_mla(config, raw, source), moe=moe)


def _experts(raw: Mapping[str, Any], source: str) -> MoEConfig | None:
    fixed = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    return routed_experts(
        {"first_k_dense_replace": 1, **raw, **fixed}, source, scoring="sigmoid", routing="noaux_tc", normalize=True
    )


GLM4_MOE = TargetFamily("Glm4MoeForCausalLM", "glm4_moe", _add_flags, llama_layer, partial_rotary_factor=0.5)
GLM4_MOE_LITE = TargetFamily("Glm4MoeLiteForCausalLM", "glm4_moe_lite", _add_flash_flags, latent_layer, _FLASH_DEFAULTS)
