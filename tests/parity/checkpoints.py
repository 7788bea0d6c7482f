"""Small random checkpoints of every target family, written by transformers itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
FAMILIES: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "deepseek-v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
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
}


def write(case: Case, directory: Path, **settings: Any) -> PreTrainedModel:
    """Save the case's checkpoint in float32 and return transformers' model of it."""
    config_class, model_class = FAMILIES[case.family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**_SHAPE, **case.settings, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.15)
            parameter.normal_(mean, spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    if "n_routed_experts" in case.settings:
        model.set_experts_implementation("eager")  # one expert at a time; supports all sizes
    model.tie_weights()
    model.eval().save_pretrained(directory, max_shard_size=case.shard_size)
    return model
