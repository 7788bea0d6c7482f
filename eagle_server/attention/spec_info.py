"""The attention arguments of verify forwards and draft steps, by SGLang's names.

`EagleVerifyInput` plans the verify forward of trees, `EagleDraftInput` a draft step. Both compute qo_indptr, kv_indptr
and kv_indices for FlashInfer's plan. Draft-extend is causal with equally many rows per request, and needs neither.

The names of the two classes and of their members are SGLang's. Members that nothing here reads are for its readers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from eagle_server.attention.interface import AttnArgs, TreeMask
from eagle_server.ops.captured import in_place
from eagle_server.ops.kv.indices import build_draft_decode_kv_indices, build_kv_indices, indptr_of
from eagle_server.ops.tree.candidates import best_children
from eagle_server.speculation.tree import Tree


@dataclass(frozen=True)
class EagleVerifyInput:
    """The trees of a verify forward. `custom_mask` covers the query window; the prefix is always visible.

    Each attention backend expands the mask in its own way. In compacted trees only the nodes are computed.
    """

    tree: Tree

    @property
    def draft_token(self) -> Tensor:
        """int64 [bs * D], -1: padding."""
        return self.tree.tokens.view(-1)

    @property
    def custom_mask(self) -> Tensor:
        """bool [bs, D, D], True = attend."""
        return self.tree.mask

    @property
    def positions(self) -> Tensor:
        """int64 [bs * D], seq_len + depth."""
        return self.tree.positions.view(-1)

    @property
    def retrive_index(self) -> Tensor:
        """The row of each node in the flat batch of computed nodes, int64 [bs, D]."""
        return self.tree.retrive_index

    @property
    def retrive_next_token(self) -> Tensor:
        """First child of each node, -1 if none, int64 [bs, D]."""
        return retrive_links(self.tree.parents)[0]

    @property
    def retrive_next_sibling(self) -> Tensor:
        """Next child of the same parent, -1 if none, int64 [bs, D]."""
        return retrive_links(self.tree.parents)[1]

    @property
    def spec_steps(self) -> int:
        return self.tree.steps

    @property
    def topk(self) -> int:
        return self.tree.topk

    @property
    def draft_token_num(self) -> int:
        return self.tree.size

    @cached_property
    def tree_mask(self) -> TreeMask | None:
        """The mask as attention takes it. None for chains, because they are causal."""
        tree = self.tree
        return None if tree.topk == 1 else TreeMask(tree.mask, row_depths=tree.depths, column_depths=tree.depths)

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
        compacted trees have counts instead of D. The mask covers the query window. FlashInfer's plan takes it packed,
        with the prefix.
        """
        bs, size, counts = len(paged_kernel_lens), self.draft_token_num, self.tree.counts
        kv_lens = paged_kernel_lens + (size if counts is None else counts)
        kv_indptr, kv_indices = kv_arguments(req_pool_indices, kv_lens, req_to_token, kv_lens_sum, out)
        qo_indptr = even_indptr(bs, size, kv_lens.device) if counts is None else indptr_of(counts)
        return kv_indices, kv_indptr, qo_indptr, self.tree_mask


@dataclass(frozen=True)
class DraftWindow:
    """The columns after the prefix that all draft steps write, topk each: the step of each, and the mask of step 0."""

    column_steps: Tensor  # int64 [W], the step that writes each column
    first_mask: Tensor  # bool [topk, W], True where a node of step 0 sees its own slot

    @classmethod
    def of(cls, topk: int, width: int, device: torch.device) -> DraftWindow:
        column_steps = torch.arange(width, device=device).div(topk, rounding_mode="floor")
        return cls(column_steps, torch.eye(topk, width, dtype=torch.bool, device=device))


@dataclass(frozen=True)
class EagleDraftInput:
    """The topk nodes per request that one draft step feeds, and the window slots that each of them sees.

    Draft-extend feeds the newly accepted tokens. Its top-k tokens are the first nodes, so the first level of the tree
    needs no forward of its own. Step i (0-based) feeds the nodes of level i + 1. Their position for the draft is
    seq_len + i, that of the feature before them. The node in column c writes window slot i * topk + c.
    `ancestor_mask[b, c]` marks the window slots of node c and its ancestors. So a node never attends to another branch,
    whatever column its parent had. Scores are log-probabilities: products of probabilities would underflow and tie.
    """

    step: int
    topk_index: Tensor  # int64 [bs, topk], target vocabulary
    topk_logp: Tensor  # float32 [bs, topk], log-probabilities of the paths
    hidden_states: Tensor  # [rows, H], the draft's, at the parents
    # bool [bs, topk, W], columns of later steps are False. A view of `window.first_mask` at step 0, where captured
    # functions begin, so that none of them copies it.
    ancestor_mask: Tensor = in_place()
    window: DraftWindow = in_place()
    normed: Tensor | None = None  # [bs, H], normed hidden states of draft-extend, from which a grammar masks level 1
    parents: Tensor | None = None  # int64 [bs * topk], each node's row of hidden_states; None: row i is node i's

    @classmethod
    def first(
        cls,
        topk_logp: Tensor,
        topk_index: Tensor,
        hidden_states: Tensor,
        window: DraftWindow,
        normed: Tensor | None = None,
    ) -> EagleDraftInput:
        """After draft-extend. The parent of every node is the root."""
        ancestor_mask = window.first_mask.expand(len(topk_index), -1, -1)
        return cls(0, topk_index, topk_logp, hidden_states, ancestor_mask, window, normed)

    def advance(
        self, child_tokens: Tensor, child_scores: Tensor, hidden_states: Tensor, chosen: Tensor | None = None
    ) -> tuple[EagleDraftInput, Tensor]:
        """The next step's nodes, the best topk among topk * topk children, and their flat indices int64 [bs, topk].

        child_tokens and child_scores [bs, topk, topk] are by parent and rank. hidden_states [bs * topk, H] are those of
        this step's nodes. chosen: where to write the indices.
        """
        step = self.step + 1
        best = best_children(child_scores, child_tokens, self.ancestor_mask, step, chosen)
        nodes = (step, best.tokens, best.scores, hidden_states, best.ancestor_mask, self.window)
        return EagleDraftInput(*nodes, parents=best.rows), best.chosen

    @property
    def parent_states(self) -> Tensor:
        """The hidden state of each node's parent, [bs * topk, H]."""
        return self.hidden_states if self.parents is None else self.hidden_states.index_select(0, self.parents)

    def rows_of(self, requests: Tensor) -> EagleDraftInput:
        """The nodes of some requests after draft-extend, int64 [n]."""
        hidden = self.hidden_states.unflatten(0, self.topk_index.shape).index_select(0, requests)
        logp, tokens = (part.index_select(0, requests) for part in (self.topk_logp, self.topk_index))
        normed = None if self.normed is None else self.normed.index_select(0, requests)
        return EagleDraftInput.first(logp, tokens, hidden.flatten(0, 1), self.window, normed)

    def narrowed(self, window: DraftWindow) -> EagleDraftInput:
        """The best nodes after draft-extend, as many as each step of `window` feeds."""
        topk = len(window.first_mask)
        hidden = self.hidden_states.unflatten(0, self.topk_index.shape)[:, :topk].flatten(0, 1)
        logp, tokens = self.topk_logp[:, :topk], self.topk_index[:, :topk].contiguous()
        return EagleDraftInput.first(logp, tokens, hidden, window, self.normed)

    def cut(self, width: int) -> EagleDraftInput:
        """The same nodes with the window cut to `width` slots, which include all that they see."""
        window = DraftWindow(self.window.column_steps[:width], self.window.first_mask[:, :width])
        return replace(self, ancestor_mask=self.ancestor_mask[:, :, :width], window=window)

    @cached_property
    def tree_mask(self) -> TreeMask:
        bs, topk, _ = self.ancestor_mask.shape
        column_steps = self.window.column_steps
        return TreeMask(
            self.ancestor_mask,
            row_depths=column_steps[self.step * topk : (self.step + 1) * topk].expand(bs, -1),
            column_depths=column_steps.expand(bs, -1),
        )

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        req_to_token: Tensor,
        kv_lens_sum: int | None = None,
        out: Tensor | None = None,
    ) -> AttnArgs:
        """kv_indices, kv_indptr, qo_indptr and mask, page size 1.

        paged_kernel_lens int64 [bs] are the sequence lengths; topk rows also read the window after them, masked by
        their ancestor_mask.
        """
        bs, topk, width = self.ancestor_mask.shape
        lens = paged_kernel_lens + width
        kv_indptr, kv_indices = kv_arguments(req_pool_indices, lens, req_to_token, kv_lens_sum, out)
        return kv_indices, kv_indptr, even_indptr(bs, topk, lens.device), self.tree_mask

    def generate_attn_arg_decode(
        self, req_pool_indices: Tensor, paged_kernel_lens: Tensor, req_to_token: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """kv_indices, kv_indptr and qo_indptr of bs * topk decode queries with explicit slots.

        paged_kernel_lens int64 [bs] are sequence lengths. Each query reads the prefix and step + 1 more slots: its
        ancestors and itself.
        """
        return draft_decode_arguments(
            req_pool_indices, paged_kernel_lens, req_to_token, self.ancestor_mask, self.step + 1, out
        )


def retrive_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling of each node, -1 if none: int64 [bs, D] each, from parents int64 [bs, D].

    SGLang's kernels walk trees by these links. Acceptance here walks by parents and mask, and computes none.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    is_child = parents[:, None, :] == nodes[None, :, None]  # [bs, node, child]
    same = (parents[:, :, None] == parents[:, None, :]) & (nodes[None, None, :] > nodes[None, :, None])
    return _first(is_child), _first(same)


def kv_arguments(
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    req_to_token: Tensor,
    kv_lens_sum: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """kv_indptr int32 [bs + 1] and kv_indices int32 [sum of kv_lens]: the slots of each request, page size 1.

    Args:
        kv_lens: int64 [bs], how many slots each request reads.
        kv_lens_sum: their sum, if the host knows it. Without it the sum is read from the device, which synchronizes.
        out: int32 buffer of at least that size. The index kernel fills it from the front. The whole buffer is returned:
            its shape depends on no length, so a CUDA graph can capture the call.
    """
    if out is not None:
        return build_kv_indices(req_to_token, req_pool_indices, kv_lens, out), out
    kv_indptr = indptr_of(kv_lens)
    if len(kv_lens) == 1 and kv_lens_sum is not None:
        return kv_indptr, req_to_token[req_pool_indices, :kv_lens_sum][0]
    # Row starts in the flat table, minus their places in the result.
    starts = req_pool_indices * req_to_token.shape[1] - kv_indptr[:-1]
    places = torch.repeat_interleave(starts, kv_lens, output_size=kv_lens_sum)
    places += torch.arange(len(places), device=kv_lens.device)
    return kv_indptr, req_to_token.view(-1).index_select(0, places)


def draft_decode_arguments(
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    ancestor_mask: Tensor,
    num_visible: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """kv_indices, kv_indptr and qo_indptr of bs * topk decode queries, each with its own list of slots.

    Query (b, k) reads seq_lens[b] + num_visible slots: the prefix, then the window slots marked in ancestor_mask bool
    [bs, topk, W]. Each ancestor_mask row marks `num_visible` slots. Without a buffer `out` the result has its exact
    size, and that size is read from the device, which synchronizes.
    """
    bs, topk, _ = ancestor_mask.shape
    if out is None:
        out = req_to_token.new_empty(int((seq_lens + num_visible).sum()) * topk)
    kv_indptr = build_draft_decode_kv_indices(req_to_token, req_pool_indices, seq_lens, ancestor_mask, num_visible, out)
    return out, kv_indptr, even_indptr(bs * topk, 1, seq_lens.device)


def even_indptr(count: int, rows: int, device: torch.device) -> Tensor:
    """Prefix sums of `count` equal lengths, int32 [count + 1]."""
    return torch.arange(0, count * rows + 1, rows, dtype=torch.int32, device=device)


def _first(marks: Tensor) -> Tensor:
    """The index of the first True in the last dimension, -1 if there is none."""
    return torch.where(marks.any(-1), marks.int().argmax(-1), -1)
