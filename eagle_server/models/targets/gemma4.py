"""Gemma 4's text decoder: Gemma 3's layer, with keys and values of two shapes.

Global layers have wider heads, fewer KV heads, and in large models keys that are values too. In small models the last
layers read the KV of the last layer of their kind before them, and a vector per token and layer is mixed into the
stream (`models.layer_inputs`). Every layer ends with a factor. Experts work beside the MLP, see
`models.dense_and_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle_server.cache.pool import KVShape
from eagle_server.models.config import CheckpointError, LayerInputSizes, ModelConfig, MoEConfig, SharedKV, State
from eagle_server.models.config_json import integer, windows_by_type
from eagle_server.models.dense_and_experts import DenseAndExperts
from eagle_server.models.layer_inputs import LayerTail
from eagle_server.models.layers import Attention, DecoderLayer, GatedMLP
from eagle_server.models.targets.gemma3 import check_gemma, layer_types
from eagle_server.models.targets.interface import TargetFamily

# transformers' defaults. Files of Google's leave out what has its default.
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}


@dataclass(frozen=True)
class Gemma4Config:
    """What Gemma 4 has beside Gemma 3.

    keys_are_values: in layers without a window.
    wide_mlp: layers that write no KV have an MLP twice as wide.
    """

    keys_are_values: bool
    wide_mlp: bool


def gemma4_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    """Decoder layer `layer`."""
    own, inputs = config.own, config.layer_inputs
    assert isinstance(own, Gemma4Config)
    keys_are_values = own.keys_are_values and not config.windows[layer]
    attention = Attention(config, layer, config.hidden_size, keys_are_values=keys_are_values, value_norm=True)
    wide = own.wide_mlp and not config.writes_kv(layer)
    dense = GatedMLP(replace(config, intermediate_size=config.intermediate_size * (2 if wide else 1)))
    mlp = dense if config.moe is None else DenseAndExperts(config, config.moe, dense)
    return DecoderLayer(config, attention, mlp, LayerTail(config, 0 if inputs is None else inputs.size))


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    check_gemma(raw, source)
    count, declared = config.num_layers, int(raw["max_position_embeddings"])
    types = layer_types(raw, count)
    types[-1] = "full_attention"
    windows = windows_by_type({**raw, "layer_types": types}, count, source)
    first_shared = count - int(raw.get("num_kv_shared_layers") or 0)
    bias, size = bool(raw.get("attention_bias", False)), int(raw.get("hidden_size_per_layer_input") or 0)
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=windows,
        states=_states(_shapes(config, raw, windows), windows, first_shared, source),
        max_position=declared,
        context_limit=(declared, "max_position_embeddings"),
        activation="gelu_tanh",
        output_norms=True,
        attention_scale=1.0,
        embed_scale=config.hidden_size**0.5,
        logits_softcap=float(raw.get("final_logit_softcapping") or 0.0),
        layer_inputs=LayerInputSizes(size, int(raw.get("vocab_size_per_layer_input") or config.vocab_size))
        if size
        else None,
        own=Gemma4Config(bool(raw.get("attention_k_eq_v")), bool(raw.get("use_double_wide_mlp"))),
        moe=_experts(raw, source) if raw.get("enable_moe_block") else None,
    )


def _experts(raw: Mapping[str, Any], source: str) -> MoEConfig:
    experts, chosen = integer(raw, "num_experts", source), integer(raw, "top_k_experts", source)
    if chosen > experts:
        raise CheckpointError(f"{source}: top_k_experts {chosen} is more than num_experts {experts}")
    return MoEConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=integer(raw, "moe_intermediate_size", source),
        shared_experts=0,
        dense_layers=frozenset(),
        scoring="softmax",
        routing="greedy",
        groups=1,
        topk_groups=1,
        normalize=True,
        scale=1.0,
    )


def _shapes(config: ModelConfig, raw: Mapping[str, Any], windows: tuple[int, ...]) -> tuple[KVShape, ...]:
    """Of every layer: as `per_layer_config` says, or as Google's files name the global layers' sizes."""
    sizes = {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    every: Mapping[str, Any] | None = raw.get("per_layer_config")
    if every is None:
        heads = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
        wide = {"head_dim": raw["global_head_dim"], "num_key_value_heads": heads or config.num_kv_heads}
        every = {str(layer): wide for layer, window in enumerate(windows) if not window}
    own = [{**sizes, **every.get(str(layer), {})} for layer in range(len(windows))]
    return tuple(KVShape(int(each["num_key_value_heads"]), int(each["head_dim"])) for each in own)


def _states(
    shapes: tuple[KVShape, ...], windows: tuple[int, ...], first_shared: int, source: str
) -> tuple[tuple[State, ...], ...]:
    """Layers from `first_shared` on read what the last layer of their kind before it writes."""
    states: list[tuple[State, ...]] = [(shape,) for shape in shapes[:first_shared]]
    for layer in range(first_shared, len(windows)):
        same = [other for other in range(first_shared) if bool(windows[other]) == bool(windows[layer])]
        if not same:
            raise CheckpointError(f"{source}: num_kv_shared_layers: layer {layer} has no layer of its kind to read")
        states.append((SharedKV(same[-1], shapes[same[-1]]),))
    return tuple(states)


GEMMA4 = TargetFamily("Gemma4ForCausalLM", "gemma4_text", _add_flags, gemma4_layer, _DEFAULTS)
