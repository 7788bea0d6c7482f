"""Tensors of a GGUF file under the names that Hugging Face checkpoints have.

Each is listed as its type, shape and place in the file, and read from there:

    F32, F16, BF16     as they are
    Q4_0               32 inputs: a float16 scale, 16 bytes of two codes, 16 inputs apart; weight (code - 8) * scale
    all other types    multiplied out by the package gguf

Llama's q_proj and k_proj are stored with the pairs of RoPE side by side, as llama.cpp rotates them: rows are put back.

Source: the format's specification (docs/gguf.md of ggml) and the package gguf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_server.models.config import CheckpointError
from eagle_server.ops.linear.quantize import QuantizedWeight

INDEX = "gguf.json"  # of a directory that stands for a GGUF file, see `directory`
_GROUP = 32  # inputs of a block of Q4_0
_Q4_ZERO = 8
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
INT4 = "Q4_0"  # what kernels compute as it is
UNUSED = ("rope_freqs.weight",)  # its numbers are in config.json


class Place(NamedTuple):
    """Where a tensor is: its name and type in the file, its shape, the first byte and how many there are.

    pairs: heads whose rows are stored with RoPE's pairs side by side; 0: none are.
    """

    key: str
    type: str
    shape: list[int]
    offset: int
    size: int
    pairs: int = 0


def places(found: Mapping[str, Place], pairs: Mapping[str, int], source: str) -> dict[str, Place]:
    """The tensors by our names. found: by theirs. pairs: the heads of parts whose rows are in llama.cpp's order.

    Raises:
        CheckpointError: a tensor that is not known.
    """
    named: dict[str, Place] = {}
    for key, place in found.items():
        block = _BLOCK.fullmatch(key)
        base, _, kind = key.rpartition(".")
        if key in UNUSED:
            continue
        if base in _NAMES:
            named[f"{_NAMES[base]}.{kind}"] = place
        elif block is not None and block[2] in _EXPERTS:
            for expert in range(place.shape[0]):
                size = place.size // place.shape[0]
                one = place._replace(shape=place.shape[1:], offset=place.offset + expert * size, size=size)
                named[f"model.layers.{block[1]}.mlp.experts.{expert}.{_EXPERTS[block[2]]}.{block[3]}"] = one
        elif block is not None and block[2] in _PARTS:
            named[f"model.layers.{block[1]}.{_PARTS[block[2]]}.{block[3]}"] = place._replace(
                pairs=pairs.get(block[2], 0)
            )
        else:
            raise CheckpointError(f"{source}: the tensor {key} is not known in this architecture")
    return named


def read_index(directory: Path) -> tuple[Path, dict[str, Place]]:
    """The GGUF file that a directory stands for, and the places of its tensors by our names."""
    index: dict[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    return Path(index["file"]), {name: Place(*values) for name, values in index["tensors"].items()}


def _bytes(file: Path, place: Place) -> np.ndarray[Any, Any]:
    return np.fromfile(file, dtype=np.uint8, count=place.size, offset=place.offset)


def read(file: Path, place: Place) -> Tensor:
    """The tensor; of a type that is multiplied out in float32."""
    raw = _bytes(file, place)
    if place.type in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[place.type]
        tensor = torch.from_numpy(raw).view(dtype).view(place.shape)
    else:
        from gguf import GGMLQuantizationType, dequantize  # not needed by other checkpoints

        kind = GGMLQuantizationType[place.type]
        tensor = torch.from_numpy(dequantize(raw.reshape(*place.shape[:-1], -1), kind).reshape(place.shape))
    return tensor if not place.pairs else tensor[_rows(place)]


def read_int4(file: Path, place: Place) -> QuantizedWeight:
    """Q4_0 as it is: groups of 32 inputs, all zeros 8."""
    rows, inputs = place.shape
    blocks = torch.from_numpy(_bytes(file, place)).view(rows, inputs // _GROUP, 2 + _GROUP // 2)
    if place.pairs:
        blocks = blocks[_rows(place)]
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
    pairs = blocks[..., 2:]
    codes = torch.cat([pairs & 15, pairs >> 4], dim=-1).view(rows, inputs)
    zeros = torch.full(scales.t().shape, _Q4_ZERO, dtype=torch.uint8)
    return QuantizedWeight("int4", codes, scales.t().contiguous(), zeros, _GROUP)


def _rows(place: Place) -> Tensor:
    """For each row of the weight its row in the file."""
    return torch.arange(place.shape[0]).view(place.pairs, -1, 2).transpose(1, 2).reshape(-1)
