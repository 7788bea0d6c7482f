"""EagleDraftInput: the inputs of the draft model in a cycle, from draft-extend to the last draft step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from eagle_server.attention.batches import draft_decode_arguments, even_indptr, kv_arguments
from eagle_server.attention.interface import AttnArgs, TreeMask
from eagle_server.ops.candidates import best_children
from eagle_server.ops.indices import indptr_of


@dataclass(frozen=True)
class EagleDraftInput:
    """The inputs of the draft model's forwards, and the `spec_info` of their attention.

    Draft-extend feeds the newly accepted tokens and is causal. Its top-k tokens are the first frontier, so the first
    level of the tree needs no forward of its own. Each draft step feeds a frontier and gives the next one.
    """

    verified_id: Tensor  # int64 [bs]
    extend_lens: Tensor  # int64 [bs], valid rows in draft-extend: accepted drafts and the bonus
    extend_width: int | None = None  # padded rows per request in draft-extend; None: extend_lens rows each
    frontier: Frontier | None = None  # None: before draft-extend
    normed: Tensor | None = (
        None  # [bs, H], normed hidden states of draft-extend, kept so that a grammar can mask the first level
    )

    @property
    def tree_mask(self) -> TreeMask | None:
        return None if self.frontier is None else self.frontier.tree_mask

    def of(self, requests: Tensor) -> EagleDraftInput:
        """The state after draft-extend of some requests, int64 [n]."""
        frontier, normed = self.frontier, self.normed
        assert frontier is not None
        hidden = frontier.hidden_states.unflatten(0, frontier.topk_index.shape).index_select(0, requests)
        logp, tokens = (part.index_select(0, requests) for part in (frontier.topk_logp, frontier.topk_index))
        return replace(
            self,
            verified_id=self.verified_id.index_select(0, requests),
            extend_lens=self.extend_lens.index_select(0, requests),
            frontier=Frontier.first(logp, tokens, hidden.flatten(0, 1), frontier.window),
            normed=None if normed is None else normed.index_select(0, requests),
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

        Draft-extend is causal; paged_kernel_lens int64 [bs] are the lengths read, including the extended rows. In a
        draft step paged_kernel_lens are the sequence lengths; topk rows also read the window after them, masked by
        their ancestor_mask.
        """
        device, bs = paged_kernel_lens.device, len(req_pool_indices)
        if self.frontier is not None:
            paged_kernel_lens = paged_kernel_lens + self.frontier.tree_mask.visible.shape[2]
            qo_indptr = even_indptr(bs, self.frontier.topk_index.shape[1], device)
        elif self.extend_width is not None:
            qo_indptr = even_indptr(bs, self.extend_width, device)
        else:
            qo_indptr = indptr_of(self.extend_lens)
        kv_indptr, kv_indices = kv_arguments(req_pool_indices, paged_kernel_lens, req_to_token, kv_lens_sum, out)
        return kv_indices, kv_indptr, qo_indptr, self.tree_mask

    def generate_attn_arg_decode(
        self, req_pool_indices: Tensor, paged_kernel_lens: Tensor, req_to_token: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """kv_indices, kv_indptr and qo_indptr of a draft step as bs * topk decode queries with explicit slots.

        paged_kernel_lens int64 [bs] are sequence lengths. Each query reads the prefix and step + 1 more slots: its
        ancestors and itself.
        """
        assert self.frontier is not None, "draft steps follow draft-extend"
        ancestor_mask, num_visible = self.frontier.ancestor_mask, self.frontier.step + 1
        return draft_decode_arguments(
            req_pool_indices, paged_kernel_lens, req_to_token, ancestor_mask, num_visible, out
        )


@dataclass(frozen=True)
class DraftWindow:
    """The slots after the prefix that all draft steps write: step i writes the columns from i * topk on."""

    levels: Tensor  # int64 [W], the step that writes each column
    own: Tensor  # bool [topk, W], True where a node of step 0 sees its own slot

    @classmethod
    def of(cls, topk: int, width: int, device: torch.device) -> DraftWindow:
        levels = torch.arange(width, device=device).div(topk, rounding_mode="floor")
        return cls(levels, torch.eye(topk, width, dtype=torch.bool, device=device))


@dataclass(frozen=True)
class Frontier:
    """The topk nodes per request that one draft step feeds, and the window slots that each of them sees.

    Step i (0-based) feeds the nodes of level i + 1 at position seq_len + i. The node in column c writes window slot i *
    topk + c. `ancestor_mask[b, c]` marks the window slots of node c and its ancestors. So a node never attends to
    another branch, whatever column its parent had. Scores are log-probabilities: products of probabilities would
    underflow and tie.
    """

    step: int
    topk_index: Tensor  # int64 [bs, topk], target vocabulary
    topk_logp: Tensor  # float32 [bs, topk], log-probabilities of the paths
    hidden_states: Tensor  # [bs * topk, H], the draft's, at the parents
    ancestor_mask: Tensor  # bool [bs, topk, W], columns of later steps are False
    window: DraftWindow

    @classmethod
    def first(cls, topk_logp: Tensor, topk_index: Tensor, hidden_states: Tensor, window: DraftWindow) -> Frontier:
        """The frontier after draft-extend. The parent of every node is the root."""
        own = window.own.expand(len(topk_index), -1, -1)
        return cls(0, topk_index, topk_logp, hidden_states, own, window)

    def advance(self, child_tokens: Tensor, child_scores: Tensor, hidden_states: Tensor) -> tuple[Frontier, Tensor]:
        """The frontier of the best topk among topk * topk children, and their flat indices int64 [bs, topk].

        child_tokens and child_scores [bs, topk, topk] are by parent and rank. hidden_states [bs * topk, H] are the
        parents'.
        """
        step = self.step + 1
        best = best_children(child_scores, child_tokens, self.ancestor_mask, step)
        hidden = hidden_states.index_select(0, best.rows)
        return Frontier(step, best.tokens, best.scores, hidden, best.ancestor_mask, self.window), best.chosen

    def cut(self, width: int) -> Frontier:
        """The same frontier with a window of `width` slots, which has those that it sees."""
        window = DraftWindow(self.window.levels[:width], self.window.own[:, :width])
        return replace(self, ancestor_mask=self.ancestor_mask[:, :, :width], window=window)

    @cached_property
    def tree_mask(self) -> TreeMask:
        bs, topk, _ = self.ancestor_mask.shape
        levels = self.window.levels
        return TreeMask(
            self.ancestor_mask,
            row_depths=levels[self.step * topk : (self.step + 1) * topk].expand(bs, -1),
            column_depths=levels.expand(bs, -1),
        )
