"""Llama 2 and 3, and the families that are Llama with other flags: Mistral, Qwen2, MiMo (7B) and Qwen3.

Qwen3-MoE, GLM-4 MoE, gpt-oss and draft heads use the same layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from eagle_server.models.config import ModelConfig
from eagle_server.models.config_json import windows_by_type
from eagle_server.models.layers import Attention, DecoderLayer
from eagle_server.models.moe import feed_forward
from eagle_server.models.targets.interface import TargetFamily


def llama_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    """Grouped-query attention, then a gated MLP or experts. Biases, q/k norms and windows are flags of `config`."""
    return DecoderLayer(config, Attention(config, layer, config.hidden_size), feed_forward(config, layer))


def _one_window(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The same window in all layers."""
    return (int(raw.get("sliding_window") or 0),) * layers


def _later_window(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """A window from layer `max_window_layers` on, if `use_sliding_window` is set."""
    if not raw.get("use_sliding_window", False):
        return (0,) * layers
    window, first = int(raw.get("sliding_window") or 0), int(raw.get("max_window_layers", 28))
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _flags(
    config: ModelConfig,
    raw: Mapping[str, Any],
    source: str,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    windows: Callable[[Mapping[str, Any], int], tuple[int, ...]] | None = None,
) -> ModelConfig:
    """The flags that Llama's variants differ in.

    qkv_bias: q, k and v always have biases; else if `attention_bias` says so. o_bias: o has one if they are asked for.
    windows(raw, layers): the sliding windows where `layer_types` does not tell them; None: the family has none.
    """
    bias = bool(raw.get("attention_bias", False))
    given = config.windows if windows is None else windows(raw, config.num_layers)
    if windows is not None and raw.get("sliding_window") and raw.get("layer_types"):
        given = windows_by_type(raw, config.num_layers, source)
    return replace(
        config,
        qkv_bias=qkv_bias or bias,
        o_bias=o_bias and bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=qk_norm,
        windows=given,
    )


_LLAMA = partial(_flags, o_bias=True)
_MISTRAL = partial(_flags, windows=_one_window)
_QWEN2 = partial(_flags, qkv_bias=True, windows=_later_window)
_QWEN3 = partial(_flags, o_bias=True, qk_norm=True, windows=_later_window)

LLAMA = TargetFamily("LlamaForCausalLM", "llama", _LLAMA, llama_layer)
MISTRAL = TargetFamily("MistralForCausalLM", "mistral", _MISTRAL, llama_layer)
QWEN2 = TargetFamily("Qwen2ForCausalLM", "qwen2", _QWEN2, llama_layer)
MIMO = TargetFamily("MiMoForCausalLM", "mimo", _QWEN2, llama_layer)
QWEN3 = TargetFamily("Qwen3ForCausalLM", "qwen3", _QWEN3, llama_layer)
