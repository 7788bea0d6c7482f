"""Tensors of a GGUF file under the names that Hugging Face checkpoints have.

Each is listed as its type, shape and place in the file, and read from there:

    F32, F16, BF16       as they are
    Q8_0, Q4_K and so on blocks of integers, see `ops.linear.blocks`
    MXFP4                blocks of 32 floats: a scale, then 16 bytes with the first half in their lower four bits
    all other types      multiplied out by the package gguf

Llama's q_proj and k_proj are stored with the pairs of RoPE side by side, as llama.cpp rotates them: rows are put back.

Source: the format's specification (docs/gguf.md of ggml) and the package gguf.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_server.models.checkpoints.gguf.architectures import GgufArchitecture
from eagle_server.models.config import CheckpointError
from eagle_server.ops.linear.blocks import FORMATS, BlockRows, BlockWeight
from eagle_server.ops.linear.quantize import QuantizedWeight

logger = logging.getLogger(__name__)

INDEX = "gguf.json"  # of a directory that stands for a GGUF file, see `directory`
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
_BLOCK = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")
INT4 = "Q4_0"  # what other kernels compute too
MXFP4 = "MXFP4"
_MXFP4_BYTES = 17  # of a block
_FLOATS = ("F32", "F16", "BF16")  # computed as they are, but for the rounding of F16 to bfloat16
UNUSED = ("rope_freqs.weight",)  # its numbers are in config.json


class Place(NamedTuple):
    """Where a tensor is: its name and type in the file, its shape, the first byte and how many there are.

    pairs: heads whose rows are stored with RoPE's pairs side by side; 0: none are.
    part: the number of its file, from 0.
    more: what the file adds to each number. Gemma's norms multiply by 1 + weight, and the file has the sum.
    """

    key: str
    type: str
    shape: list[int]
    offset: int
    size: int
    pairs: int = 0
    part: int = 0
    more: float = 0.0


def places(
    found: Mapping[str, Place], row: GgufArchitecture, pairs: Mapping[str, int], source: str
) -> dict[str, Place]:
    """The tensors by our names. found: by theirs. pairs: the heads of parts whose rows are in llama.cpp's order.

    Raises:
        CheckpointError: a tensor that is not known.
    """
    named: dict[str, Place] = {}
    parts = {**_PARTS, **row.parts}
    for key, stored in found.items():
        block = _BLOCK.fullmatch(key)
        base, _, suffix = key.rpartition(".")
        place = stored._replace(more=row.norm_offset if base.endswith("norm") else 0.0)
        layer, part = ("", "") if block is None else (f"model.layers.{block[1]}", block[2])
        if key in UNUSED:
            continue
        if base in _NAMES:
            named[f"{_NAMES[base]}.{suffix}"] = place
        elif part in _EXPERTS:
            for expert in range(place.shape[0]):
                size = place.size // place.shape[0]
                one = place._replace(shape=place.shape[1:], offset=place.offset + expert * size, size=size)
                named[f"{layer}.mlp.experts.{expert}.{_EXPERTS[part]}.{suffix}"] = one
        elif (whole := f"{part}.{suffix}") in parts:
            named[f"{layer}.{parts[whole]}"] = place
        elif part in parts:
            named[f"{layer}.{parts[part]}.{suffix}"] = place._replace(pairs=pairs.get(part, 0))
        else:
            raise CheckpointError(f"{source}: the tensor {key} is not known in this architecture")
    return named


def read_index(directory: Path) -> tuple[list[Path], dict[str, Place]]:
    """The parts of the GGUF file that a directory stands for, and the places of its tensors by our names."""
    index: dict[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    return [Path(file) for file in index["files"]], {name: Place(*values) for name, values in index["tensors"].items()}


def _bytes(file: Path, place: Place) -> np.ndarray[Any, Any]:
    return np.fromfile(file, dtype=np.uint8, count=place.size, offset=place.offset)


def say_types(directory: Path, *, native: bool) -> None:
    """Say how matrices are computed, by type. native: by kernels for a CPU, which multiply blocks as they are."""
    if not (directory / INDEX).is_file():
        return
    (file, *_), found = read_index(directory)
    types = {place.type for name, place in found.items() if len(place.shape) > 1 and "embed_tokens" not in name}
    in_blocks = types & ({*FORMATS} if native else {INT4})
    in_floats = types & ({MXFP4} if native else set())
    others = sorted(types - in_blocks - in_floats - {*_FLOATS})
    for kinds, inputs in ((in_blocks, ", on inputs rounded to 8 bits" if native else ""), (in_floats, "")):
        if kinds:
            logger.info("%s: weights in %s are computed as they are%s", file, ", ".join(sorted(kinds)), inputs)
    if others:
        logger.warning(
            "%s: weights in %s are multiplied out to 16 bits, as no kernel computes them as they are; --quantization "
            "int8 or int4 rounds them again, to less memory",
            *(file, ", ".join(others)),
        )


def has_blocks(place: Place) -> bool:
    """Whether it is a matrix in blocks that native kernels multiply."""
    return place.type in (*FORMATS, MXFP4) and len(place.shape) == 2  # noqa: PLR2004


def read(file: Path, place: Place) -> Tensor:
    """The tensor; of a type that is multiplied out in float32."""
    if has_blocks(place):
        return read_blocks(file, place).dense()
    raw = _bytes(file, place)
    if place.type in _FLOATS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[place.type]
        tensor = torch.from_numpy(raw).view(dtype).view(place.shape)
    else:
        from gguf import GGMLQuantizationType, dequantize  # not needed by other checkpoints

        kind = GGMLQuantizationType[place.type]
        tensor = torch.from_numpy(dequantize(raw.reshape(*place.shape[:-1], -1), kind).reshape(place.shape))
    tensor = tensor - place.more if place.more else tensor
    return tensor if not place.pairs else tensor[_rows(place)]


def read_blocks(file: Path, place: Place) -> BlockWeight | QuantizedWeight:
    """A matrix that `has_blocks`, as it is."""
    rows = torch.from_numpy(_bytes(file, place)).view(place.shape[0], -1)
    rows = rows if not place.pairs else rows[_rows(place)]
    if place.type != MXFP4:
        return BlockWeight((BlockRows(place.type, rows),))
    blocks = rows.unflatten(1, (-1, _MXFP4_BYTES))
    codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], dim=2)
    return QuantizedWeight.mxfp4(codes.flatten(1), blocks[..., 0])


def _rows(place: Place) -> Tensor:
    """For each row of the weight its row in the file."""
    return torch.arange(place.shape[0]).view(place.pairs, -1, 2).transpose(1, 2).reshape(-1)
