"""The sizes and flags of a decoder. Targets and draft heads are built from these frozen values alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from eagle_server.models.ranks import RankGroup


class CheckpointError(ValueError):
    """A checkpoint that cannot be served. The message names the file and the key, and what was expected and found."""


_EXTENDED_BY_FACTOR = ("linear", "dynamic", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding. `kind` is default, linear, dynamic, llama3 or yarn.

    original_max_position: the length before scaling. For `dynamic` it is max_position_embeddings, as in transformers.
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

    def context_limit(self, declared: int) -> tuple[int, str]:
        """(the longest context, what it follows from), if max_position_embeddings is `declared`.

        vLLM's rule: linear, dynamic and YaRN extend the original length by their factor. Some configs declare the
        extended length already (DeepSeek), others the original one (Qwen). All other types declare the extended length.
        """
        extended = int(self.factor * self.original_max_position)
        if self.kind not in _EXTENDED_BY_FACTOR or extended <= declared:
            return declared, "max_position_embeddings"
        return extended, f"rope type {self.kind!r}: factor {self.factor:g} times {self.original_max_position} positions"


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: the ranks of compressed queries (None: not compressed) and KV, and head sizes."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleaved: bool


@dataclass(frozen=True)
class Split:
    """Which parts of a decoder are split over the ranks, each of which holds a share; every rank has the others whole.

    Embedding and lm_head are always split, by the vocabulary.
    """

    ranks: RankGroup
    attention: bool
    mlp: bool
    experts: bool


Scoring = Literal["softmax", "sigmoid"]
Routing = Literal["greedy", "group_limited_greedy", "noaux_tc"]


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts. `intermediate_size` is the size of one expert.

    The experts are divided into `groups` groups of equal size. Each token goes to the `experts_per_token` best experts
    in its `topk_groups` best groups.
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_experts: int
    first_dense_layers: int
    layer_frequency: int
    scoring: Scoring
    routing: Routing
    groups: int
    topk_groups: int
    normalize: bool
    scale: float

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts. Otherwise it has one MLP, like a dense model."""
        return layer >= self.first_dense_layers and layer % self.layer_frequency == 0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and flags of a decoder, or of the layers of a draft head.

    architecture: the class name in config.json; for a native decoder the name of its family in targets/registry.py.
    head_dim: the number of dimensions that RoPE rotates. With `mla` it is the rotary part of a head.
    max_position: the context length that is served by default.
    context_limit: the longest context that can be asked for, and what it follows from. It is longer than max_position
        with dynamic RoPE alone: a longer context changes the base, and so the texts of all lengths.
    windows: one sliding-window size per layer, 0 for full attention.
    nextn_layers: the number of MTP layers after the decoder's own in the same files.
    native: whether the layers are in this package. Otherwise transformers' code runs the decoder, and only the fields
        that other modules read are set.
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
    windows: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    nextn_layers: int = 0
    native: bool = True
    split: Split | None = None
