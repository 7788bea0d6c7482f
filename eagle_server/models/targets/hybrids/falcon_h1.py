"""Falcon-H1: each layer attends and has Mamba-2, side by side over one input, and factors nearly everywhere.

    u = s + m_a attention(m_i norm(s)) + m_o mamba(norm(s)),   s <- u + mlp(norm(u))

Attention's keys have a factor, which is on its scores here. Mamba-2 has one on its input and one on each of z, x, B, C
and dt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.layers import Attention, DecoderLayer, GatedMLP, Views
from eagle_server.models.mamba2 import Mamba2, NormOrder, mamba2_shape
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.ops.layers.fused import Rotation

_DEFAULTS = {
    **{"rms_norm_eps": 1e-5, "mamba_n_heads": 128, "mamba_d_state": 256, "mamba_d_conv": 4},
    **{"mamba_d_ssm": 1024, "mamba_norm_before_gate": True},
}
_FACTORS = {
    "attention_in": "attention_in_multiplier",
    "attention_out": "attention_out_multiplier",
    "ssm_in": "ssm_in_multiplier",
    "ssm_out": "ssm_out_multiplier",
}


@dataclass(frozen=True)
class FalconH1Config:
    """What Falcon-H1 has beside Mamba-2: factors on inputs and outputs of attention and Mamba-2, and others.

    ssm: on z, x, B, C and dt. mlp: on the gate and on the output. norm: see `Mamba2`.
    """

    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]
    mlp: tuple[float, ...]
    norm: NormOrder | None


class ScaledMamba2(Mamba2):
    """Mamba-2 with a factor on its input, and on each part of its projections."""

    def __init__(self, config: ModelConfig, own: FalconH1Config, layer: int) -> None:
        super().__init__(config, layer, own.norm)
        shape, self.factor = self.shape, own.ssm_in
        keys = shape.key_heads * shape.key_dim
        sizes = [self.values, self.values, keys, keys, shape.value_heads]
        factors = [torch.full((size,), factor) for size, factor in zip(sizes, own.ssm, strict=True)]
        self.factors: Tensor
        self.register_buffer("factors", torch.cat(factors), persistent=False)

    def projected(self, x: Tensor) -> Tensor:
        """See `Mamba2`."""
        y: Tensor = super().projected(x * self.factor) * self.factors
        return y


class AttentionAndMamba2(nn.Module):
    """What stands in the place of attention."""

    name = ""  # in checkpoints both have names of their own

    def __init__(self, config: ModelConfig, own: FalconH1Config, layer: int) -> None:
        super().__init__()
        self.factors = own
        self.attention, self.mamba = Attention(config, layer, config.hidden_size), ScaledMamba2(config, own, layer)

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> Tensor:
        own = self.factors
        mixed: Tensor = self.mamba(x, rope, attention) * own.ssm_out
        attended: Tensor = self.attention(x * own.attention_in, rope, attention) * own.attention_out
        return mixed + attended

    def weight_views(self, prefix: str) -> Views:
        layer = prefix.removesuffix(".")
        yield from self.attention.weight_views(f"{layer}{self.attention.name}.")
        yield from self.mamba.weight_views(f"{layer}{self.mamba.name}.")


class ScaledMLP(GatedMLP):
    """down(silu(m_g gate(x)) * up(x)) * m_d."""

    def __init__(self, config: ModelConfig, own: FalconH1Config) -> None:
        super().__init__(config)
        self.gate_factor, self.down_factor = own.mlp

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        y: Tensor = self.down(F.silu(gate * self.gate_factor) * up) * self.down_factor
        return y

    def native_weights(self) -> None:
        """The native kernels have no factors."""


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    own = FalconH1Config(
        **{field: _factor(raw, key, source) for field, key in _FACTORS.items()},
        ssm=_factors(raw, "ssm_multipliers", 5, source),
        mlp=_factors(raw, "mlp_multipliers", 2, source),
        norm=("before gate" if raw.get("mamba_norm_before_gate") else "after gate")
        if raw.get("mamba_rms_norm")
        else None,
    )
    if bool(raw.get("projectors_bias")) != bool(raw.get("mamba_proj_bias")):
        raise CheckpointError(
            f"{source}: one of mamba_proj_bias and projectors_bias without the other is not supported"
        )
    width = raw.get("mamba_d_ssm")
    shape, bias = mamba2_shape(raw, source, None if width is None else int(width)), bool(raw.get("attention_bias"))
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        attention_scale=_factor(raw, "key_multiplier", source) / math.sqrt(config.head_dim),
        embed_scale=_factor(raw, "embedding_multiplier", source),
        logits_divisor=1 / _factor(raw, "lm_head_multiplier", source),
        states=tuple((*states, shape) for states in config.kept),
        recurrent_bias=bool(raw.get("mamba_proj_bias", False)),
        conv_bias=raw.get("mamba_conv_bias") is not False,
        own=own,
    )


def _factor(raw: Mapping[str, Any], key: str, source: str) -> float:
    value = raw.get(key)
    if value is not None and (not isinstance(value, int | float) or value == 0):
        raise CheckpointError(f"{source}: {key} must be a number, and not 0, found {value!r}")
    return 1.0 if value is None else float(value)


def _factors(raw: Mapping[str, Any], key: str, count: int, source: str) -> tuple[float, ...]:
    values = raw.get(key) or [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"{source}: {key}: {count} numbers are expected, found {values!r}")
    return tuple(float(value) for value in values)


def _layer(config: ModelConfig, layer: int) -> DecoderLayer:
    own = config.own
    assert isinstance(own, FalconH1Config)
    return DecoderLayer(config, AttentionAndMamba2(config, own, layer), ScaledMLP(config, own))


FALCON_H1 = TargetFamily(
    "FalconH1ForCausalLM",
    "falcon_h1",
    _add_flags,
    _layer,
    _DEFAULTS,
    renames={
        "model.final_layernorm.": "model.norm.",
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        ".feed_forward.": ".mlp.",
    },
)
