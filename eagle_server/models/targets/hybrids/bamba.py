"""Bamba: Llama's layer, with Mamba-2 in the place of attention in most layers, and RoPE of half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import ModelConfig
from eagle_server.models.config_json import recurrent_layers
from eagle_server.models.layers import Attention, DecoderLayer, GatedMLP
from eagle_server.models.mamba2 import Mamba2, with_mamba2
from eagle_server.models.targets.interface import TargetFamily

# transformers' defaults, of keys that config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "mamba_n_heads": 128, "mamba_d_state": 256, "mamba_d_conv": 4}


def mamba2_or_attention(config: ModelConfig, layer: int) -> Mamba2 | Attention:
    """What stands in the place of attention in a layer."""
    return Mamba2(config, layer) if config.is_recurrent(layer) else Attention(config, layer, config.hidden_size)


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    attending, bias = raw.get("attn_layer_indices") or (), bool(raw.get("attention_bias", False))
    kinds = ["full_attention" if layer in attending else "linear_attention" for layer in range(config.num_layers)]
    layers = recurrent_layers(kinds, config.num_layers, source, "linear_attention")
    config = replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))
    return with_mamba2(config, raw, layers, source)


def _layer(config: ModelConfig, layer: int) -> DecoderLayer:
    return DecoderLayer(config, mamba2_or_attention(config, layer), GatedMLP(config))


BAMBA = TargetFamily(
    "BambaForCausalLM",
    "bamba",
    _add_flags,
    _layer,
    _DEFAULTS,
    partial_rotary_factor=0.5,
    renames={
        "model.final_layernorm.": "model.norm.",
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        ".feed_forward.": ".mlp.",
    },
)
