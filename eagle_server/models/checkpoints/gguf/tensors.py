"""Tensors of a GGUF file under the names that Hugging Face checkpoints have.

Each is listed as its type, shape and place in the file, and read from there:

    F32, F16, BF16       as they are
    Q8_0, Q4_K and so on blocks of integers, see `ops.linear.blocks`
    MXFP4                blocks of 32 floats: a scale, then 16 bytes with the first half in their lower four bits
    all other types      multiplied out by the package gguf

Llama's q_proj and k_proj are stored with the pairs of RoPE side by side, as llama.cpp rotates them: rows are put back.
Qwen3-Next's b and a are stored in one tensor, of one key head after the other, and -exp(A_log) in the place of A_log.
Qwen3.5's value heads are stored tiled, the first one of each key head, then the second ones: rows are put back. Columns
are, too, but for blocks, which may hold several heads: these say which inputs they multiply.

Source: the format's specification (docs/gguf.md of ggml) and the package gguf.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_server.ops.linear.blocks import CHUNK, FORMATS, BlockRows, BlockWeight
from eagle_server.ops.linear.quantize import QuantizedWeight

logger = logging.getLogger(__name__)

INDEX = "gguf.json"  # of a directory that stands for a GGUF file, see `directory`
INT4 = "Q4_0"  # what other kernels compute too
MXFP4 = "MXFP4"
_MXFP4_BYTES = 17  # of a block
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # F16 is computed in bfloat16
_DTYPES = {**_FLOATS, "I32": torch.int32, "I64": torch.int64}


class Place(NamedTuple):
    """Where a tensor is: its name and type in the file, its shape, the first byte and how many there are.

    part: the number of its file, from 0.
    more: what the file adds to each number. Gemma's norms multiply by 1 + weight, and the file has the sum.
    order: how its rows are stored. "": as they are. "pairs": in each head RoPE's pairs are side by side. "first",
        "second": this half of the rows of each head. "tiled": the last rows are those of value heads, the first one of
        each key head, then the second ones. "tiled columns": so are all columns.
    split: the stored order as sizes: [heads, pairs, 2], [heads, 2, rows], [value heads of a key head, key heads, rows].
    holds: "-exp": the file has -exp(number). "ids": it has number + row.
    """

    key: str
    type: str
    shape: list[int]
    offset: int
    size: int
    part: int = 0
    more: float = 0.0
    order: Literal["", "pairs", "first", "second", "tiled", "tiled columns"] = ""
    split: Sequence[int] = ()
    holds: Literal["", "-exp", "ids"] = ""


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
    matrices = [place for name, place in found.items() if len(place.shape) > 1 and "embed_tokens" not in name]
    types, whole = {place.type for place in matrices}, {place.type for place in matrices if has_blocks(place)}
    in_blocks = whole & ({*FORMATS} if native else {INT4})
    in_floats = whole & ({MXFP4} if native else set())
    halved = {place.type for place in matrices if place.order == "tiled columns" and not has_blocks(place)}
    others = sorted((types - in_blocks - in_floats | halved) - {*_FLOATS})
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
    whole_inputs = place.order != "tiled columns" or (place.type != MXFP4 and place.split[-1] % CHUNK == 0)
    return place.type in (*FORMATS, MXFP4) and len(place.shape) == 2 and whole_inputs  # noqa: PLR2004


def read(file: Path, place: Place) -> Tensor:
    """The tensor, on the host; of a type that is multiplied out in float32."""
    if has_blocks(place):
        return read_blocks(file, place).dense()
    raw, shape = _bytes(file, place), [_stored_rows(place), *place.shape[1:]]
    if place.type in _DTYPES:
        tensor = torch.from_numpy(raw).view(_DTYPES[place.type]).view(shape)
    else:
        from gguf import GGMLQuantizationType, dequantize  # not needed by other checkpoints

        kind = GGMLQuantizationType[place.type]
        tensor = torch.from_numpy(dequantize(raw.reshape(*shape[:-1], -1), kind).reshape(shape))
    tensor = tensor - place.more if place.more else tensor
    if place.holds == "ids":
        return tensor.long() - torch.arange(len(tensor), device=tensor.device)
    tensor = (-tensor).log() if place.holds == "-exp" else tensor
    if not place.order:
        return tensor
    return tensor[:, _stored(place)] if place.order == "tiled columns" else tensor[_stored(place)]


def read_blocks(file: Path, place: Place) -> BlockWeight | QuantizedWeight:
    """A matrix that `has_blocks`, as it is."""
    raw = torch.from_numpy(_bytes(file, place)).view(_stored_rows(place), -1)
    if place.order == "tiled columns":
        return BlockWeight((BlockRows(place.type, raw),), _stored(place)[::CHUNK].argsort())
    rows = raw if not place.order else raw[_stored(place)]
    if place.type != MXFP4:
        return BlockWeight((BlockRows(place.type, rows),))
    blocks = rows.unflatten(1, (-1, _MXFP4_BYTES))
    codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], dim=2)
    return QuantizedWeight.mxfp4(codes.flatten(1), blocks[..., 0])


def _stored_rows(place: Place) -> int:
    return place.shape[0] * (2 if place.order in ("first", "second") else 1)


def _stored(place: Place) -> Tensor:
    """For each row of the weight its row in the file; of "tiled columns" for each column its column."""
    if place.order == "tiled columns":
        return _untiled(torch.arange(place.shape[1], device="cpu"), place.split)
    rows = torch.arange(_stored_rows(place), device="cpu")
    if place.order == "pairs":
        return rows.view(*place.split).transpose(1, 2).flatten()
    if place.order == "tiled":
        others = len(rows) - math.prod(place.split)
        return torch.cat([rows[:others], _untiled(rows[others:], place.split)])
    return rows.view(*place.split)[:, int(place.order == "second")].flatten()


def _untiled(numbers: Tensor, split: Sequence[int]) -> Tensor:
    return numbers.view(*split).transpose(0, 1).flatten()
