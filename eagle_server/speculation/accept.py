"""Acceptance: the target draws a token at every node, and the walk goes to the child with that token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from eagle_server.ops.tree.accept import walk_tree
from eagle_server.speculation.sampling import SamplingBatch, draw, draw_rows
from eagle_server.speculation.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each request: the longest one that the acceptance rule allows.

    `accept_length` a counts drafted nodes without root and bonus, so the cycle outputs a + 1 tokens. `tokens[:, j]`
    follows node `path[:, j]`: it is the token of the next path node for j < a, and the bonus for j = a. Unused entries
    of `path` and `tokens` are -1.
    """

    path: Tensor  # int64 [bs, steps + 1], node numbers, path[:, 0] = 0
    accept_length: Tensor  # int64 [bs]
    tokens: Tensor  # int64 [bs, steps + 1]
    drafted: Tensor  # int64 [bs], number of drafted nodes, without root and padding
    finite: Tensor  # bool [bs], False if a path node's best score is NaN or inf; it is -inf if no token is allowed
    scores: Tensor  # float32 [bs, D], the best score of every node


class Acceptance(Protocol):
    """An acceptance rule, chosen once when the engine is assembled. `lossy` is its name if it is lossy, else None."""

    @property
    def lossy(self) -> str | None: ...

    def accept(self, tree: Tree, target_logits: Tensor, sampling: SamplingBatch) -> Accepted:
        """The accepted path of each tree. target_logits [n, vocab] has one row per computed node, see `draw`."""
        ...


def drafted_of(tree: Tree) -> Tree | None:
    """The tree for `draw`, None if it is the root alone."""
    return tree if tree.size > 1 else None


def padded_logits(tree: Tree, target_logits: Tensor) -> Tensor:
    """The logits of all nodes, [bs, D, vocab], from the computed nodes' logits. Padding gets its root's logits."""
    if tree.rows is not None:
        target_logits = target_logits.index_select(0, tree.retrive_index.view(-1))
    return target_logits.view(*tree.parents.shape, -1)


def draw_nodes(tree: Tree, target_logits: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
    """`draw` at every node: tokens int64 [bs, D] and scores float32 [bs, D]. Padding has arbitrary values.

    Only computed nodes are drawn. Transforms and truncation need the same number of rows per request, so with them
    padding is drawn too.
    """
    positions = tree.positions + 1
    if tree.rows is None or sampling.edits_logits:
        return draw(padded_logits(tree, target_logits), positions, sampling, drafted_of(tree))
    tokens, scores = draw_rows(target_logits, positions, tree.rows, sampling)
    return tokens.take(tree.retrive_index), scores.take(tree.retrive_index)


@dataclass(frozen=True)
class Lossless:
    """The lossless rule: every output token is drawn from the target's distribution."""

    lossy: ClassVar[None] = None

    def accept(self, tree: Tree, target_logits: Tensor, sampling: SamplingBatch) -> Accepted:
        """Walk each tree along the tokens that the target draws.

        The rule is the same for greedy and stochastic decoding. Draw y = argmax(log p + Gumbel(key, position)) once per
        node (plain argmax at temperature 0). Go to the child with token y. If there is none, y is the bonus and the
        walk ends. Every output token is drawn from the target's distribution given its prefix. So the text is the same
        as in plain decoding, whatever the tree contains.

        Args:
            target_logits: [n, vocab], see `draw`, one row per computed node, see `Tree.retrive_index`.
        """
        drawn, scores = draw_nodes(tree, target_logits, sampling)
        if tree.size == 1:
            root = torch.zeros_like(drawn)
            return Accepted(root, root[:, 0], drawn, root[:, 0], scores.isfinite()[:, 0], scores)
        walk = walk_tree(tree.tokens, tree.parents, tree.depths, tree.mask, drawn, scores, tree.steps)
        return Accepted(*walk, scores)
