"""Writes a checkpoint directory as a GGUF file, as llama.cpp's converter names and orders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    "gpt_oss": "gpt-oss",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_OWN_PARTS = {
    "gemma3": {
        "pre_feedforward_layernorm": "ffn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}
_WHOLE_NAMES = {"self_attn.sinks": "attn_sinks.weight"}
_EXPERTS = ("gate_proj", "up_proj", "down_proj")


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
) -> Path:
    """kind: the type of matrices (MXFP4 stays), `kinds` of those whose names contain a key. values: of metadata, in the
    place of the usual ones. more: further tensors. tokenizer: tokens, types, merges, pre.
    tensors_of_part: of each file; 0: all are in one."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    metadata = _metadata(config, architecture)
    writer = GGUFWriter(file, architecture, split_max_tensors=tensors_of_part)
    for name, value in (metadata | dict(values or {})).items():
        key = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{name}"
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
    if tokenizer is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(tokenizer["pre"])
        writer.add_token_list(tokenizer["tokens"])
        writer.add_token_types(tokenizer["types"])
        writer.add_token_merges(tokenizer["merges"])
    ends = config.get("eos_token_id")
    if isinstance(ends, int):
        writer.add_eos_token_id(ends)
    for name, tensor in _named(directory, config, architecture).items():
        if tensor.dtype == torch.uint8:
            writer.add_tensor(name, tensor.numpy(), raw_dtype=GGMLQuantizationType.MXFP4)
            continue
        array = tensor.float().numpy()
        own = next((each for part, each in (kinds or {}).items() if part in name), kind)
        if array.ndim == 1 or own == "F32" or name.endswith(".bias"):
            writer.add_tensor(name, array)
        else:
            quantized = GGMLQuantizationType[own]
            blocks = k_quantized(array, own) if own in K_QUANTS else quants.quantize(array, quantized)
            writer.add_tensor(name, blocks, raw_dtype=quantized)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if file.is_file() else next(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))


def _metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    metadata: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if architecture == "qwen3moe":
        metadata |= {
            "expert_count": experts_of(config),
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if architecture == "gpt-oss":
        metadata |= {
            "expert_count": experts_of(config),
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["intermediate_size"],
            "attention.sliding_window": config["sliding_window"],
            "rope.scaling.type": rope["rope_type"],
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
    stored = load_file(directory / "model.safetensors")
    named: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        base, _, kind = name.rpartition(".")
        if architecture == "gemma3" and base.endswith("norm"):
            tensor = tensor + 1
        if base in _NAMES:
            named[f"{_NAMES[base]}.{kind}"] = tensor
            continue
        layer, part = base.removeprefix("model.layers.").split(".", 1)
        if ".experts" in part:
            continue
        if (whole := _WHOLE_NAMES.get(f"{part}.{kind}")) is not None:
            named[f"blk.{layer}.{whole}"] = tensor
            continue
        own = (_PARTS | _OWN_PARTS.get(architecture, {}))[part]
        if architecture == "llama" and own in heads:
            tensor = _side_by_side(tensor, heads[own])
        named[f"blk.{layer}.{own}.{kind}"] = tensor
    for layer in range(config["num_hidden_layers"] if architecture == "qwen3moe" else 0):
        for part in _EXPERTS:
            prefix = f"model.layers.{layer}.mlp.experts"
            experts: Sequence[Tensor] = [
                stored[f"{prefix}.{expert}.{part}.weight"] for expert in range(experts_of(config))
            ]
            named[f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight"] = torch.stack(list(experts))
    return named | (_gpt_oss_experts(stored) if architecture == "gpt-oss" else {})


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


def _side_by_side(rows: Tensor, heads: int) -> Tensor:
    """Rows of a projection with the pairs that RoPE rotates side by side."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def experts_of(config: Mapping[str, Any]) -> int:
    """How many a layer has."""
    count = config.get("num_experts") or config["num_local_experts"]
    assert isinstance(count, int)
    return count
