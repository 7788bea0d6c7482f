"""Acceptance: the target draws its own token at every node, and the tree is walked along children equal to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from eagle_server.ops.accept import walk_tree
from eagle_server.speculation.sampling import SamplingBatch, draw
from eagle_server.speculation.transforms import Paths
from eagle_server.speculation.tree import EagleVerifyInput


@dataclass(frozen=True)
class Accepted:
    """The longest path of each request that the rule allows.

    `accept_length` a counts drafted nodes, without root and bonus, so a + 1 tokens are emitted. `tokens[:, j]` comes
    after node `path[:, j]`: the next path node's token for j < a, the bonus for j = a. Unused places of `path` and
    `tokens` are -1.
    """

    path: Tensor  # int64 [bs, spec_steps + 1], node numbers, path[:, 0] = 0
    accept_length: Tensor  # int64 [bs]
    tokens: Tensor  # int64 [bs, spec_steps + 1]
    drafted: Tensor  # int64 [bs], nodes that were proposed: without root and padding
    finite: Tensor  # bool [bs], False where a path node's best score is not: NaN or inf, or no token is allowed
    scores: Tensor  # float32 [bs, D], every node's best


class Acceptance(Protocol):
    """The rule by which drafts are kept; chosen once, when the engine is assembled. `lossy`: its name if it is."""

    @property
    def lossy(self) -> str | None: ...

    def accept(self, tree: EagleVerifyInput, target_logits: Tensor, sampling: SamplingBatch) -> Accepted:
        """The kept path of each tree; target_logits float32 [bs * D, vocab], one row per node."""
        ...


@dataclass(frozen=True)
class Lossless:
    """Every emitted token is the target's own draw; see `accept`."""

    lossy: ClassVar[None] = None

    def accept(self, tree: EagleVerifyInput, target_logits: Tensor, sampling: SamplingBatch) -> Accepted:
        return accept(tree, target_logits, sampling)


def paths_of(tree: EagleVerifyInput) -> Paths | None:
    """What stands between the committed texts and each node; None for trees of one node."""
    tokens = tree.draft_token.view_as(tree.parents)
    return Paths(tokens, tree.parents, tree.custom_mask) if tree.draft_token_num > 1 else None


def accept(tree: EagleVerifyInput, target_logits: Tensor, sampling: SamplingBatch) -> Accepted:
    """Walk each tree along the target's draws.

    One rule for greedy and stochastic decoding: y = argmax(log p + Gumbel(key, position)) once per node (plain argmax
    at temperature 0), go to the child that equals y, and where there is none emit y as the bonus. Every emitted token
    is the target's own draw given its prefix, so the text is that of plain decoding whatever the tree holds.

    Args:
        target_logits: float32 [bs * D, vocab], one row per node.
    """
    bs, size = tree.parents.shape
    logits = target_logits.view(bs, size, -1)
    tokens_of = tree.draft_token.view(bs, size)
    drawn, scores = draw(logits, tree.positions.view(bs, size) + 1, sampling, tree.spec_steps + 1, paths_of(tree))
    if size == 1:
        root = torch.zeros_like(drawn)
        return Accepted(root, root[:, 0], drawn, root[:, 0], scores.isfinite()[:, 0], scores)
    path, accept_length, tokens, finite = walk_tree(
        tokens_of, tree.parents, tree.depths, tree.custom_mask, drawn, scores.isfinite(), tree.spec_steps
    )
    return Accepted(path, accept_length, tokens, (tokens_of >= 0).sum(1) - 1, finite, scores)
