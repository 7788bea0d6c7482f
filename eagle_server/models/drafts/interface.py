"""What all draft models are, whichever published format they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.layers import Linear
from eagle_server.ops.native.drafting import HeadWeights


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


@dataclass(frozen=True)
class HeadConfig:
    """What the configs of all heads with layers of their own have. own_embed, own_lm_head: not the target's."""

    layers: ModelConfig
    own_embed: bool = field(default=False, kw_only=True)
    own_lm_head: bool = field(default=False, kw_only=True)


class DraftModel(nn.Module, ABC):
    """The base class of all models that draft.

    algorithm: its row of `ALGORITHMS`.
    aux_boundaries: the residual streams of the target that form the feature (boundary b: after b layers). If empty, the
        feature is the target's post-norm hidden state.
    max_steps: the deepest tree that it can draft; None: any depth.
    reads_target_kv: it attends to the target's KV.
    token_map: the target ids that it drafts, int64 [Vd], by draft ids; None: all of its vocabulary.
    """

    algorithm: ClassVar[str]
    aux_boundaries: tuple[int, ...] = ()
    max_steps: int | None = None
    reads_target_kv: ClassVar[bool] = False
    token_map: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("token_map", None, persistent=False)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The size of its vocabulary without a token map."""

    @property
    def draft_vocab_size(self) -> int:
        """The size of the vocabulary that it drafts from."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary, any shape -> ids of the target's vocabulary, int64."""
        ids = draft_ids.long()
        return ids if self.token_map is None else self.token_map[ids]

    @property
    def why_no_token_map(self) -> str | None:
        """Why it cannot be restricted to some tokens; None: it can."""
        return None

    def restrict_vocabulary(self, token_map: Tensor) -> None:
        """Draft only the target ids in `token_map` (FR-Spec, arXiv 2502.14856).

        token_map: distinct ids, int64 [Vd]. Call it once, after the weights are loaded and before they are packed.

        Raises:
            CheckpointError: it cannot, or does not have one of the ids.
        """
        if (why := self.why_no_token_map) is not None:
            raise CheckpointError(f"--speculative-token-map: {why}; drop it")
        if int(token_map.max()) >= self.vocab_size:
            raise CheckpointError(f"--speculative-token-map: ids below {self.vocab_size}, the draft's, are expected")
        self.keep_rows(token_map)
        self.token_map = token_map

    @abstractmethod
    def keep_rows(self, token_map: Tensor) -> None:
        """Compute the logits of these tokens alone."""

    @property
    def is_fused(self) -> bool:
        """Whether native calls compute it, as in `Target`."""
        return True

    @property
    def kv(self) -> ModelConfig | None:
        """The layers whose KV it writes; None: it writes none."""
        return None


class DraftHead(DraftModel):
    """A small decoder over pairs (embedding of token t+1, target feature at t).

    num_layers: how many of its layers draft one level of trees each (several MTP layers); 1: all levels alike.
    """

    config: ModelConfig
    num_layers: int = 1

    @property
    def kv(self) -> ModelConfig:
        return self.config

    @abstractmethod
    def combine(self, features: Tensor) -> Tensor:
        """Target features [rows, n * Ht] -> hidden [rows, H]. For the first pass only, not for feedback."""

    @abstractmethod
    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """tokens, positions [rows], hidden [rows, H] -> the next feedback and the input of the logits."""

    def extend(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        attention: BoundAttention,
        row_before: Callable[[int, Tensor], Tensor] | None = None,
    ) -> DraftOutput:
        """`forward` over committed tokens, each with the target's feature [rows, F] of the position before it.

        row_before(k, z) -> what layer k gave at the row before each of these, from what it gives here, both [rows, H];
        a head with one layer that drafts does not ask.
        """
        return self(tokens, self.combine(features), positions, attention)  # type: ignore[no-any-return]

    def step(
        self,
        level: int,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: BoundAttention,
        parents: Tensor | None = None,
        *,
        is_last: bool = False,
    ) -> DraftOutput:
        """`forward` over the nodes of a level of trees (1: the root's children), each with its parent's feedback.

        parents: int64 [rows], each node's row of `hidden` (None: row i is node i's). is_last: no deeper level follows.
        """
        if parents is not None:
            hidden = hidden.index_select(0, parents)
        return self(tokens, hidden, positions, attention)  # type: ignore[no-any-return]

    def draft(
        self, level: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention
    ) -> DraftOutput:
        """`forward` of the layer that drafts a level (0: the root's children), and of no other, as a training needs it.

        feedback [rows, H]: what the layer of the next level reads at the row after.
        """
        return self(tokens, hidden, positions, attention)  # type: ignore[no-any-return]

    @abstractmethod
    def logits(self, normed: Tensor) -> Tensor:
        """[rows, H] -> [rows, draft vocabulary], in the dtype of the lm_head's product or in float32."""

    def native_weights(self) -> HeadWeights | None:
        """Its weights, after they are packed; None: the native kernels do not draft with it."""
        return None
