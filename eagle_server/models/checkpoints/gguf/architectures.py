"""The architectures of GGUF files that are supported: config.json from a file's metadata, and names of its tensors.

Source: the keys of the package gguf, and what llama.cpp computes where a file says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from eagle_server.models.checkpoints.gguf import heads as drafts
from eagle_server.models.checkpoints.gguf.tensors import Place
from eagle_server.models.config import CheckpointError

END, MASK = "tokenizer.ggml.eos_token_id", "tokenizer.ggml.mask_token_id"
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
_SIGMOID = 2  # of expert_gating_func
_SCALINGS = ("linear", "yarn")
_FIXED_YARN = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}

_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}

Config = dict[str, Any]
Value = Callable[..., Any]  # of a key below the architecture's name; without a default it must be there


class GgufArchitecture(NamedTuple):
    """One of llama.cpp's architectures.

    model_type, name: in config.json. own: further keys of config.json, from those that all have, the metadata and the
    names of the tensors. parts: names of a layer's tensors beside the usual ones, see `names.places`.
    has_pairs: rows of q_proj and k_proj are stored with RoPE's pairs side by side.
    top: names of tensors outside of layers, beside the usual ones. is_head: it drafts for a target, whose embedding
        it may share.
    norm_offset: what the file adds to the weights of norms.
    tiles_values: value heads of recurrent layers are stored in another order, see `Place.order`.
    """

    model_type: str
    name: str
    own: Callable[[Config, Value, Container[str]], Config] | None = None
    parts: Mapping[str, str] = {}
    top: Mapping[str, str] = {}
    is_head: bool = False
    has_pairs: bool = False
    norm_offset: float = 0.0
    tiles_values: bool = False


def architecture_of(metadata: Mapping[str, Any]) -> GgufArchitecture:
    """The row of the file's architecture.

    Raises:
        CheckpointError: it is not supported.
    """
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"the architecture {kind} is not supported in GGUF; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[str(kind)]


def config_of(metadata: Mapping[str, Any], found: Mapping[str, Place], factors: list[float] | None) -> Config:
    """config.json. found: the file's tensors by name. factors: the numbers of rope_freqs.weight.

    Raises:
        CheckpointError: a key or tensor is missing, or has a value that is not supported.
    """
    row, kind = architecture_of(metadata), metadata["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        known = metadata.get(f"{kind}.{key}", default)
        if known is None:
            raise CheckpointError(f"{kind}.{key} is missing")
        return known

    embedding = found.get("token_embd.weight")
    if embedding is None and not row.is_head:
        raise CheckpointError("the tensor token_embd.weight is missing")
    hidden = value("embedding_length") if embedding is None else embedding.shape[1]
    heads = value("attention.head_count")
    matrices = {place.type for place in found.values() if len(place.shape) > 1}
    config: Config = {
        "architectures": [row.name],
        "model_type": row.model_type,
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length", metadata.get(f"{kind}.expert_feed_forward_length")),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", value("rope.dimension_count", hidden // heads)),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": not row.is_head and "output.weight" not in found,
        "attention_bias": "blk.0.attn_q.bias" in found,
        "eos_token_id": metadata.get(END),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "float32" if matrices == {"F32"} else "bfloat16",
        "rope_parameters": _rope(value, factors),
    }
    if embedding is not None:
        config["vocab_size"] = embedding.shape[0]
    if (mask := metadata.get(MASK)) is not None:
        config["mask_token_id"] = mask
    config |= {} if row.own is None else row.own(config, value, found)
    if not _EXPERTS & set(config) and any("_exps" in name for name in found):
        raise CheckpointError(f"experts in the architecture {kind} are not supported in GGUF")
    return config


def _rope(value: Value, factors: list[float] | None) -> Config:
    """Llama 3.1 stores what each wavelength is multiplied by, which is LongRoPE's `short_factor`."""
    context = value("context_length")
    rope: Config = {"rope_type": "default", "rope_theta": float(value("rope.freq_base", 1e4))}
    if factors is not None:
        if any(not math.isfinite(factor) or factor <= 0 for factor in factors):
            raise CheckpointError("rope_freqs.weight: positive numbers are expected")
        longrope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return rope | longrope | {"original_max_position_embeddings": context}
    scaling = value("rope.scaling.type", "none")
    if scaling == "none":
        return rope
    if scaling not in _SCALINGS:
        raise CheckpointError(f"rope.scaling.type {scaling} is not supported in GGUF")
    for key, usual in _FIXED_YARN.items():
        if value(f"rope.scaling.{key}", usual) != usual:
            raise CheckpointError(f"rope.scaling.{key}: only {usual} is supported in GGUF")
    original = value("rope.scaling.original_context_length", context)
    rope |= {"rope_type": scaling, "factor": float(value("rope.scaling.factor", 1.0))}
    rope |= {"original_max_position_embeddings": original}
    if scaling == "yarn":
        rope |= {part: float(value(f"rope.scaling.yarn_{part}", usual)) for part, usual in _YARN_BETAS.items()}
    return rope


def _windows(config: Config, value: Value, usual: int) -> Config:
    """usual: every how manieth layer attends to all, where the file does not say it."""
    pattern, layers = value("attention.sliding_window_pattern", usual), config["num_hidden_layers"]
    is_windowed = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in range(layers)]
    return {
        "sliding_window": value("attention.sliding_window"),
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in is_windowed],
    }


def _qwen3_moe(config: Config, value: Value, found: Container[str]) -> Config:
    return {
        "num_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "moe_intermediate_size": value("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes it; the file does not say
    }


def _gemma3(config: Config, value: Value, found: Container[str]) -> Config:
    """Windows, their RoPE and scales. What files do not say is as in all of Google's models."""
    largest = 62  # layers of the model of 27 billion parameters, whose queries are scaled by the mean size of a head
    sizes = config["hidden_size"] // config["num_attention_heads"], config["head_dim"]
    local = {"rope_type": "default", "rope_theta": float(value("rope.freq_base_swa", 1e4))}
    return {
        **_windows(config, value, 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "query_pre_attn_scalar": sizes[0] if config["num_hidden_layers"] == largest else sizes[1],
        "final_logit_softcapping": value("final_logit_softcapping", 0.0),
    }


def _gpt_oss(config: Config, value: Value, found: Container[str]) -> Config:
    """What files do not say is as in both of OpenAI's models: YaRN's bounds are not rounded, and gates are clamped."""
    return {
        **_windows(config, value, 2),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
        "num_local_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "intermediate_size": value("expert_feed_forward_length"),
    }


def _lfm2(config: Config, value: Value, found: Container[str]) -> Config:
    """Layers without KV heads have a short convolution. The width of the MLP is that of its tensors."""
    kv_heads = config["num_key_value_heads"]
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * config["num_hidden_layers"]
    return {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": value("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.in_proj.bias" in found,
    }


def _lfm2_moe(config: Config, value: Value, found: Container[str]) -> Config:
    dense = value("leading_dense_block_count")
    return {
        **_lfm2(config, value, found),
        **_qwen3_moe(config, value, found),
        "num_dense_layers": dense,
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in found,
        "routed_scaling_factor": value("expert_weights_scale", 1.0),
    }


def _glm4_moe(config: Config, value: Value, found: Container[str]) -> Config:
    """The last layers are for multi-token prediction."""
    if value("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise CheckpointError("glm4moe.expert_gating_func: only sigmoid (2) is supported in GGUF")
    mtp = value("nextn_predict_layers", 0)
    head_dim = value("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    return {
        "head_dim": head_dim,
        "rope_parameters": _rotated_part(config, value, head_dim),
        "num_hidden_layers": config["num_hidden_layers"] - mtp,
        "num_nextn_predict_layers": mtp,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in found,
        "n_routed_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "n_shared_experts": value("expert_shared_count", 0),
        "moe_intermediate_size": value("expert_feed_forward_length"),
        "first_k_dense_replace": value("leading_dense_block_count", 0),
        "n_group": value("expert_group_count", 1),
        "topk_group": value("expert_group_used_count", 1),
        "norm_topk_prob": bool(value("expert_weights_norm", default=False)),
        "routed_scaling_factor": value("expert_weights_scale", 1.0),
    }


def _qwen3_5(config: Config, value: Value, found: Container[str]) -> Config:
    """The last layers are for multi-token prediction. Texts have one position in all sections of RoPE."""
    values, mtp = value("ssm.time_step_rank"), value("nextn_predict_layers", 0)
    layers = config["num_hidden_layers"] - mtp
    return {
        **_hybrid_layers(value, layers),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": mtp,
        "rope_parameters": _rotated_part(config, value, config["head_dim"]),
        "linear_num_key_heads": value("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": value("ssm.state_size"),
        "linear_value_head_dim": value("ssm.inner_size") // values,
        "linear_conv_kernel_dim": value("ssm.conv_kernel"),
    }


def _hybrid_layers(value: Value, layers: int) -> Config:
    """Which layers are recurrent: a list, or all but every so manieth."""
    recurrent = value("attention.recurrent_layers", [])
    if not recurrent:
        return {"full_attention_interval": value("full_attention_interval", 4)}
    return {"layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]]}


def _qwen3_5_moe(config: Config, value: Value, found: Container[str]) -> Config:
    """Qwen3-Next's projections are stored as Qwen3.5's are: all queries, then all keys, and so on."""
    shared = {"shared_expert_intermediate_size": value("expert_shared_feed_forward_length")}
    return {**_qwen3_5(config, value, found), **_qwen3_moe(config, value, found), **shared}


def _rotated_part(config: Config, value: Value, head_dim: int) -> Config:
    return {**config["rope_parameters"], "partial_rotary_factor": value("rope.dimension_count", head_dim) / head_dim}


_GEMMA3_PARTS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS_PARTS = {"post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks"}
_LFM2_PARTS = {
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_MTP_PARTS = {
    **{f"nextn.{part}": part for part in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"nextn.shared_head_{part}": f"shared_head.{part}" for part in ("head", "norm")},
}
_GLM4_MOE_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    **_MTP_PARTS,
}
_QWEN3_5_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    **_MTP_PARTS,
}

ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", has_pairs=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma3": GgufArchitecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, _GEMMA3_PARTS, norm_offset=1.0),
    "gpt-oss": GgufArchitecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, _GPT_OSS_PARTS),
    "lfm2": GgufArchitecture("lfm2", "Lfm2ForCausalLM", _lfm2, _LFM2_PARTS),
    "lfm2moe": GgufArchitecture("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2_moe, _LFM2_PARTS),
    "glm4moe": GgufArchitecture("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, _GLM4_MOE_PARTS),
    "qwen3next": GgufArchitecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen3_5_moe, _QWEN3_5_PARTS, norm_offset=1.0
    ),
    "qwen35": GgufArchitecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", _qwen3_5, _QWEN3_5_PARTS, norm_offset=1.0, tiles_values=True
    ),
    "qwen35moe": GgufArchitecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen3_5_moe, _QWEN3_5_PARTS, norm_offset=1.0, tiles_values=True
    ),
    "eagle3": GgufArchitecture(
        *("llama", "LlamaForCausalLMEagle3", drafts.eagle3, drafts.EAGLE3_PARTS, drafts.EAGLE3_TOP),
        is_head=True,
        has_pairs=True,
    ),
    "dflash": GgufArchitecture("qwen3", "DFlashDraftModel", drafts.dflash, top=drafts.DFLASH_TOP, is_head=True),
}
