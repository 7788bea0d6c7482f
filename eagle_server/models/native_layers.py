"""Packed layers as one native call: which kinds the kernels compute, and with what weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from eagle_server.models.layers import DecoderLayer, RMSNorm
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.native.decoder import (
    AttentionWeights,
    ConvolutionWeights,
    FeedForwardWeights,
    LayerWeights,
    NativeDecoder,
    RecurrentWeights,
)


@runtime_checkable
class Mixer(Protocol):
    """What a `DecoderLayer` has in the place of attention."""

    def native_weights(
        self, rope: RotaryEmbedding, local_rope: RotaryEmbedding
    ) -> AttentionWeights | RecurrentWeights | None:
        """For the native kernels; None: they do not compute it. `local_rope`: of layers with a sliding window."""
        ...


@runtime_checkable
class NativeLayer(Protocol):
    """A layer that is no `DecoderLayer`, with parts of its own."""

    def native_layer(self, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> LayerWeights | None:
        """For the native kernels; None: they do not compute it."""
        ...


@runtime_checkable
class FeedForward(Protocol):
    """What a `DecoderLayer` computes after attention."""

    def native_weights(self) -> FeedForwardWeights | None:
        """For the native kernels; None: they do not compute it."""
        ...


def native_decoder(
    layers: Iterable[nn.Module],
    norm: RMSNorm | None,
    rope: RotaryEmbedding,
    local_rope: RotaryEmbedding | None = None,
    convolutions: Sequence[tuple[ConvolutionWeights, ConvolutionWeights]] = (),
) -> NativeDecoder | None:
    """One native call for all of these packed layers and the norm after them; None: they are not of that kind.

    A first layer that is no `DecoderLayer` gets its input normed, and the residual stream with it. `local_rope`: for
    layers with a sliding window; None: `rope`. `convolutions`: of each layer; empty: there are none.
    """
    weights = [_native_layer(layer, rope, local_rope or rope) for layer in layers]
    known = [each for each in weights if each is not None]
    if len(known) < len(weights):
        return None
    if convolutions:
        known = [replace(layer, convolutions=each) for layer, each in zip(known, convolutions, strict=True)]
    return NativeDecoder(known, _gain(norm))


def _native_layer(layer: Any, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> LayerWeights | None:
    if isinstance(layer, NativeLayer):
        return layer.native_layer(rope, local_rope)
    attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
    if not isinstance(attention, Mixer) or not isinstance(mlp, FeedForward):
        return None
    mixer, feed_forward = attention.native_weights(rope, local_rope), mlp.native_weights()
    tail = getattr(layer, "tail", None)
    ends = (None, None) if tail is None or tail.gate is None else (tail.gate.native, tail.projection.native)
    lacks = tail is not None and tail.gate is not None and None in ends
    if mixer is None or feed_forward is None or lacks:
        return None
    is_decoder = isinstance(layer, DecoderLayer)
    return LayerWeights(
        *(mixer, feed_forward, layer.post_norm.eps),
        input_norm=_gain(layer.input_norm) if is_decoder else None,
        post_norm=layer.post_norm.gain,
        attention_norm=_gain(layer.attention_norm) if is_decoder else None,
        mlp_norm=_gain(layer.mlp_norm) if is_decoder else None,
        tail=ends,
        tail_norm=None if tail is None else _gain(tail.norm),
        added_factor=layer.residual_scale if is_decoder else 1.0,
        factor=1.0 if tail is None else float(tail.factor),
    )


def _gain(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.gain
