"""Small random checkpoints of every target family, written by transformers itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.step3p5 import SETTINGS as STEP
from tests.support.step3p5 import Step3p5ForCausalLM, Step3p7TextConfig

VOCAB = 131
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


class MiMoConfig(Qwen2Config):
    """transformers has no MiMo, whose decoder is Qwen2's."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Saved as such: its class name stands in config.json."""


FAMILIES: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "mimo": (MiMoConfig, MiMoForCausalLM),
    "mimo-v2": (MiMoV2FlashConfig, MiMoV2FlashForCausalLM),
    "step3p5": (Step3p7TextConfig, Step3p5ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "glm4-moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "glm4-moe-lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "qwen3.5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3-next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "deepseek-v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "minicpm3": (MiniCPM3Config, MiniCPM3ForCausalLM),
    "longcat-flash": (LongcatFlashConfig, LongcatFlashForCausalLM),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM),
    "granite-hybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM),
    "bamba": (BambaConfig, BambaForCausalLM),
    "nemotron-h": (NemotronHConfig, NemotronHForCausalLM),
    "falcon-h1": (FalconH1Config, FalconH1ForCausalLM),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM),
    "lfm2-moe": (Lfm2MoeConfig, Lfm2MoeForCausalLM),
    "kimi-linear": (KimiLinearConfig, KimiLinearForCausalLM),
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_MINICPM3 = {
    **{key: _DEEPSEEK[key] for key in ("num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
    "q_lora_rank": 20,
    "dim_model_base": 40,
}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
_GLM = {"n_routed_experts": 8, "routed_scaling_factor": 1.5, "head_dim": 32}
_GEMMA3 = {
    "head_dim": 32,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 10.0,
}
_GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
}

_GPT_OSS = {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7}


_SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],  # MtpModel has the last one's classes
}
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


_MAMBA2 = {"num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
_GRANITE = {
    **_MAMBA2,
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
    **{"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
    **{"shared_intermediate_size": 80, "num_local_experts": 0},
}
_NEMOTRON = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 32},
    **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
}
_LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_KIMI = {
    **{key: _DEEPSEEK[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    **{"linear_num_heads": 4, "linear_head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 40, "num_hidden_layers": 4, "n_shared_experts": 2, "num_key_value_heads": 4},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: a family, the config keys besides `_SHAPE`, and the shards of the file."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"


def _rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **parameters}}


CASES = {
    "llama": Case("llama"),
    "llama-sharded": Case("llama", shard_size="60KB"),
    "llama-tied": Case("llama", {"tie_word_embeddings": True}),
    "llama-multi-head": Case("llama", {"num_key_value_heads": 4}),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": Case("llama", _rope("linear", factor=3.0)),
    "llama-llama3": Case(
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-yarn": Case("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-mscale": Case(
        "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.1)
    ),
    "llama-dynamic": Case("llama", _rope("dynamic", factor=2.0)),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral-window": Case("mistral", {"sliding_window": 7}),
    "qwen2": Case("qwen2"),
    "qwen2-window": Case("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "mimo": Case("mimo", {"head_dim": 32}),
    "mimo-v2": Case(
        "mimo-v2",
        {
            **_EXPERTS,
            **{"n_routed_experts": 8, "head_dim": 24, "v_head_dim": 10, "num_key_value_heads": 1, "sliding_window": 7},
            **{"num_hidden_layers": 4, "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
        },
    ),
    "step3p5": Case("step3p5", STEP),
    "step3p5-llama3-one-head-count-tied": Case(
        "step3p5",
        {
            **{**STEP, "num_sliding_attention_heads": None, "swiglu_limits": None, "share_expert_dim": 37},
            **{"moe_intermediate_size": 37, "query_pre_attn_scalar": 20, "tie_word_embeddings": True},
            **{"rope_theta": 5000.0, "partial_rotary_factors": None, "num_nextn_predict_layers": 0},
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "qwen3-window-tied": Case(
        "qwen3",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": Case("qwen3-moe", {**_EXPERTS, "head_dim": 32, "num_experts": 8}),
    "qwen3-moe-some-dense-layers-biases": Case(
        "qwen3-moe",
        {
            **_EXPERTS,
            "head_dim": 16,
            "num_experts": 5,
            "norm_topk_prob": True,
            "moe_intermediate_size": 37,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5": Case("qwen3.5", _HYBRID),
    "qwen3.5-moe": Case("qwen3.5-moe", {**_HYBRID, **_SHARED}),
    "qwen3-next": Case("qwen3-next", {**_HYBRID, **_SHARED, "mlp_only_layers": [1]}),
    "qwen3.5-odd-sizes-tied": Case(
        "qwen3.5",
        {
            **_HYBRID,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 6,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "glm4-moe": Case("glm4-moe", {**_EXPERTS, **_GLM, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-groups-quarter-rotated": Case(
        "glm4-moe",
        {
            **_EXPERTS,
            **_GLM,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.25),
            "head_dim": 40,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v2": Case("deepseek-v2", _DEEPSEEK),
    "deepseek-v2-no-q-lora-biases": Case(
        "deepseek-v2",
        {**_DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0},
    ),
    "deepseek-v2-groups-biases": Case(
        "deepseek-v2",
        {
            **_DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "n_shared_experts": 1,
        },
    ),
    "deepseek-v2-yarn": Case(
        "deepseek-v2",
        {
            **_DEEPSEEK,
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=0.707,
                mscale_all_dim=0.707,
                beta_fast=32.0,
                beta_slow=1.0,
            ),
        },
    ),
    "deepseek-v3": Case("deepseek-v3", {**_DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "glm4-moe-lite": Case("glm4-moe-lite", _DEEPSEEK),
    "glm4-moe-lite-dense-later-no-q-lora": Case(
        "glm4-moe-lite",
        {**_DEEPSEEK, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, "attention_bias": True},
    ),
    "deepseek-v3-one-group-unnormalized": Case(
        "deepseek-v3",
        {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": None, "num_mtp_layers": 0},
    ),
    "deepseek-v3-yarn-odd-sizes": Case(
        "deepseek-v3",
        {
            **_DEEPSEEK,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.1),
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 37,
            "v_head_dim": 11,
            "attention_bias": True,
        },
    ),
    "deepseek-v3-half-rotated-tied": Case(
        "deepseek-v3",
        {**_DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_interleave": False, "tie_word_embeddings": True},
    ),
    "longcat-flash": Case(
        "longcat-flash",
        {
            **{key: _DEEPSEEK[key] for key in ("num_key_value_heads", "kv_lora_rank", "q_lora_rank", "v_head_dim")},
            **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8, "num_hidden_layers": 6},
            **{"moe_topk": 4, "n_routed_experts": 6, "zero_expert_num": 3, "expert_ffn_hidden_size": 40},
            "routed_scaling_factor": 1.7,
        },
    ),
    "minicpm3": Case(
        "minicpm3",
        {
            **_MINICPM3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "short_factor": [1.0, 1.1, 1.3, 2.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 64,
                "factor": 2.0,
            },
        },
    ),
    "minicpm3-no-q-lora-own-head": Case(
        "minicpm3", {**_MINICPM3, "q_lora_rank": None, "v_head_dim": 12, "tie_word_embeddings": False}
    ),
    "gpt-oss": Case(
        "gpt-oss",
        {
            **_GPT_OSS,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
            "swiglu_limit": 0.4,  # most gates are clamped
        },
    ),
    "gpt-oss-odd-sizes": Case(
        "gpt-oss",
        {
            **_GPT_OSS,
            **_rope("default"),
            "intermediate_size": 37,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "swiglu_alpha": 1.1,
        },
    ),
    "gemma3": Case("gemma3", {**_GEMMA3, **_GEMMA3_ROPE}),
    "gemma3-biases-softcap-own-head": Case(
        "gemma3",
        {**_GEMMA3, "attention_bias": True, "final_logit_softcapping": 30.0, "tie_word_embeddings": False},
    ),
    "gemma4": Case(
        "gemma4",
        {**_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True},
    ),
    "gemma4-experts": Case(
        "gemma4",
        {
            **_GEMMA4,
            **{"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40},
        },
    ),
    "granite-hybrid": Case("granite-hybrid", _GRANITE),
    "granite-hybrid-experts-rope-tied": Case(
        "granite-hybrid",
        {
            **_GRANITE,
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "position_embedding_type": "rope"},
            **{"mamba_proj_bias": True, "attention_bias": True, "tie_word_embeddings": True, "mamba_d_conv": 3},
        },
    ),
    "granite-hybrid-attention-alone": Case(
        "granite-hybrid", {**_GRANITE, "layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"}
    ),
    "bamba": Case("bamba", {**_MAMBA2, "attn_layer_indices": [2]}),
    "bamba-odd-sizes-biases": Case(
        "bamba",
        {
            **_MAMBA2,
            **{"mamba_n_heads": 2, "mamba_d_state": 9, "mamba_n_groups": 1, "attn_layer_indices": [0, 3]},
            **{"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True},
            "time_step_limit": (0.4, 2.0),
        },
    ),
    "nemotron-h": Case("nemotron-h", _NEMOTRON),
    "nemotron-h-experts": Case(
        "nemotron-h",
        {
            **_NEMOTRON,
            **{"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]},
            **{
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_group": 4,
                "topk_group": 2,
                "moe_intermediate_size": 40,
            },
            **{"moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.7},
        },
    ),
    "nemotron-h-narrow-experts-biases": Case(
        "nemotron-h",
        {
            **_NEMOTRON,
            **{"layers_block_type": ["moe", "linear_attention", "full_attention"], "use_bias": True, "mlp_bias": True},
            **{"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 37, "moe_latent_size": 24},
            **{"moe_shared_expert_intermediate_size": 56, "use_conv_bias": False},
        },
    ),
    "falcon-h1": Case(
        "falcon-h1",
        {
            **_MAMBA2,
            **{"num_hidden_layers": 3, "mamba_d_ssm": 96, "key_multiplier": 0.6, "lm_head_multiplier": 0.4},
            **{
                "embedding_multiplier": 2.5,
                "mlp_multipliers": [0.7, 1.3],
                "ssm_multipliers": [0.7, 1.2, 0.9, 0.8, 1.1],
            },
            **{"attention_in_multiplier": 0.8, "attention_out_multiplier": 1.4, "ssm_in_multiplier": 1.3},
            "ssm_out_multiplier": 0.6,
        },
    ),
    "falcon-h1-norm-biases": Case(
        "falcon-h1",
        {
            **_MAMBA2,
            **{"num_hidden_layers": 3, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
            **{"mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True},
        },
    ),
    "falcon-h1-norm-before-gate-tied": Case(
        "falcon-h1",
        {**_MAMBA2, "num_hidden_layers": 3, "mamba_d_ssm": 64, "mamba_rms_norm": True, "tie_word_embeddings": True},
    ),
    "lfm2": Case("lfm2", {**_LFM2, "block_multiple_of": 16}),
    "lfm2-biases-own-width-untied": Case(
        "lfm2",
        {
            **_LFM2,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "conv_L_cache": 4,
        },
    ),
    "lfm2-moe": Case("lfm2-moe", {**_LFM2, **_EXPERTS, "num_experts": 8}),
    "lfm2-moe-no-bias-unnormalized": Case(
        "lfm2-moe",
        {
            **{**_LFM2, **_EXPERTS, "num_experts": 5, "moe_intermediate_size": 37, "num_dense_layers": 1},
            **{"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
        },
    ),
    "kimi-linear": Case("kimi-linear", _KIMI),
    "kimi-linear-q-lora-groups": Case(
        "kimi-linear",
        {**_KIMI, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "linear_head_dim": 10, "norm_topk_prob": False},
    ),
    "gemma4-keys-are-values": Case("gemma4", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
}


def write(case: Case, directory: Path, **settings: Any) -> PreTrainedModel:
    """Save the case's checkpoint in float32 and return transformers' model of it."""
    config_class, model_class = FAMILIES[case.family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**_SHAPE, **case.settings, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = "norm" in name or name.endswith(("router.scale", "per_expert_scale"))
            mean, spread = (1.0, 0.3) if is_gain else (0.0, 2.0 if "sinks" in name else 0.15)
            parameter.normal_(mean, spread)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
    if {"num_experts_per_tok", "top_k_experts", "moe_topk"} & set(case.settings):
        model.set_experts_implementation("eager")  # one expert at a time; supports all sizes
    model.tie_weights()
    model.eval().save_pretrained(directory, max_shard_size=case.shard_size)
    return model
