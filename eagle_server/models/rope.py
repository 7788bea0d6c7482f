"""Rotary position embeddings: one cos/sin table per model, for the served context length.

The frequencies follow transformers' `modeling_rope_utils`. The base of `dynamic` is computed once, for the served
context length. If it grew with a sequence, the keys in the KV pool and in the prefix cache would become invalid. So up
to max_position_embeddings all texts are transformers'; a longer context has transformers' base for its last token.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from eagle_server.models.config import RopeConfig
from eagle_server.ops.layers.fused import AngleRows, AngleTable, Rotation, can_use_table


class RotaryEmbedding(nn.Module):
    """cos and sin, float32 [context, rotary_dim]. The first half of the sine is negated: a rotation is a roll."""

    def __init__(self, config: RopeConfig, head_dim: int, context: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        frequencies, scale = inverse_frequencies(config, head_dim, context)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)  # [context, rotary_dim / 2]
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.cat([cos, cos], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], dim=-1), persistent=False)
        self._table: Tensor | None = None

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation for rows at `positions` [T] and activations of `dtype`."""
        if can_use_table(positions.device, dtype, self.head_dim, self.cos.shape[1]):
            return AngleTable(positions, self._kernel_table())
        return self.angles(positions, dtype)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> AngleRows:
        """The rotation for rows at `positions` [T] as tensors."""
        return AngleRows(self.cos[positions].unsqueeze(1).to(dtype), self.sin[positions].unsqueeze(1).to(dtype))

    def _kernel_table(self) -> Tensor:
        """The table of `AngleTable`, float32 [context, rotary_dim], made at its first use."""
        if self._table is None:
            half = self.cos.shape[1] // 2
            self._table = torch.cat([self.cos[:, :half], self.sin[:, half:]], dim=1).float()
        return self._table


def inverse_frequencies(config: RopeConfig, head_dim: int, context: int) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [rotary_dim / 2], the factor on cos and sin)."""
    dim = config.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / at_context(config, head_dim, context).theta ** exponents
    if config.kind in ("none", "linear"):
        return torch.zeros_like(plain) if config.kind == "none" else plain / config.factor, 1.0
    if config.kind == "proportional":  # the angles of the other pairs are 0
        rotated = torch.arange(dim // 2) < int(config.partial_rotary_factor * dim // 2)
        return torch.where(rotated, plain / config.factor, 0.0), 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "longrope":
        return plain / torch.tensor(config.short_factor), config.attention_factor or 1.0
    if config.kind == "yarn":
        return _yarn(config, plain, dim), _yarn_scale(config)
    return plain, 1.0


def at_context(config: RopeConfig, head_dim: int, context: int) -> RopeConfig:
    """`config` resolved for a served context length: `dynamic` becomes `default` with the base for that length."""
    if config.kind != "dynamic":
        return config
    dim = config.rotary_dim(head_dim)
    ratio = config.factor * context / config.original_max_position - (config.factor - 1)
    stretch = ratio ** (dim / (dim - 2)) if context > config.original_max_position else 1.0
    return replace(config, kind="default", theta=config.theta * stretch)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Short wavelengths are kept, long ones are multiplied by `factor`, those between are blended (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    low = config.original_max_position / config.low_freq_factor
    high = config.original_max_position / config.high_freq_factor
    blend = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    mixed = (1 - blend) * plain / config.factor + blend * plain
    stretched = torch.where(wavelength > low, plain / config.factor, mixed)
    return torch.where(wavelength < high, plain, stretched)


def _yarn(config: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """Low frequencies are interpolated, high frequencies are kept (YaRN, arXiv 2309.00071, eq. 18-21)."""

    def dimension(rotations: float) -> float:
        length = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)


def _yarn_scale(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return float(config.attention_factor)
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
