"""The sizes and flags of a decoder. Targets and draft heads are built from these frozen values alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from eagle_server.cache.pool import KVShape, LatentShape, Shape
from eagle_server.models.ranks import RankGroup
from eagle_server.ops.recurrent.nodes import RecurrentShape


class CheckpointError(ValueError):
    """A checkpoint that cannot be served. The message names the file and the key, and what was expected and found."""


_EXTENDED_BY_FACTOR = ("linear", "dynamic", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding. `kind` is a type of config.json, or none, where all angles are 0.


    original_max_position: the length before scaling. For `dynamic` it is max_position_embeddings, as in transformers.
    partial_rotary_factor: the part of a head that is rotated, its first dimensions; the others stay as they are.
    short_factor: of `longrope`, what each wavelength is multiplied by in texts up to original_max_position.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated; with `proportional` all, most of them by an angle of 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)

    def context_limit(self, declared: int) -> tuple[int, str]:
        """(the longest context, what it follows from), if max_position_embeddings is `declared`.

        vLLM's rule: linear, dynamic and YaRN extend the original length by their factor. Some configs declare the
        extended length already (DeepSeek), others the original one (Qwen). All other types declare the extended length.
        """
        if self.kind == "longrope" and self.original_max_position < declared:  # longer ones rotate all keys otherwise
            return self.original_max_position, "rope type 'longrope': original_max_position_embeddings"
        extended = int(self.factor * self.original_max_position)
        if self.kind not in _EXTENDED_BY_FACTOR or extended <= declared:
            return declared, "max_position_embeddings"
        return extended, f"rope type {self.kind!r}: factor {self.factor:g} times {self.original_max_position} positions"


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: the ranks of compressed queries (None: not compressed) and KV, and head sizes.

    q_scale, kv_scale: what normed compressed queries and KV are multiplied by (LongCat).
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleaved: bool
    q_scale: float = 1.0
    kv_scale: float = 1.0


class SharedKV(NamedTuple):
    """Keys and values that another layer writes: which layer of the KV pool they are, and their shape."""

    pool_layer: int
    shape: KVShape


State = KVShape | LatentShape | RecurrentShape | SharedKV


class LayerInputSizes(NamedTuple):
    """Of per-layer embeddings, see `models.layer_inputs`: numbers per token and layer, and tokens."""

    size: int
    vocab: int


@dataclass(frozen=True)
class Split:
    """Which parts of a decoder are split over the ranks, each of which holds a share; every rank has the others whole.

    Embedding and lm_head are always split, by the vocabulary.
    """

    ranks: RankGroup
    attention: bool
    mlp: bool
    experts: bool
    recurrent: bool = False


Activation = Literal["silu", "gelu_tanh"]
CHUNK_LIMIT = "attention_chunk_size: longer texts need attention in chunks, which is not served"

Scoring = Literal["softmax", "sigmoid"]
Routing = Literal["greedy", "group_limited_greedy", "noaux_tc"]


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's gate: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up in [-limit, limit].

    alpha None: Step's, which limits silu(gate) instead: up * silu(gate).
    """

    limit: float
    alpha: float | None


class SwiGLULimits(NamedTuple):
    """The limits of a layer's experts, and of its MLP or shared experts, see `ClampedSwiGLU` without alpha; 0: none."""

    experts: float = 0.0
    mlp: float = 0.0


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts. `intermediate_size` is the size of one expert, `dense_layers` have one MLP instead.

    The experts are divided into `groups` groups of equal size. Each token goes to the `experts_per_token` best experts
    in its `topk_groups` best groups. `bias`: router and experts have biases. `swiglu`: None is silu(gate) * up.
    `shared_gate`: the shared experts' output is multiplied by the sigmoid of a gate. `identities`: how many more the
    router chooses from, which give back their input.
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_experts: int
    dense_layers: frozenset[int]
    scoring: Scoring
    routing: Routing
    groups: int
    topk_groups: int
    normalize: bool
    scale: float
    bias: bool = False
    swiglu: ClampedSwiGLU | None = None
    shared_gate: bool = False
    identities: int = 0

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts. Otherwise it has one MLP, like a dense model."""
        return layer not in self.dense_layers


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and flags of a decoder, or of the layers of a draft head.

    architecture: the class name in config.json; for a decoder of ours the name of its family in targets/registry.py.
    head_dim: the size of a head. With `mla` it is the rotary part of a head.
    max_position: the context length that is served by default.
    context_limit: the longest context that can be asked for, and what it follows from. It is longer than max_position
        with dynamic RoPE alone: a longer context changes the base, and so the texts of all lengths.
    windows: one sliding-window size per layer, 0 for full attention.
    states: what each layer keeps of a text, or reads: KV or a latent for each time that it attends, and a state of its
        own (one shape in all layers). (): every layer attends once, see `kept`.
    recurrent_bias, conv_bias: the projections of layers with a state of their own, and their convolutions, have biases.
    layer_heads: query heads of each layer; (): num_heads.
    sinks: which layers' attention has a sink per head, see `LayerSpec`; None: none has.
    v_head_dim: the size of values in files, if it is less than head_dim: they are padded with zeros. value_scale: what
        values are multiplied by.
    media_token_ids: of a checkpoint that reads images, video or audio too: the tokens that stand for them, as far as
        config.json names them. None: it reads text only.
    rope, local_rope: the rotation of all layers; with `local_rope` that of layers without a window, and of the others.
    norm_offset: norms multiply by norm_offset + weight.
    output_norms: attention's and the MLP's outputs are normed before they are added to the residual stream.
    attention_scale: of attention's scores; None: 1 / sqrt(head_dim).
    embed_scale: embeddings are multiplied by it, rounded to the dtype.
    residual_scale: attention's and the MLP's outputs are multiplied by it before they are added to the residual stream.
    logits_divisor: hidden states are divided by it before the lm_head.
    logits_softcap: c > 0 replaces logits by c * tanh(logits / c).
    attention_gate: the output of attention is multiplied by the sigmoid of a gate, which q_proj computes beside q.
    head_gate: the output of each head is multiplied by the sigmoid of one number, which g_proj computes.
    swiglu_limits: one per layer; (): none has limits.
    layer_inputs: of a model that mixes a second embedding into the stream in each layer.
    own: what only this family has, a dataclass in its file in targets/.
    has_family: whether the layers are in this package. Otherwise transformers' code runs the decoder, and only the
        fields that other modules read are set.
    waits: the first operation of transformers' forward that waits for the device; "": none does.
    split: of one rank, whose heads and widths the other fields are then (see `rank_slices`). None: the whole decoder.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    context_limit: tuple[int, str]
    dtype: torch.dtype
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    windows: tuple[int, ...] = ()
    states: tuple[tuple[State, ...], ...] = ()
    recurrent_bias: bool = False
    conv_bias: bool = False
    sinks: Literal["all", "windowed"] | None = None
    v_head_dim: int = 0
    value_scale: float = 1.0
    local_rope: RopeConfig | None = None
    norm_offset: float = 0.0
    output_norms: bool = False
    attention_scale: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    layer_inputs: LayerInputSizes | None = None
    attention_gate: bool = False
    head_gate: bool = False
    layer_heads: tuple[int, ...] = ()
    swiglu_limits: tuple[SwiGLULimits, ...] = ()
    own: object = None
    media_token_ids: tuple[int, ...] | None = None
    has_family: bool = True
    waits: str = ""
    split: Split | None = None

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of the logits on a GPU. A softcap gives float32, and so may transformers' code."""
        return self.dtype if self.has_family and not self.logits_softcap else torch.float32

    @cached_property
    def kept(self) -> tuple[tuple[State, ...], ...]:
        """What each layer keeps: `states`, or num_kv_heads heads of head_dim, or a latent."""
        own = KVShape(self.num_kv_heads, self.head_dim)
        latent = None if self.mla is None else LatentShape(self.mla.kv_lora_rank, self.mla.qk_rope_head_dim)
        return self.states or ((latent or own,),) * self.num_layers

    @property
    def pool_layers(self) -> tuple[Shape, ...]:
        """What each layer of the KV pool keeps of a token. They are in the order of the layers that write them."""
        return tuple(state for states in self.kept for state in states if isinstance(state, KVShape | LatentShape))

    @property
    def recurrent(self) -> RecurrentShape | None:
        """The shape of the layers with a state of their own; None: there are none."""
        return next((state for states in self.kept for state in states if isinstance(state, RecurrentShape)), None)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a state of their own, in the order of the pool of states."""
        return tuple(layer for layer in range(self.num_layers) if self.is_recurrent(layer))

    def is_recurrent(self, layer: int) -> bool:
        """Whether decoder layer `layer` has a state of its own."""
        return any(isinstance(state, RecurrentShape) for state in self.kept[layer])

    def attends(self, layer: int) -> bool:
        """Whether decoder layer `layer` has keys and values, its own or another layer's."""
        return any(not isinstance(state, RecurrentShape) for state in self.kept[layer])

    def writes_kv(self, layer: int) -> bool:
        """Whether decoder layer `layer` attends to keys and values of its own."""
        return self.attends(layer) and self._shared(layer) is None

    def pool_layer(self, layer: int) -> int:
        """The layer of the KV pool that decoder layer `layer` attends to; of several the first."""
        shared = self._shared(layer)
        before = sum(isinstance(state, KVShape | LatentShape) for states in self.kept[:layer] for state in states)
        return before if shared is None else shared.pool_layer

    def kv_shape(self, layer: int) -> KVShape:
        """The shape of the keys and values of decoder layer `layer`; num_kv_heads heads of head_dim if it has none."""
        shared = self._shared(layer)
        shapes = [state for state in self.kept[layer] if isinstance(state, KVShape)]
        return shared.shape if shared is not None else (*shapes, KVShape(self.num_kv_heads, self.head_dim))[0]

    def heads_of(self, layer: int) -> int:
        """The query heads of decoder layer `layer`."""
        return self.layer_heads[layer] if self.layer_heads else self.num_heads

    def with_states(self, layers: Collection[int], shape: RecurrentShape) -> ModelConfig:
        """This config with a recurrent state in the place of KV in these layers."""
        kept = tuple((shape,) if layer in layers else states for layer, states in enumerate(self.kept))
        return replace(self, states=kept)

    def _shared(self, layer: int) -> SharedKV | None:
        return next((state for state in self.kept[layer] if isinstance(state, SharedKV)), None)
