"""Attention by slots, and whole forwards of a decoder, by the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.ops.native import available, check_inside, empty, floats, functions, pointer, session
from eagle_server.ops.native_linear import NativeWeight
from eagle_server.ops.native_structs import BatchStruct, CacheStruct, DecoderStruct, LayerStruct

_LARGEST_HEAD = 512
_ROWS_DTYPES = [torch.int64, torch.int32, torch.int64, torch.int64, torch.int32, torch.bool, torch.int64, torch.int64]


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a layer: heads, kv_heads, head_dim, and scale, softcap and window as in `LayerSpec`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int

    @staticmethod
    def fits(head_dim: int) -> bool:
        """Even, because rotations are of pairs."""
        return head_dim % 2 == 0 and head_dim <= _LARGEST_HEAD

    def struct(self, keys: Tensor, values: Tensor) -> CacheStruct:
        return CacheStruct(
            pointer(keys),
            pointer(values),
            int(keys.dtype == torch.bfloat16),
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.scale,
            self.softcap,
            self.window,
            len(keys),
        )


def attends(keys: Tensor, values: Tensor) -> bool:
    """Whether the native kernels attend to a layer's cache, keys and values [slots, kv_heads, head_dim]."""
    fits = keys.is_contiguous() and values.is_contiguous() and values.shape == keys.shape
    return fits and AttentionShape.fits(keys.shape[2]) and available(keys.device, keys.dtype)


class NativeRows:
    """The rows of one forward, as the native kernels read them: their caches, and which slots each row sees."""

    def __init__(
        self,
        caches: Sequence[tuple[Tensor, Tensor]],
        out_cache_loc: Tensor,
        qo_indptr: Tensor,
        requests: tuple[Tensor, Tensor, Tensor],
        mask: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Their tensors.

        Args:
            caches: keys and values of each layer, [slots, kv_heads, head_dim].
            out_cache_loc: int64 [rows], the slots of the rows.
            qo_indptr: int32 [bs + 1].
            requests: req_pool_indices and kv_lens, int64 [bs], and req_to_token, int32.
            mask: visible, row_depths and column_depths of a `TreeMask`; None: causal.
        """
        given = [each.contiguous() for each in (out_cache_loc, qo_indptr, *requests, *(mask or ()))]
        assert [each.dtype for each in given] == _ROWS_DTYPES[: len(given)]
        self.caches, self._tensors = caches, given  # keeps them alive
        pointers = [pointer(each) for each in given] + [None] * (len(_ROWS_DTYPES) - len(given))
        sizes = mask[0].shape[1:] if mask is not None else (0, 0)
        self.struct = BatchStruct(len(out_cache_loc), len(qo_indptr) - 1, None, *pointers, *sizes, requests[2].shape[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, shape: AttentionShape) -> Tensor:
        """Write k and v [rows, kv_heads, head_dim] to the cache of a layer, then attend: [rows, heads, head_dim]."""
        out, full = empty(*q.shape), [floats(x) for x in (q, k, v)]
        cache = shape.struct(*self.caches[layer])
        functions().eagle_attention(
            *(session(), byref(self.struct), byref(cache)),
            *(pointer(x) for x in full),
            pointer(out),
        )
        return out.to(q.dtype)


@dataclass(frozen=True)
class LayerWeights:
    """One layer: weights and biases, and norm weights, as in `models.layers.DecoderLayer`. None: there is none."""

    linears: Sequence[tuple[NativeWeight, Tensor | None]]  # qkv, o, gate_up, down
    input_norm: Tensor | None
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    attention: AttentionShape


class NativeDecoder:
    """The layers of a decoder and its last norm, computed by one call. Sums and the residual stream are float32."""

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor | None, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: float32 [context, head_dim], the first half of the sine negated. All norms have the same `eps`."""
        self.layers, self.hidden = tuple(layers), len(layers[0].post_norm)
        self._kept: list[Tensor] = []
        self._norm = None if norm is None else self._keep(norm)
        self._cos, self._sin, self._eps = self._keep(cos), self._keep(sin), layers[0].eps
        self._context = len(cos)
        self._structs = (LayerStruct * len(layers))(*(self._layer(layer) for layer in layers))
        self._caches: Sequence[tuple[Tensor, Tensor]] = ()

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        rows: NativeRows,
        aux_boundaries: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(norm of the last residual stream, that stream, the streams at `aux_boundaries` side by side or None).

        All are float32. Without a last norm the first is not computed.

        Args:
            x: the first stream [rows, hidden]; or if the first layer has no input norm its normed input, and `residual`
                is the stream.
            positions: int64 [rows].
            rows: with the caches of all layers.
        """
        full, count = floats(x), len(x)
        stream = full.clone() if residual is None else residual.float().clone()
        hidden, places = torch.empty_like(stream), positions.contiguous()
        aux = empty(count, len(aux_boundaries) * self.hidden) if aux_boundaries else None
        decoder = self.struct(rows.caches, aux_boundaries)
        rows.struct.positions = pointer(places)
        outside = functions().eagle_decode(
            *(session(), byref(decoder), byref(rows.struct)),
            *(pointer(full), pointer(stream), pointer(hidden), None if aux is None else pointer(aux)),
        )
        check_inside(outside=bool(outside))
        return hidden, stream, aux

    def struct(self, caches: Sequence[tuple[Tensor, Tensor]], aux_boundaries: Sequence[int] = ()) -> DecoderStruct:
        """The layers over these caches, until the next call."""
        if self._caches is not caches:
            self._caches = caches
            for struct, layer, pair in zip(self._structs, self.layers, caches, strict=True):
                struct.cache = layer.attention.struct(*pair)
        self._boundaries = (c_int32 * len(aux_boundaries))(*aux_boundaries)
        return DecoderStruct(
            *(self._structs, self._norm, self._cos, self._sin, ctypes.cast(self._boundaries, c_void_p)),
            *(len(self.layers), self.hidden, len(aux_boundaries), self._context, self._eps),
        )

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        linears = (weight.struct(None if bias is None else self._kept_floats(bias)) for weight, bias in layer.linears)
        norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
        return LayerStruct(*linears, *(None if norm is None else self._keep(norm) for norm in norms), CacheStruct())

    def _keep(self, tensor: Tensor) -> c_void_p:
        return pointer(self._kept_floats(tensor))

    def _kept_floats(self, tensor: Tensor) -> Tensor:
        self._kept.append(floats(tensor.detach()))
        return self._kept[-1]
