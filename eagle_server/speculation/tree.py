"""The tree of candidate tokens. Every drafter returns one, the target verifies it, and acceptance walks it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from eagle_server.ops.tree.build import ancestors, link_tree
from eagle_server.ops.tree.candidates import BestCandidates


@dataclass(frozen=True)
class Tree:
    """A tree per request with D nodes. Node 0 is the root, the newest token. Parents have lower numbers than children.

    Requests with fewer nodes are padded with token -1 under the root; no drawn token equals -1. Depths, mask and
    positions follow from the parents: make trees with `linked` or `build_tree`.
    """

    tokens: Tensor  # int64 [bs, D], target vocabulary, -1: padding
    parents: Tensor  # int64 [bs, D], node numbers, -1 at the root
    depths: Tensor  # int64 [bs, D]
    mask: Tensor  # bool [bs, D, D], True at a node's ancestors and itself
    positions: Tensor  # int64 [bs, D], in the text: the root's position plus the depth
    steps: int  # the largest depth
    topk: int = 0  # the most children of a node; 1: every tree is a chain; 0: unknown
    scores: Tensor | None = None  # float32 [bs, D - 1], log of the estimated chance that the path is accepted
    # float32 [bs, D - 1], the drafter's own log chances of the paths' last steps, if the scores are corrected ones
    guesses: Tensor | None = None
    is_cut: bool = False  # nodes below the batch's least_logp are left out or padding
    counts: Tensor | None = None  # int64 [bs], how many nodes of each request are computed, the first ones; None: all
    proposed: Tensor | None = None  # int64 [bs, D - 1], each node's place in the drafter's tree; None: the same place

    @classmethod
    def linked(
        cls, tokens: Tensor, parents: Tensor, start: Tensor, steps: int, topk: int = 0, scores: Tensor | None = None
    ) -> Tree:
        """The trees of these parents, with roots at the positions `start` [bs] and a depth of at most `steps`."""
        mask, depths = ancestors(parents, steps)
        return cls(tokens, parents, depths, mask, start[:, None] + depths, steps, topk, scores)

    @property
    def size(self) -> int:
        """D, the nodes of each tree with its padding."""
        return self.parents.shape[1]

    @property
    def start(self) -> Tensor:
        """int64 [bs], the root's position: the length of the text before it."""
        return self.positions[:, 0]

    @cached_property
    def rows(self) -> Tensor | None:
        """The nodes that are computed, int64 [n], as places in [bs * D]. None: all."""
        if self.counts is None:
            return None
        numbers = torch.arange(self.size, device=self.counts.device)
        return (numbers < self.counts[:, None]).view(-1).nonzero()[:, 0]

    @cached_property
    def retrive_index(self) -> Tensor:
        """The row of each node in the flat batch of computed nodes, int64 [bs, D]. Padding has its root's row."""
        if self.counts is None:
            return torch.arange(self.parents.numel(), device=self.parents.device).view_as(self.parents)
        numbers = torch.arange(self.size, device=self.counts.device)
        first = self.counts.cumsum(0) - self.counts
        return first[:, None] + numbers * (numbers < self.counts[:, None])

    def rows_of(self, requests: Tensor) -> Tree:
        """The trees of some requests, int64 [n]."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen = {name: part.index_select(0, requests) for name, part in parts.items() if isinstance(part, Tensor)}
        return Tree(**parts | chosen)

    def without_estimates(self) -> Tree:
        """The trees alone, as the target computes them."""
        return replace(self, scores=None, guesses=None)


def build_tree(
    verified_id: Tensor, seq_lens: Tensor, tokens: Tensor, parents: Tensor, steps: int, scores: Tensor | None = None
) -> Tree:
    """Add the roots, verified_id [bs] at positions seq_lens [bs], to drafted nodes.

    Args:
        tokens: int64 [bs, n], -1: padding.
        parents: int64 [bs, n], node numbers: 0 is the root, i + 1 is entry i.
        scores: float32 [bs, n], see `Tree`.
    """
    root = parents.new_full((len(verified_id), 1), -1)
    tokens, parents = torch.cat([verified_id[:, None], tokens], dim=1), torch.cat([root, parents], dim=1)
    return Tree.linked(tokens, parents, seq_lens, steps, scores=scores)


def selected_tree(
    verified_id: Tensor, seq_lens: Tensor, best: BestCandidates, parent_list: Tensor, topk: int, steps: int
) -> Tree:
    """The trees of the selected candidates, with corrected scores. For `parent_list` see `link_tree`."""
    parents, depths, mask = link_tree(best.selected, parent_list, topk, steps)
    tokens = torch.cat([verified_id[:, None], best.tokens], dim=1)
    return Tree(tokens, parents, depths, mask, seq_lens[:, None] + depths, steps, topk, best.scores, best.guesses)


def root_alone(verified_id: Tensor, seq_lens: Tensor) -> Tree:
    """Trees without drafted nodes, for requests that do not draft."""
    parents = verified_id.new_full((len(verified_id), 1), -1)
    depths, mask = torch.zeros_like(parents), torch.ones_like(parents, dtype=torch.bool)[:, None]
    return Tree(verified_id[:, None], parents, depths, mask, seq_lens[:, None], steps=0, topk=1)


def without(tree: Tree, dropped: Tensor) -> Tree:
    """The trees with padding for dropped nodes, bool [bs, D - 1]. All descendants of a dropped node must be dropped."""
    tokens = tree.tokens.clone()
    tokens[:, 1:].masked_fill_(dropped, -1)
    return replace(tree, tokens=tokens)


def spread(tree: Tree, requests: Tensor, verified_id: Tensor, seq_lens: Tensor) -> Tree:
    """The trees of all requests: those at `requests` int64 [m] get the first m of `tree`, the others only their root.

    verified_id and seq_lens int64 [bs] belong to all requests.
    """
    bs, size, count = len(verified_id), tree.size, len(requests)

    def among(values: Tensor, otherwise: Tensor) -> Tensor:
        return otherwise.index_copy(0, requests, values[:count])

    depths = tree.depths.new_ones(bs, size)
    depths[:, 0] = 0
    parents = tree.parents.new_zeros(bs, size)
    parents[:, 0] = -1
    tokens = tree.tokens.new_full((bs, size), -1)
    tokens[:, 0] = verified_id
    alone = torch.eye(size, dtype=torch.bool, device=tokens.device)
    alone[:, 0] = True
    scores = tree.scores
    if scores is not None:
        scores = among(scores, scores.new_full((bs, size - 1), float("-inf")))
    return replace(
        tree,
        tokens=among(tree.tokens, tokens),
        parents=among(tree.parents, parents),
        depths=among(tree.depths, depths),
        mask=among(tree.mask, alone.expand(bs, -1, -1)),
        positions=among(tree.positions, seq_lens[:, None] + depths),
        scores=scores,
        guesses=None,
    )


def compacted(tree: Tree) -> Tree:
    """The same trees with their padding last, cut to the largest number of nodes, so that only nodes are computed.

    The nodes get new numbers in the old order. Children of padding must be padding. Trees without padding are returned
    as they are, except that chains get topk 1: they need no mask. The host reads the sizes from the device, which
    synchronizes.
    """
    if tree.size == 1:
        return tree
    is_node = tree.tokens >= 0
    counts = is_node.sum(1)
    size, fewest = int(counts.max()), int(counts.min())
    if fewest == tree.size:
        return _as_chains(tree, is_node)
    order = is_node.byte().argsort(dim=1, descending=True, stable=True)  # [bs, D], old numbers by new ones
    numbers, kept = order.argsort(dim=1), order[:, :size]
    tokens = tree.tokens.gather(1, kept)
    parents = numbers.gather(1, tree.parents.gather(1, kept).clamp(min=0)).masked_fill_(tokens < 0, 0)
    parents[:, 0] = -1
    steps, proposed = int((tree.depths * is_node).max()), kept[:, 1:] - 1
    scores = None if tree.scores is None else tree.scores.gather(1, proposed)
    trees = _as_chains(Tree.linked(tokens, parents, tree.start, steps, tree.topk, scores), tokens >= 0)
    return replace(trees, counts=None if fewest == size else counts, proposed=proposed)


def _as_chains(tree: Tree, is_node: Tensor) -> Tree:
    """The trees with topk 1, if each node's parent is the node before it."""
    if tree.topk == 1:
        return tree
    before = torch.arange(-1, tree.size - 1, device=tree.parents.device)
    return replace(tree, topk=1) if bool(((tree.parents == before) | ~is_node).all()) else tree
