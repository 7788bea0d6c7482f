"""Acceptance: the target draws its own token at every node, and the tree is walked along children equal to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.speculation.sampling import SamplingBatch, draw
from eagle_server.speculation.tree import EagleVerifyInput


@dataclass(frozen=True)
class Accepted:
    """The longest lossless path of each request.

    `accept_length` a counts drafted nodes, without root and bonus, so a + 1 tokens are emitted. `tokens[:, j]` is the
    target's draw at node `path[:, j]`: the next path node's token for j < a, the bonus for j = a. Unused places of
    `path` and `tokens` are -1.
    """

    path: Tensor  # int64 [bs, spec_steps + 1], node numbers, path[:, 0] = 0
    accept_length: Tensor  # int64 [bs]
    tokens: Tensor  # int64 [bs, spec_steps + 1]
    finite: Tensor  # bool [bs], False where a path node's best score is not: NaN or inf, or no token is allowed


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
    drawn, scores = draw(logits, tree.positions.view(bs, size) + 1, sampling, tree.spec_steps + 1)
    if size == 1:
        root = torch.zeros_like(drawn)
        return Accepted(root, root[:, 0], drawn, scores.isfinite()[:, 0])
    # A node is reached when it and every ancestor equals its parent's draw.
    agrees = tree.draft_token.view(bs, size)[:, 1:] == drawn.gather(1, tree.parents[:, 1:])  # [bs, D - 1]
    broken = (tree.custom_mask[:, :, 1:] & ~agrees[:, None, :]).any(dim=2)  # [bs, D]
    reached_depth = tree.depths.masked_fill(broken, -1)
    accept_length, last = reached_depth.max(dim=1)
    # The path is the last node's ancestors, each at its depth; everything else lands in a spare column.
    on_path = tree.custom_mask.gather(1, last[:, None, None].expand(-1, 1, size))[:, 0]  # [bs, D]
    width = tree.spec_steps + 1
    column = torch.where(on_path, tree.depths, width)
    empty = tree.depths.new_full((bs, width + 1), -1)
    nodes = torch.arange(size, device=column.device).expand(bs, -1)
    path = empty.scatter(1, column, nodes)[:, :width]
    tokens = empty.scatter(1, column, drawn)[:, :width]
    finite = (scores.isfinite() | ~on_path).all(dim=1)  # a refused node may not fail what plain decoding would serve
    return Accepted(path, accept_length, tokens, finite)
