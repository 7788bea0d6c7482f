"""Mistral: Llama's layer, with one sliding window for all layers unless `layer_types` says otherwise."""

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
        qkv_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        windows=_windows(raw, config.num_layers, source),
    )


def _windows(raw: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...]:
    window = int(raw.get("sliding_window") or 0)
    if window and raw.get("layer_types"):
        return windows_by_type(raw, layers, source)
    return (window,) * layers


MISTRAL = TargetFamily("MistralForCausalLM", "mistral", _add_flags, llama_layer)
