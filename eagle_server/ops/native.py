"""The compiled CPU kernels of kernels/cpu: linear layers, attention by slots, and whole forwards of a decoder.

Each row is computed in an order that does not depend on the other rows, so a row has the same result, bit for bit, in
every batch, and a node of a tree the same as its token in plain decoding.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.build import BuildError, library
from eagle_server.ops.native_structs import BatchStruct, CacheStruct, DecoderStruct, LayerStruct, PackedStruct
from eagle_server.ops.quantize import QuantizedWeight

_FLOAT32, _HALVED, _BFLOAT16, _INT8, _INT4 = range(5)  # Kind in linear.h
_GROUP = 64  # outputs that are packed together
_LANES = 16
_LARGEST_HEAD = 512

logger = logging.getLogger(__name__)


_enabled, _threads = True, 0  # 0: as many threads as torch


def use_native(wanted: Literal["auto", "native", "torch"]) -> None:
    """Choose who computes models that are loaded from now on. "auto": the kernels, or torch where there is no compiler.

    Raises:
        BuildError: "native" is wanted, and the kernels cannot be compiled.
    """
    global _enabled  # noqa: PLW0603  one process serves one model
    _enabled = wanted != "torch"
    if wanted == "native":
        library()


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether native kernels compute on this device in this dtype."""
    return _enabled and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and _compiles()


@cache
def _compiles() -> bool:
    try:
        library()
    except BuildError as error:
        logger.warning("torch computes on the CPU, because the native kernels are not available: %s", error)
        return False
    return True


@cache
def _functions() -> Any:
    functions = library()
    functions.eagle_session_new.restype = c_void_p
    functions.eagle_packed_bytes.restype = c_int64
    for name in ("eagle_pack", "eagle_unpack", "eagle_linear", "eagle_attention"):
        getattr(functions, name).restype = None
    return functions


@cache
def _session_of(threads: int) -> c_void_p:
    return c_void_p(_functions().eagle_session_new(threads))


def set_threads(threads: int, *, fused: bool) -> None:
    """Compute with so many threads from now on.

    `fused`: native calls do nearly all of the work. Then torch gets one thread, because its threads spin after each
    operation, on the cores that the kernels' threads want.
    """
    global _threads  # noqa: PLW0603  one process computes one model
    _threads = threads
    torch.set_num_threads(1 if fused else threads)


def threads() -> int:
    """How many threads compute."""
    return _threads or torch.get_num_threads()


def _session() -> c_void_p:
    """Threads and scratch memory. All forwards share it."""
    return _session_of(threads())


class NativeWeight:
    """A weight [out, in] packed for the native kernels. A tied embedding is a copy of its own.

    float32 weights that bfloat16 holds exactly, as those of most checkpoints, take half the memory.
    """

    def __init__(self, weight: Tensor | QuantizedWeight) -> None:
        self.scales = self.zeros = None
        self._group = 0
        if isinstance(weight, QuantizedWeight):
            self.dtype, source = torch.float32, weight.codes.contiguous()
            self.scales, self.zeros, self._group = _padded(weight.scales), _padded(weight.zeros), weight.group
            self._kind = _INT8 if weight.quantization == "int8" else _INT4
        else:
            self.dtype, source = weight.dtype, weight.detach().contiguous()
            self._kind = _BFLOAT16 if weight.dtype == torch.bfloat16 else _FLOAT32
            halves = source.bfloat16()
            if self._kind == _FLOAT32 and torch.equal(source, halves.float()):
                self._kind, source = _HALVED, halves
        self.outputs, self.inputs = source.shape
        shape = self._struct(None, None)
        self.data = torch.empty(_functions().eagle_packed_bytes(byref(shape)), dtype=torch.uint8, device="cpu")
        _functions().eagle_pack(_session(), byref(shape), _pointer(source), _pointer(self.data))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.data, self.scales, self.zeros) if each is not None)

    def struct(self, bias: Tensor | None) -> PackedStruct:
        """`bias` float32 [out] must outlive the result, as this object must."""
        return self._struct(self.data, bias)

    def dense(self) -> Tensor:
        """The weight [out, in] that is computed with, bit for bit."""
        halves = torch.bfloat16 if self._kind in (_HALVED, _BFLOAT16) else torch.float32
        stored = halves if self.scales is None else torch.uint8
        out = torch.empty(self.outputs, self.inputs, dtype=stored, device="cpu")
        _functions().eagle_unpack(_session(), byref(self.struct(None)), _pointer(out))
        if self.scales is None or self.zeros is None:
            return out.to(self.dtype)
        scales, zeros = self.scales[:, : self.outputs], self.zeros[:, : self.outputs]
        return QuantizedWeight("int8" if self._kind == _INT8 else "int4", out, scales, zeros, self._group).dense()

    def _struct(self, data: Tensor | None, bias: Tensor | None) -> PackedStruct:
        pointers = (None if each is None else _pointer(each) for each in (data, bias, self.scales, self.zeros))
        return PackedStruct(*pointers, self._kind, self.inputs, self.outputs, self._group)


def _padded(values: Tensor) -> Tensor:
    """[groups, out], padded to whole groups of outputs."""
    return F.pad(values, (0, -values.shape[1] % _GROUP)).contiguous()


def native_linear(x: Tensor, weight: NativeWeight, bias: Tensor | None) -> Tensor:
    """x [rows, in] @ weight^T + bias -> [rows, out], in the dtype of x. The sums are float32."""
    full, added = _floats(x), None if bias is None else _floats(bias)
    out = _empty(len(full), weight.outputs)
    packed = weight.struct(added)
    _functions().eagle_linear(_session(), byref(packed), _pointer(full), len(full), _pointer(out))
    return out.to(x.dtype)


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
        return head_dim % _LANES == 0 and head_dim <= _LARGEST_HEAD

    def struct(self, keys: Tensor, values: Tensor) -> CacheStruct:
        return CacheStruct(
            _pointer(keys),
            _pointer(values),
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
        indices: tuple[Tensor, Tensor, Tensor],
        mask: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Their tensors.

        Args:
            caches: keys and values of each layer, [slots, kv_heads, head_dim].
            out_cache_loc: int64 [rows], the slots of the rows.
            indices: kv_indices, kv_indptr and qo_indptr, int32.
            mask: visible, row_depths and column_depths of a `TreeMask`; None: causal.
        """
        assert out_cache_loc.dtype == torch.int64 and all(each.dtype == torch.int32 for each in indices)
        assert mask is None or [each.dtype for each in mask] == [torch.bool, torch.int64, torch.int64]
        self.caches = caches
        self._tensors = [tensor.contiguous() for tensor in (out_cache_loc, *indices, *(mask or ()))]  # keeps them alive
        slots, kv_indices, kv_indptr, qo_indptr, *masks = map(_pointer, self._tensors)
        rows, columns = mask[0].shape[1:] if mask is not None else (0, 0)
        count, requests = len(out_cache_loc), len(indices[2]) - 1
        pointers = (slots, qo_indptr, kv_indptr, kv_indices, *(masks or (None, None, None)))
        self.struct = BatchStruct(count, requests, None, *pointers, rows, columns)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, shape: AttentionShape) -> Tensor:
        """Write k and v [rows, kv_heads, head_dim] to the cache of a layer, then attend: [rows, heads, head_dim]."""
        out, full = _empty(*q.shape), [_floats(x) for x in (q, k, v)]
        cache = shape.struct(*self.caches[layer])
        _functions().eagle_attention(
            *(_session(), byref(self.struct), byref(cache)),
            *(_pointer(x) for x in full),
            _pointer(out),
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
        full, count = _floats(x), len(x)
        stream = full.clone() if residual is None else residual.float().clone()
        hidden, places = torch.empty_like(stream), positions.contiguous()
        aux = _empty(count, len(aux_boundaries) * self.hidden) if aux_boundaries else None
        boundaries = (c_int32 * len(aux_boundaries))(*aux_boundaries)
        self._bind(rows.caches)
        decoder = DecoderStruct(
            *(self._structs, self._norm, self._cos, self._sin, ctypes.cast(boundaries, c_void_p)),
            *(len(self.layers), self.hidden, len(aux_boundaries), self._context, self._eps),
        )
        rows.struct.positions = _pointer(places)
        outside = _functions().eagle_decode(
            *(_session(), byref(decoder), byref(rows.struct)),
            *(_pointer(full), _pointer(stream), _pointer(hidden), None if aux is None else _pointer(aux)),
        )
        if outside:
            raise IndexError("a position is beyond the RoPE table, or a slot beyond the pool")
        return hidden, stream, aux

    def _bind(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self._caches is caches:
            return
        self._caches = caches
        for struct, layer, pair in zip(self._structs, self.layers, caches, strict=True):
            struct.cache = layer.attention.struct(*pair)

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        linears = (weight.struct(None if bias is None else self._kept_floats(bias)) for weight, bias in layer.linears)
        norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
        return LayerStruct(*linears, *(None if norm is None else self._keep(norm) for norm in norms), CacheStruct())

    def _keep(self, tensor: Tensor) -> c_void_p:
        return _pointer(self._kept_floats(tensor))

    def _kept_floats(self, tensor: Tensor) -> Tensor:
        self._kept.append(_floats(tensor.detach()))
        return self._kept[-1]


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _floats(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _pointer(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())
