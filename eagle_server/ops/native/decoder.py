"""Attention by slots, and whole forwards of a decoder, by the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int32, c_void_p
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.native.experts import ACTIVATIONS, NativeExperts
from eagle_server.ops.native.library import available, check_inside, empty, floats, functions, pointer, session
from eagle_server.ops.native.linear import OUTPUTS_TOGETHER, Biased, NativeWeight
from eagle_server.ops.native.recurrent import NativeSequences, NativeStates, structs_of
from eagle_server.ops.native.structs import (
    BatchStruct,
    CacheStruct,
    ConvolutionStruct,
    DecoderStruct,
    LatentStruct,
    LayerStruct,
    PackedStruct,
)
from eagle_server.ops.recurrent.nodes import RecurrentLayer

_LARGEST_HEAD = 640  # in kernels/cpu/attention.h
_ROWS_DTYPES = [torch.int64, torch.int32, torch.int64, torch.int64, torch.int32, torch.bool, torch.int64, torch.int64]


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a layer: heads, kv_heads, head_dim, and scale, softcap, window and sinks as in `LayerSpec`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int
    sinks: Tensor | None = None  # float32 [heads], on the CPU

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
            None if self.sinks is None else pointer(self.sinks),
        )


def attends(keys: Tensor, values: Tensor) -> bool:
    """Whether the native kernels attend to a layer's cache, keys and values [slots, kv_heads, head_dim], of which each
    head must be dense."""
    fits = all(side.transpose(0, 1).is_contiguous() for side in (keys, values)) and values.shape == keys.shape
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
            mask: visible, row_depths and column_depths of a `TreeMask` of the first requests; None: all are causal.
        """
        given = [each.contiguous() for each in (out_cache_loc, qo_indptr, *requests, *(mask or ()))]
        assert [each.dtype for each in given] == _ROWS_DTYPES[: len(given)]
        self.caches, self._tensors = caches, given  # keeps them alive
        pointers = [pointer(each) for each in given] + [None] * (len(_ROWS_DTYPES) - len(given))
        sizes = (*mask[0].shape[1:], len(mask[0])) if mask is not None else (0, 0, 0)
        self.struct = BatchStruct(len(out_cache_loc), len(qo_indptr) - 1, None, *pointers, *sizes, requests[2].shape[1])

    def attend(self, q: Tensor, kv: tuple[Tensor, Tensor] | None, layer: int, shape: AttentionShape) -> Tensor:
        """Write k and v [rows, kv_heads, head_dim] to the cache of a layer, then attend: [rows, heads, head_dim].

        kv: None: they are in the cache.
        """
        out, query, written = empty(*q.shape), floats(q), [floats(x) for x in kv or ()]
        cache = shape.struct(*self.caches[layer])
        places = [pointer(x) for x in written] if kv is not None else [None, None]
        functions().eagle_attention(
            *(session(), byref(self.struct), byref(cache)),
            *(pointer(query), *places, pointer(out)),
        )
        return out.to(q.dtype)


@dataclass(frozen=True)
class LatentWeights:
    """What latent attention has beside qkv, which makes a compressed query and the latent, see kernels/cpu/latent.h.

    absorb, values: of each head W_UK transposed [rank, inputs] and W_UV [value size, rank], see `by_head`.
    eps: of q_norm and k_norm, which are of the compressed query and of the latent. interleaved: see `MLAConfig`.
    """

    queries: Biased
    absorb: NativeWeight
    values: NativeWeight
    eps: float
    q_scale: float
    kv_scale: float
    interleaved: bool

    @staticmethod
    def by_head(weights: Tensor) -> NativeWeight:
        """Weights of heads, [heads, out, in], one below the other. Each head begins with a group of outputs."""
        padded = F.pad(weights.detach(), (0, 0, 0, -weights.shape[1] % OUTPUTS_TOGETHER))
        return NativeWeight(padded.flatten(0, 1))

    def struct(self) -> LatentStruct:
        """This object must outlive it."""
        weights = (self.queries[0].struct(None), self.absorb.struct(None), self.values.struct(None))
        return LatentStruct(*weights, self.eps, self.q_scale, self.kv_scale, int(self.interleaved))


@dataclass(frozen=True)
class AttentionWeights:
    """The attention of a layer before and after its sums. None: there is none.

    gated: a head's query in qkv is followed by its gate. kv_layer: of the pool. cos, sin: float32 [context,
    rotary_dim], the first half of the sine negated. head_gate: of one number per head. latent: None: the layer has keys
    and values.
    """

    qkv: Biased
    o: Biased
    q_norm: Tensor | None
    k_norm: Tensor | None
    v_norm: Tensor | None
    gated: bool
    kv_layer: int
    cos: Tensor
    sin: Tensor
    shape: AttentionShape
    head_gate: Biased | None = None
    latent: LatentWeights | None = None


@dataclass(frozen=True)
class RecurrentWeights:
    """What a recurrent layer has in the place of attention, see kernels/cpu/recurrent_layer.h. None: there is none.

    gates, by_key_head: of the delta rule; of kda what makes decays. state_gate: of kda. norm: [value_dim], of ssd
    [value_heads * value_dim].
    """

    projections: Biased
    out: Biased
    layer: RecurrentLayer
    gates: Biased | None = None
    norm: Tensor | None = None
    by_key_head: bool = False
    state_gate: Biased | None = None


@dataclass(frozen=True)
class FeedForwardWeights:
    """What a layer computes after attention: the sum of an MLP and of experts. None: there is none.

    narrow, widen: before and after the experts, but not the router.
    activation: of the MLP, which has no gate with relu2. limit: of its gate and up, see `models.config.SwiGLULimits`.
    gate: [hidden], whose product with the input weighs the MLP, after a sigmoid. The others are gains of Gemma 4's
    norms, through which router and experts read the stream, and through which the outputs of MLP and experts are added;
    None: experts read what the MLP reads.
    """

    gate_up: Biased | None = None
    down: Biased | None = None
    experts: NativeExperts | None = None
    narrow: Biased | None = None
    widen: Biased | None = None
    activation: str = "silu"
    limit: float = 0.0
    gate: Tensor | None = None
    router_norm: Tensor | None = None
    experts_norm: Tensor | None = None
    dense_out_norm: Tensor | None = None
    experts_out_norm: Tensor | None = None


@dataclass(frozen=True)
class ConvolutionWeights:
    """Convolutions over the rows of a block, see `models.drafts.block_edges.LocalConvolution`.

    projection: to [2, taps, hidden / group]. base: [2, taps, hidden]. group: channels that share what the projection
    makes.
    """

    projection: Biased
    base: Tensor
    group: int


@dataclass(frozen=True)
class LayerWeights:
    """One layer: weights and biases, and gains of norms, as in `models.layers.DecoderLayer`. None: there is none.

    convolutions: around attention and around the MLP.
    """

    mixer: AttentionWeights | RecurrentWeights | None
    feed_forward: FeedForwardWeights | None
    eps: float
    input_norm: Tensor | None = None
    post_norm: Tensor | None = None
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    tail: tuple[Biased | None, Biased | None] = (None, None)  # gate and projection
    tail_norm: Tensor | None = None
    added_factor: float = 1.0  # of what is added to the stream
    factor: float = 1.0  # of the stream after the layer
    convolutions: tuple[ConvolutionWeights, ConvolutionWeights] | None = None


class NativeDecoder:
    """The layers of a decoder and its last norm, computed by one call. Sums and the residual stream are float32."""

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor | None) -> None:
        """All norms have the same `eps`, and all angles the same context. Some layer attends."""
        norms = (layer.post_norm for layer in layers)
        self.layers, self.hidden = tuple(layers), next(len(each) for each in norms if each is not None)
        self._kept: dict[int, Tensor] = {}
        self._norm = None if norm is None else self._keep(norm)
        attention = next(layer.mixer for layer in layers if isinstance(layer.mixer, AttentionWeights))
        self._context, self._eps = len(attention.cos), layers[0].eps
        self._structs = (LayerStruct * len(layers))(*(self._layer(layer) for layer in layers))
        self._caches: Sequence[tuple[Tensor, Tensor]] = ()
        self._states: NativeStates | None = None

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        rows: NativeRows,
        aux_boundaries: Sequence[int] = (),
        layer_inputs: Tensor | None = None,
        recurrent: tuple[NativeStates, Sequence[NativeSequences]] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(norm of the last residual stream, that stream, the streams at `aux_boundaries` side by side or None).

        All are float32. Without a last norm the first is not computed.

        Args:
            x: the first stream [rows, hidden]; or if the first layer has no input norm its normed input, and `residual`
                is the stream.
            positions: int64 [rows].
            rows: with the caches of all layers.
            layer_inputs: [rows, layers, size] if the layers have tails with a gate.
            recurrent: the states of recurrent layers, and the same rows over them.
        """
        full, count = floats(x), len(x)
        stream = full.clone() if residual is None else residual.float().clone()
        hidden, places = torch.empty_like(stream), positions.contiguous()
        aux = empty(count, len(aux_boundaries) * self.hidden) if aux_boundaries else None
        decoder = self.struct(rows.caches, aux_boundaries)
        inputs = None if layer_inputs is None else floats(layer_inputs)
        if inputs is not None:
            decoder.layer_inputs, decoder.layer_input_size = pointer(inputs), inputs.shape[2]
        if recurrent is not None:
            states, groups = recurrent
            self._read_states(states)
            sequences = structs_of(groups)
            decoder.sequences, decoder.groups = ctypes.cast(sequences, c_void_p), len(groups)
        rows.struct.positions = pointer(places)
        outside = functions().eagle_decode(
            *(session(), byref(decoder), byref(rows.struct)),
            *(pointer(full), pointer(stream), pointer(hidden), None if aux is None else pointer(aux)),
        )
        check_inside(outside=bool(outside))
        return hidden, stream, aux

    def write_context(
        self,
        features: Tensor,
        combine: Biased,
        positions: Tensor,
        slots: Tensor,
        caches: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Write keys and values of all layers, from the last norm of what `combine` makes of features [rows, F].

        Args:
            positions, slots: int64 [rows].
            caches: of all layers.
        """
        full, given, (weight, bias) = floats(features), [positions.contiguous(), slots.contiguous()], combine
        packed = weight.struct(None if bias is None else self._kept_floats(bias))
        rows = BatchStruct(len(full), 0, *map(pointer, given))
        outside = functions().eagle_write_context(
            *(session(), byref(self.struct(caches)), byref(packed), byref(rows), pointer(full))
        )
        check_inside(outside=bool(outside))

    def struct(self, caches: Sequence[tuple[Tensor, Tensor]], aux_boundaries: Sequence[int] = ()) -> DecoderStruct:
        """The layers over these caches, until the next call."""
        if self._caches is not caches:
            self._caches = caches
            for struct, layer in zip(self._structs, self.layers, strict=True):
                if isinstance(layer.mixer, AttentionWeights):
                    struct.cache = layer.mixer.shape.struct(*caches[layer.mixer.kv_layer])
        self._boundaries = (c_int32 * len(aux_boundaries))(*aux_boundaries)
        return DecoderStruct(
            *(self._structs, self._norm, ctypes.cast(self._boundaries, c_void_p)),
            *(None, None, len(self.layers), self.hidden, len(aux_boundaries), self._context, 0, 0, self._eps),
        )

    def _read_states(self, states: NativeStates) -> None:
        if self._states is not states:
            self._states = states
            for struct, layer in zip(self._structs, self.layers, strict=True):
                if isinstance(layer.mixer, RecurrentWeights):
                    struct.recurrent = states.address(layer.mixer.layer)

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        after, mixer = layer.feed_forward or FeedForwardWeights(), layer.mixer
        struct = LayerStruct(activation=ACTIVATIONS.index(after.activation), factor=layer.factor, limit=after.limit)
        struct.added_factor = layer.added_factor
        linears = {
            "gate_up": after.gate_up,
            "down": after.down,
            "narrow": after.narrow,
            "widen": after.widen,
            "tail_gate": layer.tail[0],
            "tail_projection": layer.tail[1],
        }
        tensors = {
            name: getattr(layer, name)
            for name in ("input_norm", "post_norm", "attention_norm", "mlp_norm", "tail_norm")
        }
        tensors["shared_gate"] = after.gate
        for name in ("router_norm", "experts_norm", "dense_out_norm", "experts_out_norm"):
            tensors[name] = getattr(after, name)
        if isinstance(mixer, AttentionWeights):
            linears |= {"qkv": mixer.qkv, "gates": mixer.head_gate, "o": mixer.o}
            tensors |= {name: getattr(mixer, name) for name in ("q_norm", "k_norm", "v_norm", "cos", "sin")}
            struct.rotary, struct.gated = mixer.cos.shape[1], mixer.gated
            if mixer.latent is not None:
                struct.latent = mixer.latent.struct()
        elif mixer is not None:
            linears |= {"qkv": mixer.projections, "gates": mixer.gates, "state_gate": mixer.state_gate, "o": mixer.out}
            tensors["state_norm"], struct.by_key_head = mixer.norm, mixer.by_key_head
        for name, linear in linears.items():
            setattr(struct, name, self._packed(linear))
        for name, tensor in tensors.items():
            setattr(struct, name, None if tensor is None else self._keep(tensor))
        if after.experts is not None:
            struct.experts = after.experts.struct
        if layer.convolutions is not None:
            around = (self._convolution(each) for each in layer.convolutions)
            struct.attention_convolution, struct.mlp_convolution = around
        return struct

    def _convolution(self, weights: ConvolutionWeights) -> ConvolutionStruct:
        return ConvolutionStruct(
            self._packed(weights.projection), self._keep(weights.base), weights.base.shape[1], weights.group
        )

    def _packed(self, linear: Biased | None) -> PackedStruct:
        if linear is None:
            return PackedStruct()
        weight, bias = linear
        return weight.struct(None if bias is None else self._kept_floats(bias))

    def _keep(self, tensor: Tensor) -> c_void_p:
        return pointer(self._kept_floats(tensor))

    def _kept_floats(self, tensor: Tensor) -> Tensor:
        """Kept alive; layers that share a tensor share its copy."""
        if tensor.data_ptr() not in self._kept:
            self._kept[tensor.data_ptr()] = floats(tensor.detach())
        return self._kept[tensor.data_ptr()]
