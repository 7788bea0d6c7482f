"""Join the trees of two drafters: equal paths become one, and the best nodes of both are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.ops.tree import ancestors, link_tree
from eagle_server.speculation.tree import Candidates, Proposal, TreeNodes

# The estimate of a source that did not propose a node:
REFUSED = 0.0  # it proposed other children of the same parent
UNASKED = -1.0  # it proposed no child of this parent

_STRIDE = 0x5851F42D4C957F2D  # an odd number with random bits


@dataclass(frozen=True)
class ScoredNodes:
    """A drafter's tree as in `TreeNodes`, with its estimates of P(node is accepted | its parent is accepted)."""

    tokens: Tensor  # int64 [bs, n], -1: padding
    parents: Tensor  # int64 [bs, n], node numbers
    estimates: Tensor  # float32 [bs, n]

    @classmethod
    def of(cls, proposal: Proposal) -> ScoredNodes:
        """From a proposal with scores: a node's estimate is its path probability divided by its parent's."""
        assert proposal.scores is not None
        parents = _parents(proposal) if isinstance(proposal, Candidates) else proposal.parents
        scores = proposal.scores.float()
        above = torch.cat([torch.zeros_like(scores[:, :1]), scores], dim=1).gather(1, parents)
        estimates = (scores - above).exp().nan_to_num(nan=0.0)
        return cls(proposal.tokens, parents, estimates)


@dataclass(frozen=True)
class JoinedTrees:
    """M = n + m nodes: the first source's, then the second's. If both have a node, the second copy is a duplicate.

    `first` and `second` are the sources' estimates, or REFUSED or UNASKED.
    """

    tokens: Tensor  # int64 [bs, M]
    parents: Tensor  # int64 [bs, M], node numbers (0: the root, i + 1: node i), never of a duplicate
    place: Tensor  # int64 [bs, M], a duplicate's index in the first source; else the node's own index
    paths: Tensor  # bool [bs, M, M], a node's ancestors in its own source, and itself
    depths: Tensor  # int64 [bs, M]
    first: Tensor  # float32 [bs, M]
    second: Tensor  # float32 [bs, M]
    counts: Tensor  # bool [bs, M], False for duplicates and padding


def join_trees(first: ScoredNodes, second: ScoredNodes, depth: int) -> JoinedTrees:
    """Join two trees that are no deeper than `depth`. Neither may have two siblings with the same token.

    Paths are compared by 64-bit keys, the sums of token * stride^depth. A collision would join two different nodes.
    That costs a drafted token, but does not change the text.
    """
    bs, own = first.tokens.shape
    tokens = torch.cat([first.tokens, second.tokens], dim=1)  # [bs, M]
    root = tokens.new_full((bs, 1), -1)
    # Both trees under one root.
    shifted = torch.where(second.parents > 0, second.parents + own, 0)
    mask, depths = ancestors(torch.cat([root, first.parents, shifted], dim=1), depth)
    paths, depths = mask[:, 1:, 1:], depths[:, 1:]
    strides = tokens.new_full((depth + 1,), _STRIDE).cumprod(0)
    terms = (tokens + 2) * strides.index_select(0, depths.reshape(-1)).view_as(depths)
    keys = (paths * terms[:, None]).sum(-1)  # [bs, M]
    drafted = tokens >= 0
    twins = keys[:, own:, None] == keys[:, None, :own]  # [bs, m, n]
    twins = twins & drafted[:, own:, None] & drafted[:, None, :own]
    duplicate = twins.any(-1)
    index = torch.arange(tokens.shape[1], device=tokens.device).expand(bs, -1)
    place = torch.cat([index[:, :own], torch.where(duplicate, twins.int().argmax(-1), index[:, own:])], dim=1)
    parents = torch.cat([root + 1, place + 1], dim=1).gather(1, torch.cat([first.parents, shifted], dim=1))
    return JoinedTrees(
        tokens,
        parents,
        place,
        paths,
        depths,
        first=_estimates_of(
            torch.cat([first.estimates, torch.zeros_like(second.estimates)], dim=1),
            torch.cat([drafted[:, :own], torch.zeros_like(duplicate)], dim=1),
            parents,
            slice(0, own),
        ),
        second=_estimates_of(
            torch.cat([(twins * second.estimates[:, :, None]).sum(1), second.estimates], dim=1),
            torch.cat([twins.any(1), drafted[:, own:]], dim=1),
            parents,
            slice(own, None),
        ),
        counts=drafted & torch.cat([drafted[:, :own], ~duplicate], dim=1),
    )


def best(joined: JoinedTrees, chances: Tensor, count: int, depth: int) -> tuple[TreeNodes, Tensor]:
    """The `count` nodes most likely to be accepted, and their indices in the joined trees, int64 [bs, count].

    chances float32 [bs, M] are P(node is accepted | its parent is accepted), below 1. A path's chance is their product,
    so parents rank above their children. The kept nodes are closed under ancestors, parents first.
    """
    each = chances.log().gather(1, joined.place)  # a duplicate has the chance of the node in the first source
    scores = (joined.paths * each[:, None]).sum(-1).masked_fill(~joined.counts, float("-inf"))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    kept = joined.counts.gather(1, order)
    ranks = torch.arange(1, count + 1, device=order.device).expand_as(order)
    numbers = order.new_zeros(len(order), scores.shape[1] + 1).scatter(1, order + 1, ranks)
    parents = numbers.gather(1, joined.parents.gather(1, order))
    tokens = torch.where(kept, joined.tokens.gather(1, order), -1)
    nodes = TreeNodes(tokens, torch.where(kept, parents, 0), spec_steps=depth, scores=scores.gather(1, order))
    return nodes, order


def _parents(candidates: Candidates) -> Tensor:
    links = link_tree(candidates.selected_index, candidates.parent_list, candidates.topk, candidates.spec_steps)
    return links[0][:, 1:]


def _estimates_of(estimates: Tensor, found: Tensor, parents: Tensor, own: slice) -> Tensor:
    """A source's estimates [bs, M]. For a node that it did not propose: REFUSED or UNASKED.

    found bool [bs, M] marks the nodes that the source proposed; `own` is the range of its own nodes.
    """
    children = torch.zeros(len(parents), parents.shape[1] + 1, device=parents.device)
    children.scatter_add_(1, parents[:, own], found[:, own].float())
    silent = torch.where(children.gather(1, parents) > 0, REFUSED, UNASKED)
    return torch.where(found, estimates, silent)
