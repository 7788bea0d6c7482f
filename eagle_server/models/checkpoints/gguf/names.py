"""The tensors of a GGUF file under the names that Hugging Face checkpoints have.

One tensor may hold several of theirs: all experts of a layer, or Qwen3-Next's b and a.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from eagle_server.models.checkpoints.gguf.architectures import GgufArchitecture
from eagle_server.models.checkpoints.gguf.tensors import Place
from eagle_server.models.config import CheckpointError

UNUSED = ("rope_freqs.weight",)  # its numbers are in config.json
_NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_NAMES |= {"output_norm": "model.norm", "token_embd_norm": "model.norm"}  # the second: LFM2's
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_BLOCK = re.compile(r"blk\.(\d+)\.(([\w.]+?)(?:\.(weight|bias))?)")
_NEGATIVE = "ssm_a"
_PAIRED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_SINGLE = {"shortconv.conv": 1, "ssm_conv1d": 1, "ffn_gate_inp_shexp": 0}  # where checkpoints have a dimension of one
_HALVES = {"ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")}  # of the rows of each key head
_OF_VALUES = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out")  # a value head has value_head_dim rows or columns
_OF_VALUE_HEADS = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")  # a value head has one row
_IDS = "d2t"  # of a draft's tokens, target ids
_HEAD_NORM = "nextn.shared_head_norm"


def places(
    found: Mapping[str, Place], row: GgufArchitecture, config: Mapping[str, Any], source: str
) -> dict[str, Place]:
    """The tensors by our names. found: by theirs. config: the model's config.json.

    Raises:
        CheckpointError: a tensor that is not known.
    """
    named: dict[str, Place] = {}
    for key, place in found.items():
        block, (base, _, suffix) = _BLOCK.fullmatch(key), key.rpartition(".")
        place = place._replace(more=_offset(base, row))
        if key in UNUSED:
            continue
        if key == _IDS and row.is_head:
            named[_IDS] = place._replace(holds="ids")
            continue
        if base in (top := {**_NAMES, **row.top}):
            named[f"{top[base]}.{suffix}"] = place
            continue
        own = {} if block is None else dict(_of_layer(block, place, row, config))
        if not own:
            raise CheckpointError(f"{source}: the tensor {key} is not known in this architecture")
        named |= {f"model.layers.{key.split('.')[1]}.{name}": each for name, each in own.items()}
    for layer in (key.split(".")[1] for key in found if key.endswith(".nextn.eh_proj.weight")):
        if f"blk.{layer}.{_HEAD_NORM}.weight" not in found:  # llama.cpp takes the model's
            named[f"model.layers.{layer}.shared_head.norm.weight"] = named["model.norm.weight"]
    return named


def _offset(base: str, row: GgufArchitecture) -> float:
    return row.norm_offset if base.endswith("norm") and not base.endswith("ssm_norm") else 0.0


def _of_layer(
    block: re.Match[str], place: Place, row: GgufArchitecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, Place]]:
    """Names in a layer and places of what a tensor of this layer holds; nothing: it is not known."""
    (_, whole, part, suffix), parts = block.groups(), {**_PARTS, **row.parts}
    place = _tiled(place, part, config) if row.tiles_values else place
    if part in _EXPERTS:
        names = _EXPERTS[part]
        count, rows = place.shape[0] * len(names), place.shape[1] // len(names)
        size = place.size // count
        for number in range(count):
            expert, name = number // len(names), names[number % len(names)]
            one = place._replace(shape=[rows, *place.shape[2:]], offset=place.offset + number * size, size=size)
            yield f"mlp.experts.{expert}.{name}.{suffix}", one
    elif part in _HALVES and "linear_num_key_heads" in config:
        shape, heads = [place.shape[0] // 2, *place.shape[1:]], config["linear_num_key_heads"]
        first, second = _HALVES[part]
        split = (heads, 2, -1)
        yield f"{first}.{suffix}", place._replace(shape=shape, order="first", split=split)
        yield f"{second}.{suffix}", place._replace(shape=shape, order="second", split=split)
    elif part in _PAIRED and row.has_pairs:
        yield f"{parts[part]}.{suffix}", place._replace(order="pairs", split=(config[_PAIRED[part]], -1, 2))
    elif part in _SINGLE and part in parts and suffix == "weight":
        shape = [size for size in place.shape if size != 1]
        shape.insert(_SINGLE[part], 1)
        yield f"{parts[part]}.{suffix}", place._replace(shape=shape)
    elif whole in parts:
        yield parts[whole], place._replace(holds="-exp" if whole == _NEGATIVE else "")
    elif part in parts and suffix is not None:
        yield f"{parts[part]}.{suffix}", place


def _tiled(place: Place, part: str, config: Mapping[str, Any]) -> Place:
    """With the order of value heads, if there is more than one for a key head."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if part not in (*_OF_VALUES, *_OF_VALUE_HEADS) or values == keys:
        return place
    each = config["linear_value_head_dim"] if part in _OF_VALUES else 1
    return place._replace(order="tiled columns" if part == "ssm_out" else "tiled", split=(values // keys, keys, each))
