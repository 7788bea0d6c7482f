"""Qwen2, Qwen2.5 and MiMo: Llama's layer with biases on q, k and v, and optional windows in the later layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import ModelConfig
from eagle_server.models.config_json import windows_by_type
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.llama import llama_layer


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    return replace(
        config,
        qkv_bias=True,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        windows=qwen_windows(raw, config.num_layers, source),
    )


def qwen_windows(raw: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...]:
    """One window per layer: by `layer_types`, or from layer `max_window_layers` on if `use_sliding_window` is set."""
    window = int(raw.get("sliding_window") or 0)
    if window and raw.get("layer_types"):
        return windows_by_type(raw, layers, source)
    if not raw.get("use_sliding_window", False):
        return (0,) * layers
    first = int(raw.get("max_window_layers", 28))
    return tuple(window if layer >= first else 0 for layer in range(layers))


QWEN2 = TargetFamily("Qwen2ForCausalLM", "qwen2", _add_flags, llama_layer)
MIMO = TargetFamily("MiMoForCausalLM", "mimo", _add_flags, llama_layer)
