"""EagleDraftInput: the draft's side of a cycle, from draft-extend to the last draft step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.batches import beam_arguments, even_indptr, indptr_of, kv_arguments
from eagle_server.attention.interface import AttnArgs, TreeMask


@dataclass(frozen=True)
class EagleDraftInput:
    """What the draft model's forwards are made from; the `spec_info` of their attention.

    Draft-extend feeds the newly accepted tokens, causally. It leaves a frontier, which the draft steps feed one after
    the other. The first level of the tree needs no forward: it is the top-k that draft-extend found.
    """

    verified_id: Tensor  # int64 [bs]
    accept_length: Tensor  # int64 [bs], rows that count in draft-extend: accepted drafts and the bonus
    extend_width: int | None = None  # rows of every request in draft-extend, padded; None: accept_length rows each
    frontier: Frontier | None = None  # None: before draft-extend
    normed: Tensor | None = None  # [bs, H], draft-extend's input of the logits, which a grammar masks anew

    @property
    def tree_mask(self) -> TreeMask | None:
        return None if self.frontier is None else self.frontier.tree_mask

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        req_to_token: Tensor,
        kv_lens_sum: int | None = None,
        out: Tensor | None = None,
    ) -> AttnArgs:
        """kv_indices, kv_indptr, qo_indptr and mask, page size 1.

        Draft-extend: paged_kernel_lens int64 [bs] are the lengths read, the extended rows included; it is causal. A
        draft step: they are committed lengths; topk rows read the window behind them too, under their lineage.
        """
        device, bs = paged_kernel_lens.device, len(req_pool_indices)
        if self.frontier is not None:
            paged_kernel_lens = paged_kernel_lens + self.frontier.window
            qo_indptr = even_indptr(bs, self.frontier.topk_index.shape[1], device)
        elif self.extend_width is not None:
            qo_indptr = even_indptr(bs, self.extend_width, device)
        else:
            qo_indptr = indptr_of(self.accept_length)
        kv_indptr, kv_indices = kv_arguments(req_pool_indices, paged_kernel_lens, req_to_token, kv_lens_sum, out)
        return kv_indices, kv_indptr, qo_indptr, self.tree_mask

    def generate_attn_arg_decode(
        self, req_pool_indices: Tensor, paged_kernel_lens: Tensor, req_to_token: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A draft step as bs * topk decode queries with explicit slots: kv_indices, kv_indptr, qo_indptr.

        paged_kernel_lens int64 [bs] are committed lengths. Each query reads step + 1 slots more: the prefix, its
        ancestors and itself.
        """
        assert self.frontier is not None, "draft steps follow draft-extend"
        lineage, seen = self.frontier.lineage, self.frontier.step + 1
        return beam_arguments(req_pool_indices, paged_kernel_lens, req_to_token, lineage, seen, out)


@dataclass(frozen=True)
class Frontier:
    """The topk nodes per request that one draft step feeds, and which slots each may see.

    Step i (0-based) feeds the nodes of level i + 1 at position seq_len + i. The node in column c writes window slot i *
    topk + c. `lineage[b, c]` marks the window slots of c's ancestors and of c itself, so a node never attends to
    another branch, whatever column its parent came from. Scores are log-probabilities: products would underflow and
    tie.
    """

    step: int
    topk_index: Tensor  # int64 [bs, topk], target vocabulary
    topk_logp: Tensor  # float32 [bs, topk], log-probabilities of the paths
    hidden_states: Tensor  # [bs * topk, H], the draft's feedback at the parents
    lineage: Tensor  # bool [bs, topk, (step + 1) * topk]
    window: int  # slots that all draft steps write together; what later steps write is masked

    @classmethod
    def first(cls, topk_logp: Tensor, topk_index: Tensor, hidden_states: Tensor, window: int) -> Frontier:
        """After draft-extend: every node's parent is the root."""
        bs, topk = topk_index.shape
        own = torch.eye(topk, dtype=torch.bool, device=topk_index.device).expand(bs, -1, -1)
        return cls(0, topk_index, topk_logp, hidden_states, own, window)

    def advance(self, child_tokens: Tensor, child_scores: Tensor, feedback: Tensor) -> tuple[Frontier, Tensor]:
        """The best topk of the topk * topk children, and their flat indices int64 [bs, topk].

        child_tokens, child_scores [bs, topk, topk] by parent and rank; feedback [bs * topk, H] of the parents.
        """
        bs, topk, _ = child_scores.shape
        scores, chosen = child_scores.flatten(1).topk(topk, dim=1)
        parent = torch.div(chosen, topk, rounding_mode="floor")  # [bs, topk], columns of this frontier
        tokens = child_tokens.flatten(1).gather(1, chosen)
        base = torch.arange(0, bs * topk, topk, device=parent.device)[:, None]
        hidden = feedback.index_select(0, (parent + base).view(-1))
        inherited = self.lineage.gather(1, parent[:, :, None].expand(-1, -1, self.lineage.shape[2]))
        own = torch.eye(topk, dtype=torch.bool, device=parent.device).expand(bs, -1, -1)
        lineage = torch.cat([inherited, own], dim=2)
        return Frontier(self.step + 1, tokens, scores, hidden, lineage, self.window), chosen

    @cached_property
    def tree_mask(self) -> TreeMask:
        """The lineage over the whole window; the columns of later steps are hidden."""
        bs, topk, reached = self.lineage.shape
        later = self.window - reached
        levels = torch.arange(self.window // topk, device=self.lineage.device).repeat_interleave(topk)
        return TreeMask(
            F.pad(self.lineage, (0, later)) if later else self.lineage,
            row_depths=levels.new_full((bs, topk), self.step),
            column_depths=levels.expand(bs, -1),
        )
