"""What the rest of the package needs of a target, and what a target family consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import DecoderLayer, Linear


@dataclass(frozen=True)
class TargetOutput:
    """The result of one target forward.

    hidden: [rows, hidden] after the final norm: the input of `logits`, and the feature of EAGLE-1/2 heads.
    aux: [rows, n * hidden], the residual streams at `aux_boundaries`, from low to high; None if there are none.
    """

    hidden: Tensor
    aux: Tensor | None


class Target(Protocol):
    """The target as verification and drafters use it: a `TargetModel` or a `TransformersTarget`.

    Boundary b in `aux_boundaries` is the residual stream after b layers.
    """

    config: ModelConfig
    aux_boundaries: tuple[int, ...]
    lm_head: Linear

    @property
    def embed(self) -> Tensor:
        """The embedding's weight [V, H]."""
        ...

    @property
    def is_fused(self) -> bool:
        """Whether one native call computes all layers."""
        ...

    def __call__(self, tokens: Tensor, positions: Tensor, attention: BoundAttention) -> TargetOutput:
        """tokens, positions [rows] -> hidden states of every row."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab] in float32, written to `out` if there is one."""
        ...


class DraftedTarget(Protocol):
    """What the files of a draft are compared with, and what a draft may share."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def embed(self) -> Tensor: ...

    @property
    def lm_head(self) -> Linear: ...


@dataclass(frozen=True)
class TargetFamily:
    """A decoder family whose layers are in this package. Each file in targets/ defines one or more.

    architecture, model_type: its names in config.json.
    add_flags(config, raw, source): the config of `common_config` with the family's own fields, read from `raw`.
    layer(config, index): decoder layer `index`.
    """

    architecture: str
    model_type: str
    add_flags: Callable[[ModelConfig, Mapping[str, Any], str], ModelConfig]
    layer: Callable[[ModelConfig, int], DecoderLayer]
