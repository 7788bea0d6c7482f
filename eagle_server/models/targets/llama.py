"""Llama 2 and 3. Mistral, Qwen, GLM-4 MoE and draft heads use the same layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import Attention, DecoderLayer
from eagle_server.models.moe import feed_forward
from eagle_server.models.targets.interface import TargetFamily


def llama_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    """Grouped-query attention, then a gated MLP or experts. Biases, q/k norms and windows are flags of `config`."""
    return DecoderLayer(config, Attention(config, layer, config.hidden_size), feed_forward(config, layer))


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


LLAMA = TargetFamily("LlamaForCausalLM", "llama", _add_flags, llama_layer)
