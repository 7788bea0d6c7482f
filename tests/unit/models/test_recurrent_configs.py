"""config.json of families with recurrent layers: published forms mean what transformers' mean, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from eagle_server.models.config import CheckpointError
from eagle_server.models.targets.registry import mtp_traits, read_target_config
from eagle_server.ops.recurrent.nodes import RecurrentShape
from tests.support.hybrids import HYBRIDS, hybrid_config

ATTENDS, RECURRENT = "full_attention", "linear_attention"
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "granite": (
        {"layer_types": [RECURRENT, ATTENDS, RECURRENT, RECURRENT], "position_embedding_type": None},
        {"layer_types": ["mamba", "attention", "mamba", "mamba"], "position_embedding_type": "nope"},
    ),
    "nemotron": (
        {"layers_block_type": [RECURRENT, "moe", ATTENDS, RECURRENT, "mlp"], "rms_norm_eps": 1e-5},
        {"layers_block_type": None, "hybrid_override_pattern": "ME*M-", "layer_norm_epsilon": 1e-5},
    ),
    "lfm2": (
        {"layer_types": ["conv", "conv", ATTENDS, "conv"], "rms_norm_eps": 1e-5, "intermediate_size": 96},
        {"layer_types": None, "full_attn_idxs": [2], "norm_eps": 1e-5, "block_ff_dim": 96},
    ),
    "kimi": (
        {"layer_types": [RECURRENT, RECURRENT, RECURRENT, ATTENDS], "mlp_layer_types": ["dense", *["sparse"] * 3]},
        {
            **{"layer_types": None, "first_k_dense_replace": 1, "linear_num_heads": None, "linear_head_dim": None},
            "linear_attn_config": {
                **{"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
                **{"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4},
            },
            **{"num_experts": 5, "num_experts_per_token": 2, "num_shared_experts": 1, "model_max_length": 256},
            **{"n_routed_experts": None, "moe_router_activation_func": "sigmoid", "num_expert_group": 1},
        },
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no attention": ("granite", {"layer_types": ["mamba"] * 4}, "no layer with full_attention"),
    "another kind": ("granite", {"layer_types": ["mamba", "moe", "mamba", "attention"]}, "'linear_attention' or 'full"),
    "positions": ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
    "heads": (
        "granite",
        {"mamba_n_groups": 3},
        "mamba_n_heads 8, mamba_d_head 8, mamba_n_groups 3 do not fit width 64",
    ),
    "limits": ("granite", {"time_step_limit": [1.0]}, "time_step_limit: two numbers are expected"),
    "too many experts": ("granite", {"num_local_experts": 2, "num_experts_per_tok": 3}, "3 of num_local_experts 2"),
    "activation": ("nemotron", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported, only 'relu2' is"),
    "unequal lists": ("nemotron", {"num_hidden_layers": 4}, "num_hidden_layers 4 beside the kinds of 5 layers"),
    "no attention at all": ("nemotron", {"layers_block_type": [RECURRENT, "mlp"] * 2}, "beside the kinds of 4|attends"),
    "unknown layers": (
        "nemotron",
        {"layers_block_type": ["mamba1"] * 5},
        "layers_block_type must name linear_attention",
    ),
    "one bias": ("falcon", {"projectors_bias": True}, "mamba_proj_bias and projectors_bias"),
    "factors": ("falcon", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers: 5 numbers are expected"),
    "no factor": ("falcon", {"key_multiplier": "2"}, "key_multiplier must be a number"),
    "rotation": ("kimi", {"mla_use_nope": False}, "mla_use_nope false is not supported"),
    "lists": ("kimi", {"layer_types": None, "linear_attn_config": {"num_heads": 2}}, "full_attn_layers must be a list"),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_forms_mean_the_same(kind: str) -> None:
    ours, theirs = ({**hybrid_config(kind=kind), **keys} for keys in PUBLISHED[kind])
    assert read_target_config(theirs) == read_target_config(ours)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    kind, keys, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        read_target_config({**hybrid_config(kind=kind), **keys})


@pytest.mark.parametrize(
    ("keys", "count", "found"),
    [
        ({}, 2, "2 MTP layers of full_attention, moe"),
        ({"mtp_hybrid_override_pattern": "*-"}, 2, "2 MTP layers of full_attention, mlp"),
        ({"mtp_hybrid_override_pattern": "M-"}, 1, "1 MTP layers of linear_attention, mlp"),
        ({"mtp_layers_block_type": ["mlp", "attention"]}, 1, "1 MTP layers of mlp, full_attention"),
    ],
)
def test_other_mtp_layers_of_nemotron_are_refused(keys: dict[str, Any], count: int, found: str) -> None:
    config = read_target_config({**hybrid_config(kind="nemotron"), **keys})
    with pytest.raises(
        CheckpointError, match=f"{found} are not supported, only one of full_attention, then moe or mlp"
    ):
        mtp_traits(config.architecture).layers(config, count)


def test_infinite_limits_are_read_as_transformers_writes_them() -> None:
    raw = {**hybrid_config(kind="granite"), "time_step_limit": [0.01, {"__float__": "Infinity"}]}
    recurrent = read_target_config(raw).recurrent
    assert recurrent is not None
    assert recurrent.steps == (0.01, math.inf)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_that_attend_have_consecutive_numbers_in_the_kv_pool(kind: str) -> None:
    config = read_target_config(hybrid_config(kind=kind))
    attending = [layer for layer in range(config.num_layers) if config.attends(layer)]
    assert [config.pool_layer(layer) for layer in attending] == list(range(len(config.pool_layers)))
    assert len(config.pool_layers) == {"falcon": 3}.get(kind, 1)


def test_a_convolution_keeps_its_last_inputs_alone() -> None:
    shape = RecurrentShape(1, 1, key_dim=0, value_dim=2048, kernel=3, rule="convolution")
    assert (shape.channels, shape.decays, shape.update_dim, shape.gates) == (2048, 0, 0, 0)
