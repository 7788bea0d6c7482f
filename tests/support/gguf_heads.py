"""Writes an EAGLE-3 head or a block drafter as a GGUF file, as llama.cpp's converter names and orders it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from tests.support.gguf_files import LAYER_PARTS, add_tensor, side_by_side, write_metadata

_TOP = {
    **{"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd"},
    **{"hidden_norm": "enc.output_norm", "input_norm": "enc.output_norm"},
    **{"markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2"},
    "confidence_head.proj": "conf_proj",
}
_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.+)")


def write_head(
    source: Path,
    file: Path,
    kind: str = "F32",
    *,
    values: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
    more: str = "",
) -> Path:
    """kind: the type of matrices, `kinds` of those whose names contain a key. values: of metadata, in the place of the
    usual ones. more: the name of a further tensor."""
    config = json.loads((source / "config.json").read_text())
    eagle = config["architectures"][0].endswith("Eagle3")
    architecture = "eagle3" if eagle else "dflash"
    tensors = load_file(source / "model.safetensors")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = GGUFWriter(file, architecture)
    write_metadata(writer, architecture, _metadata(config, tensors, eagle=eagle) | dict(values or {}))
    for name, tensor in tensors.items():
        base, _, suffix = name.rpartition(".")
        layer = _LAYER.fullmatch(base)
        if name == "d2t":
            writer.add_tensor("d2t", (tensor + torch.arange(len(tensor))).numpy())
        elif layer is not None:
            part = "attn_norm_2" if layer[2] == "hidden_norm" else LAYER_PARTS[layer[2]]
            tensor = side_by_side(tensor, heads[part]) if eagle and part in heads else tensor
            add_tensor(writer, f"blk.{layer[1] or 0}.{part}.{suffix}", tensor, kind)
        elif name != "t2d":
            own = next((each for key, each in (kinds or {}).items() if key in name), kind)
            add_tensor(writer, f"{_TOP[base]}.{suffix}", tensor, own)
    if more:
        add_tensor(writer, more, torch.ones(32), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _metadata(config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, eagle: bool) -> dict[str, Any]:
    """Streams are numbered by the layers that read them; config.json numbers those that write them."""
    outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or config["target_layer_ids"]
    layers = {match[1] for name in tensors if (match := _LAYER.match(name))}
    common = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": len(layers),
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "target_layers": [layer + 1 for layer in outputs],
    }
    if eagle:
        flags = {key: config[key] for key in ("norm_before_residual", "norm_before_fc") if key in config}
        return common | flags | {"target_hidden_size": config["hidden_size"]}
    mask = {"tokenizer.ggml.mask_token_id": config["mask_token_id"]}
    causal = {"attention.causal": config["is_causal"]} if "is_causal" in config else {}
    return common | mask | causal | {"block_size": config["block_size"]}
