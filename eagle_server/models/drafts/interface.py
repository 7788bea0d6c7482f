"""What the worker knows of a draft head, whatever its published format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import Linear


@dataclass(frozen=True)
class TargetWeights:
    """What a head borrows from its target: embed [V, Ht] and the full lm_head.

    A plain value, so that nn.Module registers neither: a head does not train, move or save what it borrows.
    """

    embed: Tensor
    lm_head: Linear


@dataclass(frozen=True)
class DraftOutput:
    """feedback [rows, H] is the `hidden` of the next pass; normed [rows, H] is the input of `logits`."""

    feedback: Tensor
    normed: Tensor


class DraftHead(Protocol):
    """A feature drafter: a small decoder over pairs (embedding of token t+1, target feature at t).

    `config` gives the shape of its KV pool. `aux_boundaries` names the target's residual streams that make up the
    feature (boundary b = after b layers); empty means the target's post-norm hidden state.
    """

    config: ModelConfig
    aux_boundaries: tuple[int, ...]

    @property
    def draft_vocab_size(self) -> int:
        """How many tokens it can draft."""
        ...

    def combine(self, features: Tensor) -> Tensor:
        """Target features [rows, n * Ht] -> hidden [rows, H]. First pass only: feedback never goes through here."""
        ...

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """tokens, positions [rows], hidden [rows, H] -> the next feedback and the input of the logits."""
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, H] -> [rows, draft vocabulary] in float32."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary -> ids of the target's vocabulary, any shape, int64."""
        ...
