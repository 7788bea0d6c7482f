"""MiMo-V2-Flash: two kinds of layers, with KV of two shapes, and DeepSeek-V3's router without shared experts.

Layers with a window have more KV heads, a RoPE of their own and sinks. Values are narrower than keys. They are padded
with zeros when they are read (`checkpoints.padded_values`), so that attention is Llama's. The MTP layers are such
layers, with an MLP.

Sources: transformers' mimo_v2_flash; the MTP layers: SGLang's mimo_v2_nextn, whose worker gives all of them the
target's residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.cache.pool import KVShape
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import integer, windows_by_type
from eagle_server.models.targets.deepseek import routed_experts
from eagle_server.models.targets.interface import MtpTraits, TargetFamily, windowed_layers
from eagle_server.models.targets.llama import llama_layer

_FULL_EACH = 6  # every sixth layer, and the first, has no window


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    _check(config, raw, source)
    layers, heads = config.num_layers, raw.get("swa_num_key_value_heads") or 2 * config.num_kv_heads
    windows = windows_by_type(
        {**raw, "layer_types": _types(raw, layers), "sliding_window": _window(raw)}, layers, source
    )
    shapes = (KVShape(config.num_kv_heads, config.head_dim), KVShape(int(heads), config.head_dim))
    eps, local = raw.get("rms_norm_eps") or raw.get("layernorm_epsilon") or 1e-5, raw.get("swa_rope_theta")
    plain = {**raw, "first_k_dense_replace": 0, "moe_layer_freq": 1, "n_shared_experts": 0, "topk_method": "noaux_tc"}
    moe = routed_experts(plain, source, scoring="sigmoid", routing="noaux_tc", normalize=True)
    scale = raw.get("attention_value_scale")
    return replace(
        config,
        qkv_bias=bool(raw.get("attention_bias", False)),
        rms_norm_eps=float(eps),
        windows=windows,
        states=tuple((shapes[window > 0],) for window in windows),
        local_rope=config.local_rope or replace(config.rope, theta=float(local or 10_000.0)),
        sinks="windowed",
        v_head_dim=integer(raw, "v_head_dim", source),
        value_scale=1.0 if scale is None else float(scale),
        moe=None if moe is None else replace(moe, dense_layers=_dense_layers(raw, layers)),
    )


def _check(config: ModelConfig, raw: Mapping[str, Any], source: str) -> None:
    """Refuse what other models of the series have."""
    same: dict[str, Any] = {"swa_head_dim": config.head_dim, "swa_num_attention_heads": config.num_heads}
    same |= {"swa_v_head_dim": raw.get("v_head_dim"), "add_full_attention_sink_bias": False}
    same |= {"add_swa_attention_sink_bias": True}
    for key, served in same.items():
        if raw.get(key) not in (None, served):
            raise CheckpointError(f"{source}: {key} {raw[key]!r} is not supported by this family, only {served!r} is")
    if integer(raw, "v_head_dim", source) > config.head_dim:
        raise CheckpointError(f"{source}: v_head_dim {raw['v_head_dim']} is more than head_dim {config.head_dim}")


def _window(raw: Mapping[str, Any]) -> int:
    """Keys that a row sees. Xiaomi's `sliding_window_size` counts those before it."""
    before = raw.get("sliding_window_size")
    return int(raw.get("sliding_window") or 129) if before is None else int(before) + 1


def _types(raw: Mapping[str, Any], layers: int) -> list[str]:
    pattern = raw.get("hybrid_layer_pattern")
    if raw.get("layer_types"):
        return list(raw["layer_types"])
    if pattern is None:
        pattern = [int(layer > 0 and (layer + 1) % _FULL_EACH > 0) for layer in range(layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _dense_layers(raw: Mapping[str, Any], layers: int) -> frozenset[int]:
    kinds, frequency = raw.get("mlp_layer_types"), raw.get("moe_layer_freq")
    if kinds is not None:
        sparse = [kind == "sparse" for kind in kinds]
    else:
        sparse = [bool(each) for each in frequency] if isinstance(frequency, list) else [n > 0 for n in range(layers)]
    return frozenset(layer for layer in range(layers) if not sparse[layer])


MIMO_V2 = TargetFamily(
    "MiMoV2FlashForCausalLM",
    "mimo_v2_flash",
    _add_flags,
    llama_layer,
    {"head_dim": 192, "v_head_dim": 128, "attention_value_scale": 0.707, "intermediate_size": 16384},
    partial_rotary_factor=0.334,
    mtp=MtpTraits(windowed_layers, before_norm=True, chained=False),
)
