"""A tiny random target with recurrent layers, and drafts for it."""

from __future__ import annotations

from typing import Any

import torch

from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from tests.support.engines import CONTEXT, MARGIN, random_config, randomized

_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4}
_RECURRENT, _ATTENDS = "linear_attention", "full_attention"
_EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "granite": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **{**_MAMBA2, "layer_types": [_RECURRENT, _ATTENDS, _RECURRENT, _RECURRENT], "num_local_experts": 0},
        **{"shared_intermediate_size": 64, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    },
    "bamba": {
        "architectures": ["BambaForCausalLM"],
        **{**_MAMBA2, "attn_layer_indices": [1]},
    },
    "nemotron": {
        "architectures": ["NemotronHForCausalLM"],
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "head_dim": 16, **_EXPERTS},
        **{"layers_block_type": [_RECURRENT, "moe", _ATTENDS, _RECURRENT, "mlp"], "num_hidden_layers": 5},
        "moe_shared_expert_intermediate_size": 24,
    },
    "falcon": {"architectures": ["FalconH1ForCausalLM"], **_MAMBA2, "mamba_d_ssm": 64, "num_hidden_layers": 3},
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        **{"layer_types": ["conv", "conv", _ATTENDS, "conv"], "block_multiple_of": 16, "tie_word_embeddings": False},
    },
    "kimi": {
        "architectures": ["KimiLinearForCausalLM"],
        **{"linear_num_heads": 2, "linear_head_dim": 8, "layer_types": [_RECURRENT, _RECURRENT, _ATTENDS, _RECURRENT]},
        **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "mla_use_nope": True},
        **{**_EXPERTS, "n_shared_experts": 1},
    },
}


def hybrid_config(vocab: int = 24, kind: str = "qwen3.5", **config: Any) -> dict[str, Any]:
    """The config.json of `hybrid_target`: recurrent layers and one that attends, of one of the kinds above."""
    return random_config(vocab, **{"layers": 4, **HYBRIDS[kind], **config})


def hybrid_target(
    vocab: int = 24, kind: str = "qwen3.5", *, seed: int = 0, std: float = 0.25, **config: Any
) -> TargetModel:
    """A random target whose states matter: they decay slowly, by 0.5 to 0.99 per token."""
    model = TargetModel(read_target_config(hybrid_config(vocab, kind, **config)), CONTEXT + MARGIN)
    target: TargetModel = randomized(model, seed, std)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in target.named_parameters():
        if name.endswith("a_log"):
            parameter.uniform_(-4.0, 0.0, generator=generator)
        elif name.endswith(("dt_bias", "skip")):
            parameter.normal_(0.0, 0.3, generator=generator)
        elif "norm" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        elif name.endswith("conv"):
            parameter.normal_(0.0, 0.5, generator=generator)
    return target
