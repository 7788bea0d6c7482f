"""Layers shared by targets and draft heads, for inference and for training under autograd.

A fused parameter holds several tensors of a checkpoint. `weight_views` lists every checkpoint name with its view of a
parameter. Loading, the check for missing tensors and export all use this list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.config import ModelConfig
from eagle_server.models.ranks import summed
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.fused import Rotation, add_rms_norm, rms_norm, silu_mul
from eagle_server.ops.linear import PackedWeight, pack_weight, packed_linear, unpack_weight, why_not_computed
from eagle_server.ops.native_decoder import AttentionShape, LayerWeights, NativeDecoder
from eagle_server.ops.native_linear import NativeWeight
from eagle_server.ops.quantize import Quantization, QuantizedWeight
from eagle_server.ops.rope_kv import HeadNorms

Views = Iterator[tuple[str, Tensor]]


class Linear(nn.Module):
    """y = x W^T + b. `parts` lists the checkpoint tensors that are stacked along the rows: (name, number of rows)."""

    def __init__(self, in_features: int, parts: Sequence[tuple[str, int]], *, bias: bool = False) -> None:
        super().__init__()
        rows = sum(count for _, count in parts)
        self.parts = tuple(parts)
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self._packed: PackedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)  # native kernels may give float32

    def pack(
        self, quantization: Quantization | None = None, codes: QuantizedWeight | NativeWeight | None = None
    ) -> None:
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
    def native(self) -> tuple[NativeWeight, Tensor | None] | None:
        """Weight and bias for the native kernels; None: they do not compute this layer."""
        packed = None if self._packed is None else self._packed.native
        return None if packed is None else (packed, self.bias)

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
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). Both arguments may be overwritten (see `ops.fused`)."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention. `in_features`: the hidden size, or twice that in an EAGLE-3 head's first layer."""

    def __init__(self, config: ModelConfig, layer: int, in_features: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        kv_rows = self.kv_heads * self.head_dim
        parts = [("q_proj", self.heads * self.head_dim), ("k_proj", kv_rows), ("v_proj", kv_rows)]
        self.qkv = Linear(in_features, parts, bias=config.qkv_bias)
        self.o = Linear(self.heads * self.head_dim, [("o_proj", config.hidden_size)], bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.ranks = config.split.ranks if config.split is not None and config.split.attention else None
        window = config.windows[layer] if config.windows else 0
        self.spec = LayerSpec(layer, self.head_dim**-0.5, window)

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> Tensor:
        rows = x.shape[0]
        qkv = self.qkv(x).view(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        mixed = attention.rotate_and_attend(qkv, self.heads, rope, self._head_norms(), self.spec)
        return summed(self.ranks, self.o(mixed.reshape(rows, -1)))

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def weight_views(self, prefix: str) -> Views:
        yield from self.qkv.weight_views(prefix)
        yield from self.o.weight_views(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}q_norm.weight", self.q_norm.weight
            yield f"{prefix}k_norm.weight", self.k_norm.weight


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, [("gate_proj", width), ("up_proj", width)], bias=config.mlp_bias)
        self.down = Linear(width, [("down_proj", config.hidden_size)], bias=config.mlp_bias)
        self.ranks = config.split.ranks if config.split is not None and config.split.mlp else None

    def forward(self, x: Tensor) -> Tensor:
        return summed(self.ranks, self.down(silu_mul(self.gate_up(x))))

    def weight_views(self, prefix: str) -> Views:
        yield from self.gate_up.weight_views(prefix)
        yield from self.down.weight_views(prefix)


class DecoderLayer(nn.Module):
    """A pre-norm layer on the residual stream s: u = s + attention(norm(s)), then u + mlp(norm(u)).

    The stream is passed as two summands, so that one kernel does the addition and the norm after it.
    """

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: Rotation, attention: BoundAttention
    ) -> tuple[Tensor, Tensor]:
        """Two summands of the stream [rows, H] (None: zero) -> two summands of the next. May overwrite both."""
        normed, residual = (self.input_norm(x), x) if residual is None else self.input_norm.after_add(x, residual)
        normed, residual = self.post_norm.after_add(self.attention(normed, rope, attention), residual)
        return self.mlp(normed), residual

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight
        yield f"{prefix}post_attention_layernorm.weight", self.post_norm.weight
        yield from self.attention.weight_views(f"{prefix}self_attn.")  # type: ignore[operator]
        yield from self.mlp.weight_views(f"{prefix}mlp.")  # type: ignore[operator]


def linear_views(model: nn.Module, views: Mapping[str, Tensor]) -> dict[Linear, dict[str, Tensor]]:
    """Each linear layer's views of its weight by name, in order."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    owners = {linear.weight.untyped_storage().data_ptr(): linear for linear in linears}
    found: dict[Linear, dict[str, Tensor]] = {}
    for name, view in views.items():
        linear = owners.get(view.untyped_storage().data_ptr())
        part = name.removesuffix(".weight").rpartition(".")[2]  # not the embedding, which may share its memory
        if linear is not None and part in dict(linear.parts):
            found.setdefault(linear, {})[name] = view
    return found


def pack_linears(
    model: nn.Module,
    quantization: Quantization | None = None,
    rounded: Mapping[Linear, Callable[[], QuantizedWeight | None]] | None = None,
    *,
    progress: bool = False,
) -> None:
    """Pack every Linear in `model` that is not packed yet. Call it once, after the weights are loaded and cast.

    `rounded` gives the weights that the checkpoint holds in integers; None: the layer holds floats. The
    target's lm_head is rounded to 8 bits at most, because texts depend on it most.

    Raises:
        ValueError: `quantization` is asked for where no kernels compute with it.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear) and not module.is_packed]
    description = "pack" if quantization is None else f"round to {quantization}"
    for linear in tqdm(linears, desc=description, unit="layer", disable=None if progress else True):
        codes = rounded[linear]() if rounded is not None and linear in rounded else None
        wanted = quantization
        if quantization is not None and linear.parts[0][0] == "lm_head":
            wanted = None if why_not_computed("int8", linear.weight.device, linear.weight.dtype) else "int8"
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


def native_decoder(layers: Iterable[nn.Module], norm: RMSNorm | None, rope: RotaryEmbedding) -> NativeDecoder | None:
    """One native call for all of these packed layers and the norm after them; None: they are not of that kind.

    A first layer that is no `DecoderLayer` gets its input normed, and the residual stream with it.
    """
    weights = [_native_layer(layer) for layer in layers]
    known = [each for each in weights if each is not None]
    if len(known) < len(weights):
        return None
    return NativeDecoder(known, None if norm is None else norm.weight, rope.cos, rope.sin)


def _native_layer(layer: Any) -> LayerWeights | None:
    attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
    if type(attention) is not Attention or type(mlp) is not GatedMLP or not AttentionShape.fits(attention.head_dim):
        return None
    if attention.ranks is not None or mlp.ranks is not None:
        return None
    linears = [each.native for each in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    known = [each for each in linears if each is not None]
    if len(known) < len(linears):
        return None
    spec, q_norm, k_norm = attention.spec, attention.q_norm, attention.k_norm
    sizes = (attention.heads, attention.kv_heads, attention.head_dim)
    return LayerWeights(
        known,
        input_norm=layer.input_norm.weight if isinstance(layer, DecoderLayer) else None,
        post_norm=layer.post_norm.weight,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        eps=layer.post_norm.eps,
        attention=AttentionShape(*sizes, spec.scale, spec.softcap, spec.sliding_window),
    )
