"""Join the trees of two drafters: equal paths become one, and the best nodes of both are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.tree.build import ancestors
from eagle_server.speculation.tree import Tree, build_tree

# The estimate of a source that did not propose a node:
REFUSED = 0.0  # it proposed other children of the same parent
UNASKED = -1.0  # it proposed no child of this parent

_LEAST, _MOST = 1e-4, 0.98  # chances stay below 1, so that a child never outranks its parent
_STRIDE = 0x5851F42D4C957F2D  # an odd number with random bits


def join_trees(first: Tree, second: Tree, steps: int) -> tuple[Tree, Tensor]:
    """Join two trees that have scores and at most `steps` levels. Neither may have two siblings with the same token.

    Returns the tree of all M = n + m drafted nodes, the first tree's before the second's, without scores. If both have
    a node, the second copy is padding. Also returns both drafters' estimates of P(node is accepted | its parent is
    accepted), or REFUSED or UNASKED, float32 [2, bs, M].

    Paths are compared by 64-bit keys, the sums of token * stride^depth. A collision would join two different nodes.
    That costs a drafted token, but does not change the text.
    """
    n = first.size - 1
    tokens = torch.cat([first.tokens[:, 1:], second.tokens[:, 1:]], dim=1)  # [bs, M]
    below = second.parents[:, 1:]  # both trees under one root
    parents = torch.cat([first.parents, torch.where(below > 0, below + n, 0)], dim=1)
    mask, depths = ancestors(parents, steps)
    strides = tokens.new_full((steps + 1,), _STRIDE).cumprod(0)
    terms = (tokens + 2) * strides.index_select(0, depths[:, 1:].reshape(-1)).view_as(tokens)
    keys = (mask[:, 1:, 1:] * terms[:, None]).sum(-1)  # [bs, M]
    is_node = tokens >= 0
    twins = keys[:, n:, None] == keys[:, None, :n]  # [bs, m, n]
    twins = twins & is_node[:, n:, None] & is_node[:, None, :n]
    duplicate = twins.any(-1)
    numbers = torch.arange(parents.shape[1], device=tokens.device).expand_as(parents)  # a duplicate's is its twin's
    twin = torch.where(duplicate, twins.int().argmax(-1) + 1, numbers[:, n + 1 :])
    parents = torch.cat([numbers[:, : n + 1], twin], dim=1).gather(1, parents[:, 1:])
    ours, theirs = estimates(first), estimates(second)
    proposed = torch.cat([is_node[:, :n], torch.zeros_like(duplicate)], dim=1)
    said = torch.cat([ours, torch.zeros_like(theirs)], dim=1)
    by_first = _with_silence(said, proposed, parents, slice(0, n))
    proposed = torch.cat([twins.any(1), is_node[:, n:]], dim=1)
    said = torch.cat([(twins * theirs[:, :, None]).sum(1), theirs], dim=1)
    by_second = _with_silence(said, proposed, parents, slice(n, None))
    kept = is_node & torch.cat([is_node[:, :n], ~duplicate], dim=1)
    tokens, parents = torch.where(kept, tokens, -1), torch.where(kept, parents, 0)
    return build_tree(first.tokens[:, 0], first.start, tokens, parents, steps), torch.stack([by_first, by_second])


def chances(estimates: Tensor) -> Tensor:
    """P(node is accepted | its parent is accepted) by two sources' estimates, [2, bs, M] from `join_trees`.

    If both propose a node, both are wrong at most half as often as one alone. If one of them proposed other nodes
    instead, the node is worth half.
    """
    first, second = estimates.clamp(min=0.0)
    agreed = torch.maximum(first, second)
    agreed = agreed + (1 - agreed) * torch.minimum(first, second) / 2
    contested = (estimates == REFUSED).any(0)
    return torch.where(contested, agreed / 2, agreed).clamp(_LEAST, _MOST)


def best(union: Tree, chances: Tensor, count: int) -> Tree:
    """The `count` nodes most likely to be accepted.

    chances float32 [bs, M] are P(node is accepted | its parent is accepted), below 1. A path's chance is their product,
    so parents rank above their children. The kept nodes are closed under ancestors, parents first.
    """
    drafts = union.tokens[:, 1:]
    scores = (union.mask[:, 1:, 1:] * chances.log()[:, None]).sum(-1).masked_fill(drafts < 0, float("-inf"))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    tokens = drafts.gather(1, order)
    ranks = torch.arange(1, count + 1, device=order.device).expand_as(order)
    numbers = order.new_zeros(len(order), union.size).scatter(1, order + 1, ranks)
    parents = torch.where(tokens < 0, 0, numbers.gather(1, union.parents[:, 1:].gather(1, order)))
    scores = scores.gather(1, order)
    return build_tree(union.tokens[:, 0], union.start, tokens, parents, union.steps, scores)


def estimates(tree: Tree) -> Tensor:
    """P(node is accepted | its parent is accepted), float32 [bs, D - 1]: a path's chance divided by its parent's."""
    assert tree.scores is not None
    scores = tree.scores.float()
    above = torch.cat([torch.zeros_like(scores[:, :1]), scores], dim=1).gather(1, tree.parents[:, 1:])
    return (scores - above).exp().nan_to_num(nan=0.0)


def _with_silence(said: Tensor, proposed: Tensor, parents: Tensor, nodes: slice) -> Tensor:
    """A source's estimates [bs, M]. For a node that it did not propose: REFUSED or UNASKED.

    proposed bool [bs, M] marks the nodes that the source proposed; `nodes` is the range of its own nodes.
    """
    children = torch.zeros(len(parents), parents.shape[1] + 1, device=parents.device)
    children.scatter_add_(1, parents[:, nodes], proposed[:, nodes].float())
    silent = torch.where(children.gather(1, parents) > 0, REFUSED, UNASKED)
    return torch.where(proposed, said, silent)
