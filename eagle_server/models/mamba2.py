"""Mamba-2, the recurrent layer of Granite 4, Bamba, Nemotron-H and Falcon-H1.

    z, (x, B, C), dt = in_proj(u)
    y = state-space recurrence(silu(convolution(x, B, C)), dt)        see `ops.recurrent`, rule ssd
    out = out_proj(norm(y * silu(z)) * weight),  the norm by groups

Source: Transformers are SSMs (arXiv 2405.21060); transformers' `BambaMixer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import integer
from eagle_server.models.layers import Linear, Views
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.layers.fused import Rotation
from eagle_server.ops.native.decoder import RecurrentWeights
from eagle_server.ops.native.recurrent import NativeStates
from eagle_server.ops.recurrent.nodes import RecurrentLayer, RecurrentShape

NormOrder = Literal["after gate", "before gate"]


class Mamba2(nn.Module):
    """The attention of a recurrent layer. It has no positions: the rotation is not used. norm: None: there is none."""

    name = "mamba"  # in checkpoints

    def __init__(self, config: ModelConfig, layer: int, norm: NormOrder | None = "after gate") -> None:
        super().__init__()
        assert config.recurrent is not None, "a config with recurrent layers"
        shape, hidden = config.recurrent, config.hidden_size
        self.shape = shape
        self.values = shape.value_heads * shape.value_dim
        rows = self.values + shape.channels + shape.gates
        self.in_proj = Linear(hidden, [("in_proj", rows)], bias=config.recurrent_bias)
        self.conv = nn.Parameter(torch.empty(shape.channels, shape.kernel))
        self.conv_bias = nn.Parameter(torch.zeros(shape.channels)) if config.conv_bias else None
        self.a_log = nn.Parameter(torch.empty(shape.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads, dtype=torch.float32))
        self.skip = nn.Parameter(torch.empty(shape.value_heads, dtype=torch.float32))
        self.norm = None if norm is None else nn.Parameter(torch.ones(self.values))
        self.norm_first, self.eps = norm == "before gate", config.rms_norm_eps
        self.out = Linear(self.values, [("out_proj", hidden)], bias=config.recurrent_bias)
        self.index = config.recurrent_layers.index(layer)

    @property
    def spec(self) -> RecurrentLayer:
        """What `BoundAttention.recur` computes with."""
        return RecurrentLayer(self.index, self.shape, self.conv, self.a_log, self.dt_bias, self.conv_bias, self.skip)

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> Tensor:
        sizes = [self.values, self.shape.channels, self.shape.gates]
        z, inputs, steps = self.projected(x).split_with_sizes(sizes, dim=1)
        out = attention.recur(inputs, steps, self.spec).flatten(1)
        projected: Tensor = self.out(self._gated(out, z).to(x.dtype))
        return projected

    def projected(self, x: Tensor) -> Tensor:
        """z, x, B, C and dt, [rows, values + channels + heads]."""
        y: Tensor = self.in_proj(x)
        return y

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        gate = F.silu(z.to(out.dtype))
        if self.norm is None:
            return out * gate
        out = out if self.norm_first else out * gate
        groups = out.unflatten(1, (self.shape.key_heads, -1))
        normed = F.rms_norm(groups, groups.shape[2:], None, self.eps).flatten(1) * self.norm.to(out.dtype)
        return normed * gate if self.norm_first else normed

    def native_weights(self, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> RecurrentWeights | None:
        """See `Mixer`. The native kernels have a norm after the gate alone."""
        projections, out = self.in_proj.native, self.out.native
        if projections is None or out is None or self.norm is None or self.norm_first:
            return None
        return RecurrentWeights(projections, out, self.spec, norm=self.norm) if NativeStates.fits(self.shape) else None

    def weight_views(self, prefix: str) -> Views:
        yield from self.in_proj.weight_views(prefix)
        yield f"{prefix}conv1d.weight", self.conv.unsqueeze(1)
        if self.conv_bias is not None:
            yield f"{prefix}conv1d.bias", self.conv_bias
        yield f"{prefix}A_log", self.a_log
        yield f"{prefix}dt_bias", self.dt_bias
        yield f"{prefix}D", self.skip
        if self.norm is not None:
            yield f"{prefix}norm.weight", self.norm
        yield from self.out.weight_views(prefix)


def mamba2_shape(raw: Mapping[str, Any], source: str, width: int | None = None) -> RecurrentShape:
    """The sizes of Mamba-2 by the keys that Bamba, Granite 4 and Falcon-H1 have.

    width: of all heads; None: by mamba_expand.

    Raises:
        CheckpointError: a key is absent, or heads that do not fit together.
    """
    heads, groups = integer(raw, "mamba_n_heads", source), integer(raw, "mamba_n_groups", source, default=1)
    width = width or integer(raw, "mamba_expand", source, default=2) * integer(raw, "hidden_size", source)
    given = raw.get("mamba_d_head")
    dim = width // heads if given in (None, "auto") else integer(raw, "mamba_d_head", source)
    if heads % groups or dim * heads != width:
        raise CheckpointError(
            f"{source}: mamba_n_heads {heads}, mamba_d_head {dim}, mamba_n_groups {groups} do not fit width {width}"
        )
    return RecurrentShape(
        key_heads=groups,
        value_heads=heads,
        key_dim=integer(raw, "mamba_d_state", source),
        value_dim=dim,
        kernel=integer(raw, "mamba_d_conv", source),
        rule="ssd",
        steps=step_limits(raw, source),
    )


def step_limits(raw: Mapping[str, Any], source: str) -> tuple[float, float]:
    """`time_step_limit`, by default none.

    Raises:
        CheckpointError: no two numbers.
    """
    given = raw.get("time_step_limit")
    limits: Sequence[Any] = (0.0, math.inf) if given is None else given
    try:
        least, largest = (_limit(each) for each in limits)
    except (TypeError, ValueError):
        raise CheckpointError(f"{source}: time_step_limit: two numbers are expected, found {given!r}") from None
    return least, largest


def _limit(value: Any) -> float:
    return float(value["__float__"]) if isinstance(value, Mapping) else float(value)  # how transformers writes infinity


def with_mamba2(config: ModelConfig, raw: Mapping[str, Any], layers: tuple[int, ...], source: str) -> ModelConfig:
    """`config` with Mamba-2 in these layers, by the keys that Bamba and Granite 4 have."""
    biases = (bool(raw.get("mamba_proj_bias", False)), raw.get("mamba_conv_bias") is not False)
    config = replace(config, recurrent_bias=biases[0], conv_bias=biases[1])
    return config.with_states(layers, mamba2_shape(raw, source))
