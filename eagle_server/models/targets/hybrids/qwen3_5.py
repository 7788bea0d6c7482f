"""Qwen3.5 and Qwen3.6, dense: three recurrent layers, then one that attends, and so on.

Attention has a gate, norms on queries and keys, and RoPE on a quarter of each head. All norms but the recurrent layers'
multiply by 1 + weight. Texts have the same position in all parts of the multimodal RoPE, so it is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import integer, recurrent_layers
from eagle_server.models.gated_delta import GatedDeltaNet
from eagle_server.models.layers import Attention, DecoderLayer, GatedMLP
from eagle_server.models.targets.interface import MtpTraits, TargetFamily
from eagle_server.ops.recurrent.nodes import RecurrentShape

DEFAULTS = {  # transformers', of keys that config.json may leave out
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
ROTATED = 0.25  # of a head, if config.json does not say it


def hybrid_attention(config: ModelConfig, layer: int, *, by_key_head: bool = False) -> GatedDeltaNet | Attention:
    """What stands in the place of attention in a layer. `by_key_head`: see `GatedDeltaNet`."""
    if config.is_recurrent(layer):
        return GatedDeltaNet(config, layer, by_key_head=by_key_head)
    return Attention(config, layer, config.hidden_size)


def hybrid_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    """The flags of Qwen3-Next and Qwen3.5, and which layers are recurrent.

    Raises:
        CheckpointError: layers of another kind, or heads that do not fit together.
    """
    bias, kinds = bool(raw.get("attention_bias", False)), _layer_kinds(config, raw, source)
    layers = recurrent_layers(kinds, config.num_layers, source, "linear_attention")
    keys = integer(raw, "linear_num_key_heads", source)
    values = integer(raw, "linear_num_value_heads", source)
    if values % keys:
        raise CheckpointError(
            f"{source}: linear_num_value_heads {values} is no multiple of linear_num_key_heads {keys}"
        )
    shape = RecurrentShape(
        key_heads=keys,
        value_heads=values,
        key_dim=integer(raw, "linear_key_head_dim", source),
        value_dim=integer(raw, "linear_value_head_dim", source),
        kernel=integer(raw, "linear_conv_kernel_dim", source),
    )
    config = replace(config, qkv_bias=bias, o_bias=bias, qk_norm=True, attention_gate=True, norm_offset=1.0)
    return config.with_states(layers, shape)


def _layer_kinds(config: ModelConfig, raw: Mapping[str, Any], source: str) -> list[str]:
    every = integer(raw, "full_attention_interval", source)
    regular = [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(config.num_layers)
    ]
    return list(raw.get("layer_types") or regular)


def _layer(config: ModelConfig, layer: int) -> DecoderLayer:
    return DecoderLayer(config, hybrid_attention(config, layer), GatedMLP(config))


QWEN_MTP = MtpTraits(named_mtp=True)
QWEN3_5 = TargetFamily("Qwen3_5ForCausalLM", "qwen3_5_text", hybrid_flags, _layer, DEFAULTS, ROTATED, QWEN_MTP)
