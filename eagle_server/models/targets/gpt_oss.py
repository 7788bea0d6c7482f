"""gpt-oss: Llama's attention with sinks and a window in every second layer, and experts with clamped gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import CheckpointError, ClampedSwiGLU, ModelConfig, MoEConfig
from eagle_server.models.config_json import integer, windows_by_type
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.llama import llama_layer

_KINDS = ("sliding_attention", "full_attention")  # of layers 0, 1, 2, ... in turn, where config.json does not tell


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    bias = raw.get("attention_bias") is not False
    kinds = raw.get("layer_types") or [_KINDS[layer % 2] for layer in range(config.num_layers)]
    experts, chosen = integer(raw, "num_local_experts", source), integer(raw, "num_experts_per_tok", source, default=4)
    if chosen > experts:
        raise CheckpointError(f"{source}: num_experts_per_tok {chosen} of num_local_experts {experts}")
    moe = MoEConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=config.intermediate_size,
        shared_experts=0,
        dense_layers=frozenset(),
        scoring="softmax",
        routing="greedy",
        groups=1,
        topk_groups=1,
        normalize=True,
        scale=1.0,
        bias=True,
        swiglu=ClampedSwiGLU(float(raw.get("swiglu_limit") or 7.0), float(raw.get("swiglu_alpha") or 1.702)),
    )
    windows = windows_by_type({"sliding_window": 128, **raw, "layer_types": kinds}, config.num_layers, source)
    return replace(config, qkv_bias=bias, o_bias=bias, windows=windows, sinks="all", moe=moe)


GPT_OSS = TargetFamily("GptOssForCausalLM", "gpt_oss", _add_flags, llama_layer)
