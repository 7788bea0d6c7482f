"""The tree of candidate tokens: drafters propose it, and the verify forward runs over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle_server.attention.batches import even_indptr, kv_arguments
from eagle_server.attention.interface import AttnArgs, TreeMask
from eagle_server.ops.indices import indptr_of
from eagle_server.ops.tree import ancestors, link_tree
from eagle_server.speculation.reference import retrive_links


@dataclass(frozen=True)
class Candidates:
    """A drafter's proposal, without the root: the n = draft_token_num - 1 best nodes of its candidate pool.

    `selected_index` has pool indices in ascending order and is closed under ancestors. K pool entries with a common
    parent are a group; `parent_list[g]` is the pool index of group g's parent (-1: the root).
    """

    tokens: Tensor  # int64 [bs, n], target vocabulary
    selected_index: Tensor  # int64 [bs, n]
    parent_list: Tensor  # int64 [bs, K * (spec_steps - 1) + 1]
    topk: int
    spec_steps: int
    scores: Tensor | None = None  # float32 [bs, n], log of the estimated chance that the path is accepted
    # float32 [bs, n], the drafter's own log chances of the paths' last steps, if the scores are corrected ones
    guesses: Tensor | None = None
    is_cut: bool = False  # nodes below the batch's least_logp are left out, or padding (token -1)


@dataclass(frozen=True)
class TreeNodes:
    """A proposal as an explicit tree, without the root: static trees, packed beams, tries.

    The root has number 0, entry i has number i + 1. Parents come before children. Requests with fewer nodes are padded
    with token -1 under the root; no drawn token equals -1.
    """

    tokens: Tensor  # int64 [bs, n], target vocabulary, -1: padding
    parents: Tensor  # int64 [bs, n], node numbers
    spec_steps: int  # the maximum depth
    scores: Tensor | None = None  # float32 [bs, n], log of the estimated chance that the path is accepted


Proposal = Candidates | TreeNodes


@dataclass(frozen=True)
class EagleVerifyInput:
    """A tree per request with D = draft_token_num nodes. Node 0 is the root; parents have lower numbers than children.

    The target computes all nodes, or in `compacted` trees all but the padding.

    `custom_mask` covers the query window only, True = attend. The prefix is always visible, and each backend expands
    the mask in its own way. `parents` is -1 at the root.
    """

    draft_token: Tensor  # int64 [bs * D], -1: padding, which the walk never reaches
    custom_mask: Tensor  # bool [bs, D, D], ancestors and self
    positions: Tensor  # int64 [bs * D], seq_len + depth
    parents: Tensor  # int64 [bs, D]
    depths: Tensor  # int64 [bs, D]
    spec_steps: int
    topk: int  # maximum children per node; 1: every tree is a chain; 0: unknown
    draft_token_num: int
    scores: Tensor | None = None  # float32 [bs, D - 1], scores of the nodes after the root, if the drafter has them
    counts: Tensor | None = None  # int64 [bs], nodes that are computed, the first of each request; None: all
    proposed: Tensor | None = None  # int64 [bs, D - 1], each drafted node's place in the proposal; None: the same place

    @cached_property
    def rows(self) -> Tensor | None:
        """The nodes that are computed, int64 [n], as places in [bs * D]. None: all."""
        if self.counts is None:
            return None
        numbers = torch.arange(self.draft_token_num, device=self.counts.device)
        return (numbers < self.counts[:, None]).view(-1).nonzero()[:, 0]

    @cached_property
    def retrive_index(self) -> Tensor:
        """Row of each node in the flat batch of computed nodes, int64 [bs, D]. Padding has its root's row."""
        if self.counts is None:
            return torch.arange(self.parents.numel(), device=self.parents.device).view_as(self.parents)
        numbers = torch.arange(self.draft_token_num, device=self.counts.device)
        first = self.counts.cumsum(0) - self.counts
        return first[:, None] + numbers * (numbers < self.counts[:, None])

    @property
    def retrive_next_token(self) -> Tensor:
        """First child of each node, -1 if none, int64 [bs, D]."""
        return self._links[0]

    @property
    def retrive_next_sibling(self) -> Tensor:
        """Next child of the same parent, -1 if none, int64 [bs, D]."""
        return self._links[1]

    @cached_property
    def _links(self) -> tuple[Tensor, Tensor]:
        return retrive_links(self.parents)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the tree, without scores; see `with_tensors`."""
        return (self.draft_token, self.custom_mask, self.positions, self.parents, self.depths)

    def with_tensors(self, *tensors: Tensor) -> EagleVerifyInput:
        """The same trees with other `tensors`. Scores are dropped."""
        names = ("draft_token", "custom_mask", "positions", "parents", "depths")
        named: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return replace(self, **named, scores=None)

    def of(self, requests: Tensor) -> EagleVerifyInput:
        """The trees of some requests, int64 [n]. Scores are dropped."""
        counts, proposed = (
            None if part is None else part.index_select(0, requests) for part in (self.counts, self.proposed)
        )
        tokens, positions = (part.view_as(self.parents) for part in (self.draft_token, self.positions))
        parts = (tokens, self.custom_mask, positions, self.parents, self.depths)
        tokens, mask, positions, parents, depths = (part.index_select(0, requests) for part in parts)
        chosen = self.with_tensors(tokens.view(-1), mask, positions.view(-1), parents, depths)
        return replace(chosen, counts=counts, proposed=proposed)

    @cached_property
    def tree_mask(self) -> TreeMask | None:
        """The mask as attention takes it. None for chains, because they are causal."""
        return None if self.topk == 1 else TreeMask(self.custom_mask, row_depths=self.depths, column_depths=self.depths)

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        req_to_token: Tensor,
        kv_lens_sum: int | None = None,
        out: Tensor | None = None,
    ) -> AttnArgs:
        """kv_indices, kv_indptr, qo_indptr and mask of the verify forward, page size 1.

        paged_kernel_lens int64 [bs] are sequence lengths L. Each request has D query rows that read L + D slots;
        compacted trees have counts instead of D. The mask covers the query window; `reference.flat_custom_mask`
        expands it to the form that FlashInfer's plan takes.
        """
        bs, size = self.parents.shape
        kv_lens = paged_kernel_lens + (size if self.counts is None else self.counts)
        kv_indptr, kv_indices = kv_arguments(req_pool_indices, kv_lens, req_to_token, kv_lens_sum, out)
        qo_indptr = even_indptr(bs, size, kv_lens.device) if self.counts is None else indptr_of(self.counts)
        return kv_indices, kv_indptr, qo_indptr, self.tree_mask


def build_tree(proposal: Proposal, verified_id: Tensor, seq_lens: Tensor) -> EagleVerifyInput:
    """Add the root to every request's candidates: its verified_id [bs] at position seq_lens [bs]."""
    if isinstance(proposal, TreeNodes):
        root = proposal.parents.new_full((len(verified_id), 1), -1)
        parents, topk = torch.cat([root, proposal.parents], dim=1), 0
        mask, depths = ancestors(parents, proposal.spec_steps)
    else:
        topk = proposal.topk
        parents, depths, mask = link_tree(proposal.selected_index, proposal.parent_list, topk, proposal.spec_steps)
    return EagleVerifyInput(
        draft_token=torch.cat([verified_id[:, None], proposal.tokens], dim=1).view(-1),
        custom_mask=mask,
        positions=(seq_lens[:, None] + depths).view(-1),
        parents=parents,
        depths=depths,
        spec_steps=proposal.spec_steps,
        topk=topk,
        draft_token_num=parents.shape[1],
        scores=proposal.scores,
    )


def root_alone(verified_id: Tensor, seq_lens: Tensor) -> EagleVerifyInput:
    """Trees without drafted nodes, for requests that do not draft."""
    empty = verified_id.new_empty(len(verified_id), 0)
    return build_tree(Candidates(empty, empty, empty, topk=1, spec_steps=0), verified_id, seq_lens)


def without(tree: EagleVerifyInput, dropped: Tensor) -> EagleVerifyInput:
    """The trees with padding for dropped nodes, bool [bs, D - 1]. All descendants of a dropped node must be dropped."""
    tokens = tree.draft_token.view_as(tree.parents).clone()
    tokens[:, 1:].masked_fill_(dropped, -1)
    return replace(tree, draft_token=tokens.view(-1))


def spread(tree: EagleVerifyInput, requests: Tensor, verified_id: Tensor, seq_lens: Tensor) -> EagleVerifyInput:
    """The trees of all requests, if those at `requests` int64 [m] have the first m of `tree` and the others their root.

    verified_id and seq_lens int64 [bs] are those of all requests.
    """
    bs, size, count = len(verified_id), tree.draft_token_num, len(requests)

    def among(values: Tensor, otherwise: Tensor) -> Tensor:
        return otherwise.index_copy(0, requests, values[:count])

    depths = tree.depths.new_ones(bs, size)
    depths[:, 0] = 0
    parents = tree.parents.new_zeros(bs, size)
    parents[:, 0] = -1
    tokens = tree.draft_token.new_full((bs, size), -1)
    tokens[:, 0] = verified_id
    alone = torch.eye(size, dtype=torch.bool, device=tokens.device)
    alone[:, 0] = True
    depths = among(tree.depths, depths)
    scores = tree.scores
    if scores is not None:
        scores = among(scores, scores.new_full((bs, size - 1), float("-inf")))
    return replace(
        tree,
        draft_token=among(tree.draft_token.view(-1, size), tokens).view(-1),
        custom_mask=among(tree.custom_mask, alone.expand(bs, -1, -1)),
        positions=(seq_lens[:, None] + depths).view(-1),
        parents=among(tree.parents, parents),
        depths=depths,
        scores=scores,
    )


def compacted(tree: EagleVerifyInput) -> EagleVerifyInput:
    """The same trees with their padding last, cut to the largest number of nodes, so that only nodes are computed.

    The nodes get new numbers in the old order. Children of padding must be padding. Trees without padding are returned
    as they are. If there are only roots, each tree is a chain of one node, as in plain decoding. The host reads the
    sizes from the device, which synchronizes.
    """
    tokens = tree.draft_token.view_as(tree.parents)
    is_node = tokens >= 0
    counts = is_node.sum(1)
    size, fewest = int(counts.max()), int(counts.min())
    if fewest == tree.draft_token_num:
        return tree
    order = is_node.byte().argsort(dim=1, descending=True, stable=True)  # [bs, D], old numbers by new ones
    numbers, kept = order.argsort(dim=1), order[:, :size]
    tokens = tokens.gather(1, kept)
    parents = numbers.gather(1, tree.parents.gather(1, kept).clamp(min=0)).masked_fill_(tokens < 0, 0)
    parents[:, 0] = -1
    spec_steps = int((tree.depths * is_node).max())
    mask, depths = ancestors(parents, spec_steps)
    proposed = kept[:, 1:] - 1
    return EagleVerifyInput(
        draft_token=tokens.view(-1),
        custom_mask=mask,
        positions=(tree.positions.view_as(tree.parents)[:, :1] + depths).view(-1),
        parents=parents,
        depths=depths,
        spec_steps=spec_steps,
        topk=1 if size == 1 else tree.topk,
        draft_token_num=size,
        scores=None if tree.scores is None else tree.scores.gather(1, proposed),
        counts=None if fewest == size else counts,
        proposed=proposed,
    )
