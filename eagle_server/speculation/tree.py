"""The tree of candidate tokens: drafters propose it, and the verify forward runs over it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle_server.attention.batches import even_indptr, kv_arguments
from eagle_server.attention.interface import AttnArgs, TreeMask
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

    @cached_property
    def retrive_index(self) -> Tensor:
        """Row of each node in the flat batch, int64 [bs, D]."""
        return torch.arange(self.parents.numel(), device=self.parents.device).view_as(self.parents)

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
        """Trees with the same spec_steps, topk and draft_token_num, but other `tensors`. Scores are dropped."""
        draft_token, custom_mask, positions, parents, depths = tensors
        return EagleVerifyInput(
            draft_token, custom_mask, positions, parents, depths, self.spec_steps, self.topk, self.draft_token_num
        )

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

        paged_kernel_lens int64 [bs] are sequence lengths L. Each request has D query rows that read L + D slots. The
        mask covers the query window; `reference.flat_custom_mask` expands it to the form that FlashInfer's plan takes.
        """
        kv_lens = paged_kernel_lens + self.draft_token_num
        kv_indptr, kv_indices = kv_arguments(req_pool_indices, kv_lens, req_to_token, kv_lens_sum, out)
        qo_indptr = even_indptr(len(req_pool_indices), self.draft_token_num, kv_lens.device)
        return kv_indices, kv_indptr, qo_indptr, self.tree_mask


def build_tree(
    proposal: Proposal, verified_id: Tensor, seq_lens: Tensor, speculation_disabled: Tensor | None = None
) -> EagleVerifyInput:
    """Add the root to every request's candidates: its verified_id [bs] at position seq_lens [bs].

    For requests marked in `speculation_disabled`, bool [bs], all drafted nodes become padding.
    """
    if isinstance(proposal, TreeNodes):
        root = proposal.parents.new_full((len(verified_id), 1), -1)
        parents, topk = torch.cat([root, proposal.parents], dim=1), 0
        mask, depths = ancestors(parents, proposal.spec_steps)
    else:
        topk = proposal.topk
        parents, depths, mask = link_tree(proposal.selected_index, proposal.parent_list, topk, proposal.spec_steps)
    tokens = (
        proposal.tokens
        if speculation_disabled is None
        else proposal.tokens.masked_fill(speculation_disabled[:, None], -1)
    )
    return EagleVerifyInput(
        draft_token=torch.cat([verified_id[:, None], tokens], dim=1).view(-1),
        custom_mask=mask,
        positions=(seq_lens[:, None] + depths).view(-1),
        parents=parents,
        depths=depths,
        spec_steps=proposal.spec_steps,
        topk=topk,
        draft_token_num=parents.shape[1],
        scores=proposal.scores,
    )
