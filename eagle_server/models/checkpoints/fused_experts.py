"""Experts that are stored together, as one weight and bias per expert and projection: gpt-oss's, Gemma 4's, Granite's.

    experts.gate_up_proj         [E, H, 2F], columns gate, up, gate, up, ...; its _bias [E, 2F]
    experts.down_proj            [E, F, H]; its _bias [E, H]
    experts.gate_up_proj_blocks  MXFP4: uint8 [E, 2F, H / 32, 16], rows in that order; two numbers a byte, the low first
    experts.gate_up_proj_scales  uint8 [E, 2F, H / 32]: 32 numbers share the factor 2^(scale - 127); down_proj alike

    experts.gate_proj.weight     [E, F, H], up_proj alike, down_proj [E, H, F]: Step's, by `TargetFamily.renames`

Others stand beside the MLP: layers.N.experts.gate_up_proj [E, 2F, H], gates and then ups, down_proj [E, H, F].

Sources: transformers' gpt_oss and its mxfp4 integration; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eagle_server.models.checkpoints.rank_slices import slice_of
from eagle_server.models.checkpoints.weights import QuantizedTensor, StoredTensor, Weights, split_experts
from eagle_server.models.config import CheckpointError
from eagle_server.ops.linear.quantize import MXFP4_GROUP, QuantizedWeight

_FUSED = re.compile(r"(.*\.mlp\.)experts\.(gate_up_proj|down_proj)(|_bias|_blocks)")
_ROUTER = re.compile(r"(.*\.mlp\.)router\.(weight|bias)")
_BESIDE = re.compile(r".*layers\.\d+\.experts\.(?:gate_up_proj|down_proj)")
_STACKED = re.compile(r"(.*\.experts)\.((?:gate|up|down)_proj\.weight)")
_BIAS = "experts.gate_up_proj_bias"


def single_experts(stored: Weights) -> Weights:
    """The tensors with these families' experts one by one, and gpt-oss's routers under the usual names.

    Other families store experts together, too, in another order. gpt-oss's have biases.

    Raises:
        CheckpointError: a fused tensor has the wrong number of dimensions, or MXFP4 blocks have no fitting scales.
    """
    prefixes = {name.removesuffix(_BIAS) for name in stored if name.endswith(_BIAS)}  # of gpt-oss's layers
    weights: Weights = {}
    for name, tensor in stored.items():
        prefix = f"{name.rpartition('.mlp.')[0]}.mlp."
        if _BESIDE.fullmatch(name) is not None:
            weights |= split_experts(name, tensor, "out, in", None)
        elif (stacked := _STACKED.fullmatch(name)) is not None:
            weights |= _unstacked(stacked[1], stacked[2], tensor)
        elif prefix not in prefixes:
            weights[name] = tensor
        elif (router := _ROUTER.fullmatch(name)) is not None:
            weights[f"{router[1]}gate.{router[2]}"] = tensor
        elif (fused := _FUSED.fullmatch(name)) is not None:
            scales = stored.get(f"{name.removesuffix('_blocks')}_scales")
            weights |= _split(f"{fused[1]}experts.", fused[2], _Fused(fused[3], tensor, scales))
        elif not (name.endswith("_scales") and _FUSED.fullmatch(name.removesuffix("_scales"))):
            weights[name] = tensor
    return weights


def _unstacked(prefix: str, part: str, tensor: StoredTensor) -> Weights:
    if len(tensor.shape) != 3:  # noqa: PLR2004
        raise CheckpointError(f"{tensor.file}: {tensor.key}: three dimensions are expected, found {list(tensor.shape)}")
    return {
        f"{prefix}.{expert}.{part}": StoredTensor(
            *(tensor.file, f"{tensor.key}[{expert}]", tensor.shape[1:]),
            partial(lambda expert: tensor.read_part((slice(expert, expert + 1),))[0], expert),
        )
        for expert in range(tensor.shape[0])
    }


def separate_gates(stored: Weights) -> Weights:
    """The tensors with an MLP's gate and up one by one, where a family has them in one weight (Granite's)."""
    weights: Weights = {}
    for name, tensor in stored.items():
        prefix = name.removesuffix("gate_up_proj.weight")
        if prefix == name:
            weights[name] = tensor
        else:
            for number, part in enumerate(("gate_proj", "up_proj")):
                weights[f"{prefix}{part}.weight"] = slice_of(tensor, 0, number, 2)
    return weights


@dataclass(frozen=True)
class _Fused:
    """One projection of all experts: its weights ("" or "_blocks" with their scales) or its biases ("_bias")."""

    kind: str
    tensor: StoredTensor
    scales: StoredTensor | None

    def __post_init__(self) -> None:
        where, shape = f"{self.tensor.file}: {self.tensor.key}", self.tensor.shape
        if len(shape) != {"": 3, "_bias": 2, "_blocks": 4}[self.kind]:
            raise CheckpointError(f"{where}: experts' tensors of this kind have other dimensions than {list(shape)}")
        given = None if self.scales is None else self.scales.shape
        if self.kind == "_blocks" and (given != shape[:3] or shape[3] != MXFP4_GROUP // 2):
            raise CheckpointError(
                f"{where}: MXFP4 needs blocks of 16 bytes with a scale each, found blocks {list(shape)} and scales "
                f"{None if given is None else list(given)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one expert: [rows, inputs], or [rows]."""
        shape = self.tensor.shape
        if self.kind == "_bias":
            return shape[1:]
        return (shape[2], shape[1]) if not self.kind else (shape[1], shape[2] * MXFP4_GROUP)

    def of_expert(self, index: int) -> Tensor | QuantizedWeight:
        """The weight or bias of one expert, all of its rows."""
        where = (slice(index, index + 1),)
        part = self.tensor.read_part(where)[0]
        if self.scales is not None:
            return mxfp4_weight(part, self.scales.read_part(where)[0])
        return part if self.kind else part.t()


def _split(prefix: str, projection: str, fused: _Fused) -> Iterator[tuple[str, StoredTensor]]:
    """Names and tensors of single experts."""
    suffix, (rows, *inputs) = "bias" if fused.kind == "_bias" else "weight", fused.shape
    parts = {"down_proj": slice(None)}
    if projection == "gate_up_proj":
        parts, rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}, rows // 2
    shape, where = (rows, *inputs), (fused.tensor.file, fused.tensor.key)
    for index in range(fused.tensor.shape[0]):
        for part, chosen in parts.items():
            load = partial(_rows, fused, index, chosen)
            read = partial(_dense, load)
            expert = StoredTensor(*where, shape, read)
            if fused.kind == "_blocks":
                expert = QuantizedTensor(*where, shape, read, load=load)
            yield f"{prefix}{index}.{part}.{suffix}", expert


def _rows(fused: _Fused, index: int, chosen: slice) -> Tensor | QuantizedWeight:
    weight = fused.of_expert(index)
    return weight.rows(chosen) if isinstance(weight, QuantizedWeight) else weight[chosen]


def _dense(load: Callable[[], Tensor | QuantizedWeight]) -> Tensor:
    weight = load()
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """blocks uint8 [out, groups, 16], scales uint8 [out, groups] -> a weight [out, groups * 32] of the same numbers."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    return QuantizedWeight.mxfp4(codes, scales)
