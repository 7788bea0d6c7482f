"""Qwen3-MoE: Qwen3 with experts in all layers but a few, weighted by a softmax over all, and one window or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.config import CheckpointError, ModelConfig, MoEConfig
from eagle_server.models.config_json import integer
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.llama import QWEN3, llama_layer

_DEFAULTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def qwen_experts(raw: Mapping[str, Any], layers: int, source: str, *, normalize: bool) -> MoEConfig:
    """The experts of Qwen's families, without shared ones. `normalize`: the family's default.

    Raises:
        CheckpointError: more experts per token than experts, or a size is absent or no positive integer.
    """
    experts, chosen = integer(raw, "num_experts", source), integer(raw, "num_experts_per_tok", source)
    if chosen > experts:
        raise CheckpointError(f"{source}: num_experts_per_tok {chosen} of num_experts {experts}")
    dense, step = set(raw.get("mlp_only_layers") or ()), integer(raw, "decoder_sparse_step", source, default=1)
    return MoEConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=integer(raw, "moe_intermediate_size", source),
        shared_experts=0,
        dense_layers=frozenset(i for i in range(layers) if i in dense or (i + 1) % step),
        scoring="softmax",
        routing="greedy",
        groups=1,
        topk_groups=1,
        normalize=bool(raw.get("norm_topk_prob", normalize)),
        scale=1.0,
    )


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    config = QWEN3.add_flags(config, raw, source)
    named = {"num_experts": raw.get("num_local_experts"), **raw}
    given = {**_DEFAULTS, **{key: value for key, value in named.items() if value is not None}}
    moe = qwen_experts(given, config.num_layers, source, normalize=False)
    window = integer(raw, "sliding_window", source, default=4096) if raw.get("use_sliding_window") else 0
    return replace(config, moe=moe, windows=(window,) * config.num_layers)


QWEN3_MOE = TargetFamily("Qwen3MoeForCausalLM", "qwen3_moe", _add_flags, llama_layer)
