"""Writes a checkpoint directory as a GGUF file, as llama.cpp's converter names and orders it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file
from torch import Tensor

from tests.support.k_quants import K_QUANTS, k_quantized

ARCHITECTURES = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"},
    **{"gpt_oss": "gpt-oss", "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "glm4_moe": "glm4moe", "qwen3_next": "qwen3next"},
    **{"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"},
}
_NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    "model.embedding_norm": "token_embd_norm",
}
LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_LFM2_PARTS = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    **{f"self_attn.{part}_layernorm": f"attn_{part}_norm" for part in "qk"},
    **{f"feed_forward.{part}": f"ffn_{own}" for part, own in {"w1": "gate", "w2": "down", "w3": "up"}.items()},
    "feed_forward.gate": "ffn_gate_inp",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_MTP_PARTS = {
    **{part: f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"shared_head.{part}": f"nextn.shared_head_{part}" for part in ("head", "norm")},
}
_QWEN_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **_MTP_PARTS,
}
_OWN_PARTS = {
    "gemma3": {
        "pre_feedforward_layernorm": "ffn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    "lfm2": _LFM2_PARTS,
    "lfm2moe": _LFM2_PARTS,
    "glm4moe": {
        "post_attention_layernorm": "post_attention_norm",
        **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        **_MTP_PARTS,
    },
    "qwen3next": {**_QWEN_PARTS, "linear_attn.in_proj_ba": "ssm_ba"},
    "qwen35": _QWEN_PARTS,
    "qwen35moe": _QWEN_PARTS,
}
_WHOLE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
_QWEN_HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
_SQUEEZED = ("shortconv.conv", "ssm_conv1d", "ffn_gate_inp_shexp")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|feed_forward)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w2": "down", "w3": "up"}


def write_gguf(
    directory: Path,
    file: Path,
    kind: str = "F32",
    *,
    values: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray[Any, Any]] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
    tensors_of_part: int = 0,
    fuse_gate_up: bool = False,
) -> Path:
    """kind: the type of matrices (MXFP4 stays), `kinds` of those whose names contain a key. values: of metadata, in the
    place of the usual ones. more: further tensors. tokenizer: tokens, types, merges, pre.
    tensors_of_part: of each file; 0: all are in one. fuse_gate_up: of each expert."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    metadata = _metadata(config, architecture)
    named = _named(directory, config, architecture)
    named = _with_fused_experts(named) if fuse_gate_up else named
    if mtp := sum(name.endswith("nextn.eh_proj.weight") for name in named):
        metadata |= {"block_count": config["num_hidden_layers"] + mtp, "nextn_predict_layers": mtp}
    writer = GGUFWriter(file, architecture, split_max_tensors=tensors_of_part)
    write_metadata(writer, architecture, metadata | dict(values or {}))
    if tokenizer is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(tokenizer["pre"])
        writer.add_token_list(tokenizer["tokens"])
        writer.add_token_types(tokenizer["types"])
        writer.add_token_merges(tokenizer["merges"])
    ends = config.get("eos_token_id")
    if isinstance(ends, int):
        writer.add_eos_token_id(ends)
    for name, tensor in named.items():
        if tensor.dtype == torch.uint8:
            writer.add_tensor(name, tensor.numpy(), raw_dtype=GGMLQuantizationType.MXFP4)
            continue
        add_tensor(writer, name, tensor, next((each for part, each in (kinds or {}).items() if part in name), kind))
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if file.is_file() else next(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))


def add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    """kind: the type of a matrix. Vectors are floats."""
    array = tensor.float().numpy()
    if array.ndim == 1 or kind == "F32" or name.endswith(".bias"):
        writer.add_tensor(name, array)
        return
    quantized = GGMLQuantizationType[kind]
    blocks = k_quantized(array, kind) if kind in K_QUANTS else quants.quantize(array, quantized)
    writer.add_tensor(name, blocks, raw_dtype=quantized)


def write_metadata(writer: GGUFWriter, architecture: str, metadata: Mapping[str, Any]) -> None:
    """Values by their keys below the architecture's name, or by whole keys. None: it is left out."""
    for name, value in metadata.items():
        key = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{name}"
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            kinds_of_values = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add = (kinds_of_values | {list: writer.add_array, bool: writer.add_bool})[type(value)]
            add(key, value)


def _metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    metadata: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if architecture in ("qwen3moe", "lfm2moe", "glm4moe", "qwen3next", "qwen35moe"):
        metadata |= {
            "expert_count": experts_of(config),
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    metadata |= _OWN_KEYS.get(architecture, lambda config: {})(config)
    if architecture == "gpt-oss":
        metadata |= {
            "expert_count": experts_of(config),
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["intermediate_size"],
            "attention.sliding_window": config["sliding_window"],
        }
    if rope.get("rope_type") == "yarn":
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if architecture == "gemma3":
        full, local = (rope[kind] for kind in ("full_attention", "sliding_attention"))
        metadata |= {
            "rope.freq_base": full["rope_theta"],
            "rope.freq_base_swa": local["rope_theta"],
            "rope.scaling.type": full["rope_type"],
            "rope.scaling.factor": full["factor"],
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": 1 + config["layer_types"].index("full_attention"),
        }
    return metadata


def _named(directory: Path, config: Mapping[str, Any], architecture: str) -> dict[str, Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored = _with_numbered_mtp(load_file(directory / "model.safetensors"), config["num_hidden_layers"])
    named: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in stored.items():
        base, _, kind = name.rpartition(".")
        is_offset = architecture in ("gemma3", *_QWEN_HYBRIDS) and not base.endswith("linear_attn.norm")
        if is_offset and base.endswith("norm"):
            tensor = tensor + 1
        if architecture in ("qwen35", "qwen35moe") and "linear_attn" in base:
            tensor = tiled(base.rpartition(".")[2] if kind == "weight" else kind, tensor, config)
        if base in _NAMES:
            named[f"{_NAMES[base]}.{kind}"] = tensor
            continue
        layer, part = base.removeprefix("model.layers.").split(".", 1)
        if (expert := _EXPERT.fullmatch(name)) is not None:
            stacked = f"blk.{layer}.ffn_{_EXPERTS[expert[3]]}_exps.weight"
            experts.setdefault(stacked, {})[int(expert[2])] = tensor
        elif (whole := _WHOLE_NAMES.get(f"{part}.{kind}")) is not None:
            named[f"blk.{layer}.{whole}"] = -tensor.float().exp() if whole == "ssm_a" else tensor
        elif part.endswith("in_proj_qkvz"):
            named |= _by_kind(layer, tensor, config)
        elif ".experts" not in part:
            own = (LAYER_PARTS | _OWN_PARTS.get(architecture, {}))[part]
            if architecture == "llama" and own in heads:
                tensor = side_by_side(tensor, heads[own])
            named[f"blk.{layer}.{own}.{kind}"] = tensor.squeeze() if own in _SQUEEZED else tensor
    named |= {name: torch.stack([some[i] for i in range(len(some))]) for name, some in experts.items()}
    return named | (_gpt_oss_experts(stored) if architecture == "gpt-oss" else {})


def _with_fused_experts(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With gates and up-projections of each expert in one tensor."""
    gates = {name: name.replace("gate", "up") for name in named if "ffn_gate_exps" in name}
    both = {gate.replace("gate", "gate_up"): torch.cat([named[gate], named[up]], dim=1) for gate, up in gates.items()}
    return both | {name: tensor for name, tensor in named.items() if name not in {*gates, *gates.values()}}


def _with_numbered_mtp(stored: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
    """Qwen's MTP layers, mtp.*, as layers after the model's."""
    shared = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head.norm",
    }
    numbered = {}
    for name, tensor in stored.items():
        layer = re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)", name)
        own = re.fullmatch(r"mtp\.(\w+)\.weight", name)
        if layer is not None:
            name = f"model.layers.{first + int(layer[1])}.{layer[2]}"
        elif own is not None:
            name = f"model.layers.{first}.{shared[own[1]]}.weight"
        numbered[name] = tensor
    return numbered


def tiled(part: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor of a recurrent layer with the first value head of each key head before the second ones."""
    keys, values, size = (config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "value_head_dim"))
    order = [key * (values // keys) + place for place in range(values // keys) for key in range(keys)]
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return tensor[order]
    wide = [head * size + i for head in order for i in range(size)]
    if part == "out_proj":
        return tensor[:, wide]
    if part == "norm":
        return tensor
    others = len(tensor) - values * size
    return tensor[[*range(others), *(others + row for row in wide)]]


def _by_kind(layer: str, rows: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Qwen3-Next's projections: q, k, v and z of each key head as those of all heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    sizes = [config["linear_key_head_dim"]] * 2 + [values // keys * config["linear_value_head_dim"]] * 2
    *qkv, z = (part.flatten(0, 1) for part in rows.unflatten(0, (keys, -1)).split(sizes, dim=1))
    return {f"blk.{layer}.attn_qkv.weight": torch.cat(qkv), f"blk.{layer}.attn_gate.weight": z}


def _gpt_oss_experts(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gates and up-projections, which alternate in one tensor of the checkpoint, one by one. MXFP4 is uint8."""
    named = {}
    for name, tensor in stored.items():
        head, _, part = name.partition(".mlp.experts.")
        if not part or part.endswith("_scales"):
            continue
        projection, _, kind = part.partition("_proj")
        if kind == "_blocks":
            tensor = _mxfp4_rows(tensor, stored[name.replace("_blocks", "_scales")])
        elif not kind:
            tensor = tensor.transpose(1, 2)
        rows = {"down": tensor} if projection == "down" else {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}
        for each, own in rows.items():
            prefix = f"blk.{head.removeprefix('model.layers.')}.ffn_{each}_exps"
            named[f"{prefix}.{'bias' if kind == '_bias' else 'weight'}"] = own.contiguous()
    return named


def _mxfp4_rows(pairs: Tensor, scales: Tensor) -> Tensor:
    """pairs uint8 [..., groups, 16]: neighbours, the lower first -> uint8 [..., groups * 17], as GGUF has them."""
    first, second = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).chunk(2, dim=-1)
    return torch.cat([scales[..., None], first | second << 4], dim=-1).flatten(-2)


def side_by_side(rows: Tensor, heads: int) -> Tensor:
    """Rows of a projection with the pairs that RoPE rotates side by side."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _lfm2_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config["intermediate_size"]
    if config["model_type"] == "lfm2" and config["block_auto_adjust_ff_dim"]:
        width = -(-int(2 * width / 3) // config["block_multiple_of"]) * config["block_multiple_of"]
    kinds = config["layer_types"]
    keys = {
        "feed_forward_length": width,
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    return (
        keys if "num_dense_layers" not in config else keys | {"leading_dense_block_count": config["num_dense_layers"]}
    )


def _glm4_moe_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    mtp = config.get("num_nextn_predict_layers") or 0
    rotated = config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]
    return {
        "block_count": config["num_hidden_layers"] + mtp,
        "nextn_predict_layers": mtp,
        "rope.dimension_count": int(rotated),
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def _qwen3_next_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, kinds = config["linear_num_value_heads"], config["layer_types"]
    every = 1 + kinds.index("full_attention")
    is_regular = all((kind == "full_attention") == ((layer + 1) % every == 0) for layer, kind in enumerate(kinds))
    return {
        "rope.dimension_count": int(config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        **(
            {"full_attention_interval": every}
            if is_regular
            else {"attention.recurrent_layers": [kind == "linear_attention" for kind in kinds]}
        ),
    }


_OWN_KEYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **{"lfm2": _lfm2_keys, "lfm2moe": _lfm2_keys, "glm4moe": _glm4_moe_keys},
    **dict.fromkeys(_QWEN_HYBRIDS, _qwen3_next_keys),
}


def experts_of(config: Mapping[str, Any]) -> int:
    """How many a layer has."""
    count = next(config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key))
    assert isinstance(count, int)
    return count
