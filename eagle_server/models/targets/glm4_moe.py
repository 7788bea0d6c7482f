"""GLM-4.5 to 4.7 (MoE): Llama's layer with RoPE of a part of each head, and DeepSeek-V3's experts and router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import ModelConfig
from eagle_server.models.targets.deepseek import routed_experts
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.llama import llama_layer


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    fixed = {
        "first_k_dense_replace": 1,
        **raw,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    }
    return replace(
        config,
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm=bool(raw.get("use_qk_norm", False)),
        moe=routed_experts(fixed, source, scoring="sigmoid", routing="noaux_tc", normalize=True),
    )


GLM4_MOE = TargetFamily("Glm4MoeForCausalLM", "glm4_moe", _add_flags, llama_layer, partial_rotary_factor=0.5)
