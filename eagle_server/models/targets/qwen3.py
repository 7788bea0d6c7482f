"""Qwen3: Llama's layer with RMSNorm on each head's queries and keys, and Qwen2's windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import ModelConfig
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.llama import llama_layer
from eagle_server.models.targets.qwen2 import qwen_windows


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=True,
        windows=qwen_windows(raw, config.num_layers, source),
    )


QWEN3 = TargetFamily("Qwen3ForCausalLM", "qwen3", _add_flags, llama_layer)
