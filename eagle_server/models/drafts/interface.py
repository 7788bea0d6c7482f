"""The interface of draft heads, the same for all published formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import Linear
from eagle_server.ops.native_drafting import HeadWeights


@dataclass(frozen=True)
class TargetWeights:
    """Weights that a head shares with its target: embed [V, Ht] and the full lm_head.

    A plain dataclass, so that nn.Module registers neither. A head does not train, move or save shared weights.
    """

    embed: Tensor
    lm_head: Linear


@dataclass(frozen=True)
class DraftOutput:
    """feedback [rows, H]: the `hidden` of the next pass. normed [rows, H]: the input of `logits`."""

    feedback: Tensor
    normed: Tensor


class DraftHead(Protocol):
    """A small decoder over pairs (embedding of token t+1, target feature at t).

    config: gives the shape of the head's KV pool.
    aux_boundaries: the residual streams of the target that form the feature (boundary b: after b layers). If empty, the
        feature is the target's post-norm hidden state.
    """

    config: ModelConfig
    aux_boundaries: tuple[int, ...]

    @property
    def draft_vocab_size(self) -> int:
        """The size of the vocabulary that it drafts from."""
        ...

    def combine(self, features: Tensor) -> Tensor:
        """Target features [rows, n * Ht] -> hidden [rows, H]. For the first pass only, not for feedback."""
        ...

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """tokens, positions [rows], hidden [rows, H] -> the next feedback and the input of the logits."""
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, H] -> [rows, draft vocabulary], in the dtype of the lm_head's product or in float32."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary, any shape -> ids of the target's vocabulary, int64."""
        ...


@runtime_checkable
class NativeDraftHead(DraftHead, Protocol):
    """A `DraftHead` that the native kernels may draft with."""

    def native_weights(self) -> HeadWeights | None:
        """Its weights, after they are packed; None: the kernels do not compute this head."""
        ...
