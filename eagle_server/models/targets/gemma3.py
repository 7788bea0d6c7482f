"""Gemma 3's text decoder: norms around attention and MLP, and two kinds of layers with a RoPE each.

Five of six layers have a sliding window and a short RoPE, the others see the whole text. Norms multiply by 1 + weight,
embeddings by the root of the hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import CheckpointError, ModelConfig, RopeConfig
from eagle_server.models.config_json import windows_by_type
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.llama import llama_layer

# transformers' defaults. Files of Google's leave out what has its default.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    check_gemma(raw, source)
    bias, layers = bool(raw.get("attention_bias", False)), config.num_layers
    # The scaled length: only some layers' RoPE is scaled, so the factor does not extend it.
    declared = int(raw["max_position_embeddings"])
    local = RopeConfig(theta=float(raw["rope_local_base_freq"]), original_max_position=declared)
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=windows_by_type({**raw, "layer_types": layer_types(raw, layers)}, layers, source),
        max_position=declared,
        context_limit=(declared, "max_position_embeddings"),
        local_rope=config.local_rope or local,
        activation="gelu_tanh",
        norm_offset=1.0,
        output_norms=True,
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        embed_scale=config.hidden_size**0.5,
        logits_softcap=float(raw.get("final_logit_softcapping") or 0.0),
    )


def check_gemma(raw: Mapping[str, Any], source: str) -> None:
    """Refuse options that are not served. "vision": bidirectional between the tokens of one image alone."""
    known = (("hidden_activation", ("gelu_pytorch_tanh",)), ("use_bidirectional_attention", (None, False, "vision")))
    for key, served in known:
        if raw.get(key) not in served:
            raise CheckpointError(f"{source}: {key} {raw[key]!r} is not supported by this family")


def layer_types(raw: Mapping[str, Any], layers: int) -> list[str]:
    """`layer_types`, or in older files every `sliding_window_pattern`-th layer has no window."""
    pattern = int(raw.get("sliding_window_pattern") or 6)
    types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    return list(raw.get("layer_types") or types)


GEMMA3 = TargetFamily("Gemma3ForCausalLM", "gemma3_text", _add_flags, llama_layer, _DEFAULTS)
