"""Qwen3-Next, and Qwen3.5 and 3.6 with experts: Qwen3.5's layers, with experts in the place of the MLP.

Beside the routed experts each token goes to a shared one, multiplied by the sigmoid of a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import integer
from eagle_server.models.layers import DecoderLayer
from eagle_server.models.moe import feed_forward
from eagle_server.models.targets.hybrids.qwen3_5 import DEFAULTS, QWEN_MTP, ROTATED, hybrid_attention, hybrid_flags
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.qwen3_moe import qwen_experts


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    config = hybrid_flags(config, raw, source)
    moe = qwen_experts(raw, config.num_layers, source, normalize=True)
    size, shared = moe.intermediate_size, integer(raw, "shared_expert_intermediate_size", source)
    if shared % size:
        raise CheckpointError(
            f"{source}: shared_expert_intermediate_size {shared} beside moe_intermediate_size {size} is not "
            "supported; a multiple is expected"
        )
    moe = replace(moe, shared_experts=shared // size, shared_gate=True)
    return replace(config, moe=moe)


def _layer(config: ModelConfig, layer: int, *, by_key_head: bool) -> DecoderLayer:
    return DecoderLayer(config, hybrid_attention(config, layer, by_key_head=by_key_head), feed_forward(config, layer))


_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 5632}
QWEN3_NEXT = TargetFamily(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    _add_flags,
    partial(_layer, by_key_head=True),
    {**DEFAULTS, **_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
    ROTATED,
    QWEN_MTP,
)
QWEN3_5_MOE = TargetFamily(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    _add_flags,
    partial(_layer, by_key_head=False),
    {**DEFAULTS, **_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
    ROTATED,
    QWEN_MTP,
)
