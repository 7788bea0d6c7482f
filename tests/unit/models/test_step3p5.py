"""What a config.json and the files of Step 3.5 may say, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.models.checkpoints.fused_experts import single_experts
from eagle_server.models.checkpoints.weights import StoredTensor
from eagle_server.models.config import CheckpointError
from eagle_server.models.targets.registry import mtp_traits, read_target_config
from tests.support.engines import random_config
from tests.support.step3p5 import SETTINGS

RAW = {**random_config(), **SETTINGS, "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5"}
RAW |= {"num_key_value_heads": 2, "num_attention_heads": 4}
RAW.pop("rope_parameters", None)
OTHER = {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"attention_bias": True}, "attention_bias True is not supported"),
    "no gates": ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate False"),
    "softmax": ({"moe_router_activation": "softmax"}, "moe_router_activation 'softmax'"),
    "unnormalized": ({"norm_expert_weight": False}, "norm_expert_weight False"),
    "plain norms": ({"zero_centered": False}, "zero_centered False"),
    "scaled in all layers": ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types"),
    "layers without RoPE": ({"use_rope_layers": [True, False]}, "use_rope_layers"),
    "indexers": ({"sparse_attention_config": {"sparse_block_size": 4}}, "sparse_attention_config"),
    "other KV heads": ({"attention_other_setting": {**OTHER, "num_attention_groups": 1}}, "num_attention_groups 1"),
    "other layers": ({"attention_other_setting": {**OTHER, "attention_type": "x"}}, "attention_type 'x'"),
    "RoPE that differs": ({"rope_theta": [5000.0, 100.0, 99.0, 5000.0]}, "rope_theta: layers with sliding_attention"),
    "a RoPE missing": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set for each"),
    "heads of other groups": ({"num_sliding_attention_heads": 5}, "multiples of num_key_value_heads 2"),
    "another size": ({"per_layer_config": {"1": {"head_dim": 8}}}, r"per_layer_config: \['head_dim'\]"),
    "a shared expert of an odd width": ({"share_expert_dim": 25}, "share_expert_dim 25 is not supported"),
    "no experts named": ({"mlp_layer_types": None}, "moe_layers_enum or mlp_layer_types is expected"),
    "too few limits": ({"swiglu_limits": [0.0]}, "cannot have these values"),
}
REFUSED_MTP: dict[str, dict[str, Any]] = {
    "full attention": {"layer_types": [*SETTINGS["layer_types"], "full_attention"]},
    "full attention, transformers": {"mtp_layer_types": ["sliding_attention", "full_attention"]},
    "experts": {"mtp_mlp_layer_types": ["sparse"]},
    "experts of published files": {"mlp_layer_types": None, "moe_layers_enum": "1,2,3,4"},
    "limits": {"swiglu_limits_shared": [0.0] * 4 + [16.0]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_does_not_compute_is_refused_by_name(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=rf"^dir/config\.json: .*{message}"):
        read_target_config({**RAW, **change}, "dir/config.json")


@pytest.mark.parametrize("name", REFUSED_MTP)
def test_mtp_layers_of_another_kind_are_refused_and_the_target_is_not(name: str) -> None:
    raw = {**RAW, **REFUSED_MTP[name]}
    assert read_target_config(raw).num_layers == 4
    with pytest.raises(CheckpointError, match=r"^dir/config\.json: its MTP layers are not supported: only layers with"):
        mtp_traits("Step3p5ForCausalLM").check(raw, "dir/config.json")


def test_layers_may_be_of_one_kind() -> None:
    one = {**RAW, "layer_types": ["full_attention"] * 4, "rope_theta": 7000.0, "partial_rotary_factors": None}
    config = read_target_config(one)
    assert config.windows == (0,) * 4 and config.layer_heads == (4,) * 4 and config.rope.theta == 7000.0


def test_stacked_experts_are_read_one_by_one() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    stored = StoredTensor(Path("file"), "model.layers.1.moe.up_proj.weight", (2, 3, 4), lambda: whole)
    found = single_experts({"model.layers.1.mlp.experts.up_proj.weight": stored})
    assert list(found) == [f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(2)]
    assert all(torch.equal(each.read(), whole[i]) and each.shape == (3, 4) for i, each in enumerate(found.values()))
    flat = StoredTensor(Path("file"), "key", (6, 4), lambda: whole.view(6, 4))
    with pytest.raises(CheckpointError, match="file: key: three dimensions are expected"):
        single_experts({"model.layers.1.mlp.experts.up_proj.weight": flat})
