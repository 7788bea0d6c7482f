"""MiniCPM3: DeepSeek's latent attention with heads rotated in halves, and an MLP, whose outputs are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import ModelConfig
from eagle_server.models.targets.deepseek import latent_layer, with_mla
from eagle_server.models.targets.interface import TargetFamily

# transformers' defaults, which are MiniCPM3-4B's.
_DEFAULTS = {
    "vocab_size": 73448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    v_head_dim = raw.get("v_head_dim") or config.hidden_size // config.num_heads
    config = with_mla(config, {**raw, "v_head_dim": v_head_dim, "rope_interleave": False}, source)
    depth, base = raw["scale_depth"], raw["dim_model_base"]
    return replace(
        config,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        embed_scale=float(raw["scale_emb"]),
        residual_scale=1.0 if depth is None else float(depth) / math.sqrt(config.num_layers),
        logits_divisor=1.0 if base is None else config.hidden_size / float(base),
    )


MINICPM3 = TargetFamily("MiniCPM3ForCausalLM", "minicpm3", _add_flags, latent_layer, _DEFAULTS)
