"""Layers shared by targets and draft heads, for inference and for training under autograd.

A fused parameter holds several tensors of a checkpoint. `weight_views` lists every checkpoint name with its view of a
parameter. Loading, the check for missing tensors and export all use this list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.config import ModelConfig
from eagle_server.models.ranks import summed
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.layers.fused import GATES, Rotation, add_rms_norm, apply_rope, gain_of, limited_silu_mul, rms_norm
from eagle_server.ops.layers.rope_kv import HeadNorms
from eagle_server.ops.linear.packed import (
    Codes,
    PackedWeight,
    dense_linear,
    pack_weight,
    packed_linear,
    unpack_weight,
    why_not_computed,
)
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.decoder import AttentionShape, AttentionWeights, FeedForwardWeights
from eagle_server.ops.native.library import floats
from eagle_server.ops.native.linear import Biased, NativeWeight, native_linear

Views = Iterator[tuple[str, Tensor]]
_EIGHT_BITS: tuple[Quantization, ...] = ("int8", "fp8")  # on CPUs, on GPUs


class Linear(nn.Module):
    """y = x W^T + b. `parts` lists the checkpoint tensors that are stacked along the rows: (name, number of rows)."""

    def __init__(self, in_features: int, parts: Sequence[tuple[str, int]], *, bias: bool = False) -> None:
        super().__init__()
        rows = sum(count for _, count in parts)
        self.parts = tuple(parts)
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self._packed: PackedWeight | None = None
        self._rest: NativeWeight | None = None  # part of the packed weight, see `outputs_from`

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x, None)

    def write(self, x: Tensor, out: Tensor | None) -> Tensor:
        """y, written to `out` [rows, out], in `output_dtype`, if there is one."""
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias, out)
        return dense_linear(x.to(self.weight.dtype), self.weight, self.bias, out)  # native kernels may give float32

    @property
    def output_dtype(self) -> torch.dtype:
        """A dtype that holds y exactly. Native kernels may give float32, all others give the weight's dtype."""
        return self.weight.dtype if self.native is None else torch.float32

    def outputs_from(self, x: Tensor, first: int) -> Tensor:
        """The outputs from number `first` on, [rows, out - first], without the others where that is possible."""
        bias, packed = None if self.bias is None else self.bias[first:], self._packed
        if packed is None:
            return F.linear(x.to(self.weight.dtype), self.weight[first:], bias)
        if packed.native is None or first % 16:
            return packed_linear(x, packed, self.bias)[:, first:]
        if self._rest is None:
            self._rest = packed.native.rows_from(first)
        return native_linear(x, self._rest, bias)

    def pack(self, quantization: Quantization | None = None, codes: Codes | None = None) -> None:
        """Repack the weight for the fastest kernel of this machine, rounded if asked. Call it once, after loading.

        `codes`: the weight, already rounded; `self.weight` is not read then.

        The plain layout of a large weight is dropped; `dense_weight` restores it.
        """
        self._packed = pack_weight(self.weight.detach(), quantization, codes)
        if self._packed.plain is None:
            self.weight = nn.Parameter(self.weight.new_empty(0, self.weight.shape[1]), requires_grad=False)

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def native(self) -> Biased | None:
        """Weight and bias for the native kernels; None: they do not compute this layer."""
        packed = None if self._packed is None else self._packed.native
        return None if packed is None else (packed, self.bias)

    def with_rows(self, rows: Tensor) -> Linear:
        """A layer with these outputs alone, int64 [n], with the name of the first part. It is not packed."""
        weight = self.dense_weight().detach()
        chosen = Linear(weight.shape[1], [(self.parts[0][0], len(rows))], bias=self.bias is not None)
        chosen.weight = nn.Parameter(weight[rows.to(weight.device)], requires_grad=False)
        if self.bias is not None:
            chosen.bias = nn.Parameter(self.bias.detach()[rows.to(weight.device)], requires_grad=False)
        return chosen

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes."""
        return self.weight.nbytes if self._packed is None else self._packed.nbytes

    def dense_weight(self) -> Tensor:
        """The weight [out, in] in the plain layout, whether it is packed or not."""
        return self.weight if self._packed is None else unpack_weight(self._packed)

    def weight_views(self, prefix: str) -> Views:
        start, weight = 0, self.dense_weight()
        for name, rows in self.parts:
            yield f"{prefix}{name}.weight", weight[start : start + rows]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + rows]
            start += rows


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight), computed in float32. offset: 1 in families whose weights are stored less 1."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    @property
    def gain(self) -> Tensor:
        """offset + weight [size], as the native kernels take it."""
        return gain_of(self.weight, self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). Both arguments may be overwritten (see `ops.layers.fused`)."""
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)


def norm_of(config: ModelConfig, size: int) -> RMSNorm:
    """A norm over `size` numbers, as the decoder's family has it."""
    return RMSNorm(size, config.rms_norm_eps, config.norm_offset)


class Attention(nn.Module):
    """Grouped-query self-attention. `in_features`: the hidden size, or twice that in an EAGLE-3 head's first layer.

    With a gate q_proj has twice as many rows: those of a head's query, then those of its gate. With a gate per head
    g_proj has a row for each.

    keys_are_values: values are the keys before norm and rotation. value_norm: values are divided by their rms.
    """

    name = "self_attn"  # in checkpoints

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        in_features: int,
        *,
        keys_are_values: bool = False,
        value_norm: bool = False,
    ) -> None:
        super().__init__()
        writes = config.writes_kv(layer)
        self.heads, (self.kv_heads, self.head_dim) = config.heads_of(layer), config.kv_shape(layer)
        self.gated, self.value_eps = config.attention_gate, config.rms_norm_eps if value_norm else None
        written = () if not writes else ("k_proj",) if keys_are_values else ("k_proj", "v_proj")
        q_rows = self.heads * self.head_dim * (2 if self.gated else 1)
        parts = [("q_proj", q_rows), *((name, self.kv_heads * self.head_dim) for name in written)]
        self.qkv = Linear(in_features, parts, bias=config.qkv_bias)
        self.gate = Linear(in_features, [("g_proj", self.heads)]) if config.head_gate else None
        self.o = Linear(self.heads * self.head_dim, [("o_proj", config.hidden_size)], bias=config.o_bias)
        self.q_norm = norm_of(config, self.head_dim) if config.qk_norm else None
        self.k_norm = norm_of(config, self.head_dim) if config.qk_norm and writes else None
        self.ranks = config.split.ranks if config.split is not None and config.split.attention else None
        window = config.windows[layer] if config.windows else 0
        scale = config.attention_scale or self.head_dim**-0.5
        has_sinks = config.sinks == "all" or (config.sinks == "windowed" and window > 0)
        self.sinks = nn.Parameter(torch.zeros(self.heads, dtype=torch.float32)) if has_sinks else None
        own_heads = self.heads if config.layer_heads else 0
        self.spec = LayerSpec(config.pool_layer(layer), scale, window, sinks=self.sinks, writes=writes, heads=own_heads)

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> Tensor:
        rows = x.shape[0]
        gate = None if self.gate is None else self.gate(x).unsqueeze(2)  # [rows, heads, 1]
        qkv = self.qkv(x).unflatten(1, (-1, self.head_dim))
        if self.gated:
            q, kv = qkv.split_with_sizes([2 * self.heads, 2 * self.kv_heads], dim=1)
            q, gate = q.unflatten(1, (self.heads, 2)).unbind(2)
            qkv = torch.cat([q, kv], dim=1)
        if self.spec.writes:
            qkv = qkv if self.value_eps is None else self._with_values(qkv, self.value_eps)
            mixed = attention.rotate_and_attend(qkv, self.heads, rope, self._head_norms(), self.spec)
        else:
            q = qkv if self.q_norm is None else self.q_norm(qkv)
            mixed = attention.attend(apply_rope(q, rope), self.spec)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return summed(self.ranks, self.o(mixed.reshape(rows, -1)))

    def _with_values(self, qkv: Tensor, eps: float) -> Tensor:
        """Queries, keys and normed values. The last heads are the values, or keys that are values."""
        values = F.rms_norm(qkv[:, -self.kv_heads :], (self.head_dim,), None, eps)
        return torch.cat([qkv[:, : self.heads + self.kv_heads], values], dim=1)

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)

    def native_weights(self, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> AttentionWeights | None:
        """See `Mixer`."""
        qkv, o, spec = self.qkv.native, self.o.native, self.spec
        gate = None if self.gate is None else self.gate.native
        if self.gate is not None and gate is None:
            return None
        if self.ranks is not None or qkv is None or o is None or not AttentionShape.fits(self.head_dim):
            return None
        sizes = (self.heads, self.kv_heads, self.head_dim)
        sinks = None if spec.sinks is None else floats(spec.sinks.detach())
        angles = local_rope if spec.sliding_window else rope
        return AttentionWeights(
            *(qkv, o),
            q_norm=None if self.q_norm is None else self.q_norm.gain,
            k_norm=None if self.k_norm is None else self.k_norm.gain,
            v_norm=None if self.value_eps is None else torch.ones(self.head_dim),
            gated=self.gated,
            kv_layer=spec.index,
            cos=angles.cos,
            sin=angles.sin,
            shape=AttentionShape(*sizes, spec.scale, spec.softcap, spec.sliding_window, sinks),
            head_gate=gate,
        )

    def weight_views(self, prefix: str) -> Views:
        yield from self.qkv.weight_views(prefix)
        if self.gate is not None:
            yield from self.gate.weight_views(prefix)
        yield from self.o.weight_views(prefix)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                yield f"{prefix}{name}.weight", norm.weight
        if self.sinks is not None:
            yield f"{prefix}sinks", self.sinks


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). limit: see `SwiGLULimits`."""

    def __init__(self, config: ModelConfig, limit: float = 0.0) -> None:
        super().__init__()
        self.limit = limit
        width = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, [("gate_proj", width), ("up_proj", width)], bias=config.mlp_bias)
        self.down = Linear(width, [("down_proj", config.hidden_size)], bias=config.mlp_bias)
        self.ranks = config.split.ranks if config.split is not None and config.split.mlp else None
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        mixed = limited_silu_mul(both, self.limit) if self.limit else GATES[self.activation](both)
        return summed(self.ranks, self.down(mixed))

    def native_weights(self) -> FeedForwardWeights | None:
        """See `FeedForward`."""
        gate_up, down = self.gate_up.native, self.down.native
        if self.ranks is not None or gate_up is None or down is None:
            return None
        return FeedForwardWeights(gate_up, down, activation=self.activation, limit=self.limit)

    def weight_views(self, prefix: str) -> Views:
        yield from self.gate_up.weight_views(prefix)
        yield from self.down.weight_views(prefix)


class DecoderLayer(nn.Module):
    """A pre-norm layer on the residual stream s: u = s + attention(norm(s)), then u + mlp(norm(u)).

    With `output_norms` (Gemma 3) what attention and MLP give is normed too, before it is added; with `residual_scale`
    (MiniCPM3) it is multiplied. An MLP that `reads_stream` (Gemma 4's experts) gets the stream after attention, too.
    The stream is passed as two summands, so that one kernel does the addition and the norm after it. `tail`: see
    `models.layer_inputs`.
    """

    def __init__(
        self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, tail: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.input_norm = norm_of(config, config.hidden_size)
        self.attention = attention
        self.attention_norm = norm_of(config, config.hidden_size) if config.output_norms else None
        self.post_norm = norm_of(config, config.hidden_size)
        self.mlp = mlp
        self.mlp_norm = norm_of(config, config.hidden_size) if config.output_norms else None
        self.tail, self.residual_scale = tail, config.residual_scale
        self.mlp_reads_stream = bool(getattr(mlp, "reads_stream", False))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: Rotation,
        attention: BoundAttention,
        layer_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Two summands of the stream [rows, H] (None: zero) -> two summands of the next. May overwrite both."""
        normed, residual = (self.input_norm(x), x) if residual is None else self.input_norm.after_add(x, residual)
        attended = self.attention(normed, rope, attention)
        if self.attention_norm is not None:
            attended = self.attention_norm(attended)
        if self.residual_scale != 1:
            attended = attended * self.residual_scale
        normed, residual = self.post_norm.after_add(attended, residual)
        x = self.mlp(normed, residual) if self.mlp_reads_stream else self.mlp(normed)
        x = x if self.mlp_norm is None else self.mlp_norm(x)
        x = x if self.residual_scale == 1 else x * self.residual_scale
        return (x, residual) if self.tail is None else (self.tail(x + residual, layer_input), None)

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight
        if self.attention_norm is not None and self.mlp_norm is not None:
            yield f"{prefix}post_attention_layernorm.weight", self.attention_norm.weight
            yield f"{prefix}pre_feedforward_layernorm.weight", self.post_norm.weight
            yield f"{prefix}post_feedforward_layernorm.weight", self.mlp_norm.weight
        else:
            yield f"{prefix}post_attention_layernorm.weight", self.post_norm.weight
        yield from self.attention.weight_views(f"{prefix}{self.attention.name}.")  # type: ignore[operator]
        yield from self.mlp.weight_views(f"{prefix}mlp.")  # type: ignore[operator]
        if self.tail is not None:
            yield from self.tail.weight_views(prefix)  # type: ignore[operator]


def linear_views(model: nn.Module, views: Mapping[str, Tensor]) -> dict[Linear, dict[str, Tensor]]:
    """Each linear layer's views of its weight by name, in order."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    owners = {linear.weight.untyped_storage().data_ptr(): linear for linear in linears}
    last_parts = {linear: {_last_part(name) for name, _ in linear.parts} for linear in linears}
    found: dict[Linear, dict[str, Tensor]] = {}
    for name, view in views.items():
        linear = owners.get(view.untyped_storage().data_ptr())  # of the embedding, too, which may share its memory
        if linear is not None and _last_part(name.removesuffix(".weight")) in last_parts[linear]:
            found.setdefault(linear, {})[name] = view
    return found


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def pack_linears(
    model: nn.Module,
    quantization: Quantization | None = None,
    rounded: Mapping[Linear, Callable[[], Codes | None]] | None = None,
    *,
    progress: bool = False,
) -> None:
    """Pack every Linear in `model` that is not packed yet. Call it once, after the weights are loaded and cast.

    `rounded` gives the weights that the checkpoint holds in integers or fp8; None: the layer holds floats. An lm_head
    keeps 8 bits, int8 or fp8, because texts depend on it most.

    Raises:
        ValueError: `quantization` is asked for where no kernels compute with it.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear) and not module.is_packed]
    description = "pack" if quantization is None else f"round to {quantization}"
    for linear in tqdm(linears, desc=description, unit="layer", disable=None if progress else True):
        codes = rounded[linear]() if rounded is not None and linear in rounded else None
        wanted = quantization
        if quantization is not None and linear.parts[0][0] == "lm_head":
            place = linear.weight.device, linear.weight.dtype
            wanted = next((kind for kind in _EIGHT_BITS if why_not_computed(kind, *place) is None), None)
        linear.pack(wanted, codes)
    for module in model.modules():
        if isinstance(module, Fusable):
            module.fuse()


@runtime_checkable
class Fusable(Protocol):
    """A model whose layers may be computed by one native call."""

    def fuse(self) -> None:
        """Prepare that call. The linear layers are packed."""
        ...
