"""What the rest of the package needs of a target, and what a target family consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.layers import Linear


@dataclass(frozen=True)
class TargetOutput:
    """The result of one target forward.

    hidden: [rows, hidden] after the final norm: the input of `logits`, and the feature of EAGLE-1/2 heads.
    aux: [rows, n * hidden], the residual streams that were asked for, side by side; None if none were.
    """

    hidden: Tensor
    aux: Tensor | None


class Target(Protocol):
    """The target as verification and drafters use it: a `TargetModel` or a `TransformersTarget`.

    It keeps nothing of a forward, so engines with different drafts can share it.
    """

    config: ModelConfig
    lm_head: Linear

    @property
    def embed(self) -> Tensor:
        """The embedding's weight [V, H]."""
        ...

    @property
    def is_fused(self) -> bool:
        """Whether one native call computes all layers."""
        ...

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: BoundAttention, aux_boundaries: Sequence[int] = ()
    ) -> TargetOutput:
        """tokens, positions [rows] -> hidden states of every row, and the residual streams at `aux_boundaries`.

        Boundary b is the stream after b layers. `aux_boundaries` increase.
        """
        ...

    @property
    def logits_dtype(self) -> torch.dtype:
        """Float32, or the model's dtype if logits are computed in it."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab] in `logits_dtype`, written to `out` if there is one."""
        ...


class DraftedTarget(Protocol):
    """What the files of a draft are compared with, and what a draft may share."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def embed(self) -> Tensor: ...

    @property
    def lm_head(self) -> Linear: ...


def own_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The family's layer, which attends without a window, and has experts if the target has some."""
    moe = None if config.moe is None else replace(config.moe, dense_layers=frozenset())
    return replace(config, num_layers=count, windows=(), states=(), moe=moe, tie_word_embeddings=False)


def windowed_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The family's layer with a window, with an MLP (MiMo-V2, Step)."""
    slides = next((layer for layer, window in enumerate(config.windows) if window), None)
    if slides is None or config.local_rope is None:
        raise CheckpointError(f"{config.architecture}: its MTP layers have a window, and the target has none")
    shape, window = config.kv_shape(slides), config.windows[slides]
    return replace(
        config,
        num_layers=count,
        num_heads=config.heads_of(slides),
        num_kv_heads=shape.kv_heads,
        layer_heads=(),
        windows=(window,) * count,
        head_dim=shape.head_dim,
        states=(),
        swiglu_limits=(),
        rope=config.local_rope,
        local_rope=None,
        moe=None,
        tie_word_embeddings=False,
    )


def _unchecked(raw: Mapping[str, Any], source: str) -> None:
    """Nothing to refuse."""


@dataclass(frozen=True)
class MtpTraits:
    """What the MTP layers of a family are, see `models.drafts.mtp`.

    layers(config, count): their config, from the target's. check(raw, source): refuses what they may not be.
    before_norm: they read, and pass on, the residual stream before the last norm.
    chained: a layer reads what the one before it gave; if not, what that one read: the target's state.
    named_mtp: the family's files name their tensors mtp.*, as Qwen's do.
    """

    layers: Callable[[ModelConfig, int], ModelConfig] = own_layers
    before_norm: bool = False
    chained: bool = True
    check: Callable[[Mapping[str, Any], str], None] = _unchecked
    named_mtp: bool = False


def _as_it_is(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    return raw


@dataclass(frozen=True)
class TargetFamily:
    """A decoder family whose layers are in this package. Each file in targets/ defines one or more.

    architecture, model_type: its names in config.json.
    add_flags(config, raw, source): the config of `common_config` with the family's own fields, read from `raw`.
    layer(config, index): decoder layer `index`, a `DecoderLayer` or a module that is called as one.
    defaults: values of keys that config.json may leave out.
    partial_rotary_factor: its default, as in transformers; None: RoPE rotates whole heads.
    mtp: its MTP layers.
    aliases: the usual names of keys that its config.json has under other names.
    usual(raw, source): config.json with the usual keys, where more than names differ.
    renames: parts of tensor names in its files, and what stands for each here. All are replaced, in this order.
    """

    architecture: str
    model_type: str
    add_flags: Callable[[ModelConfig, Mapping[str, Any], str], ModelConfig]
    layer: Callable[[ModelConfig, int], nn.Module]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary_factor: float | None = None
    mtp: MtpTraits = MtpTraits()
    aliases: Mapping[str, str] = field(default_factory=dict)
    usual: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = _as_it_is
    renames: Mapping[str, str] = field(default_factory=dict)
