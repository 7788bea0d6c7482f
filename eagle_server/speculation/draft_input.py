"""The draft side of a cycle: what draft-extend leaves behind, and the arguments of its passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, Layout, TreeMask
from eagle_server.speculation.attention_args import kv_arguments


@dataclass(frozen=True)
class EagleDraftInput:
    """State of each request between draft-extend and the last draft step.

    The first level of the tree needs no forward: it is the carried top-k. Scores are log-probabilities (their products
    would underflow and tie).
    """

    topk_logp: Tensor  # float32 [bs, topk]
    topk_index: Tensor  # int64 [bs, topk], target vocabulary
    hidden_states: Tensor  # [bs, H], the draft's feedback at the last extended row
    verified_id: Tensor  # int64 [bs]
    accept_length: Tensor  # int64 [bs], rows extended this cycle: accepted drafts + 1, or the prompt rows
    normed: Tensor | None = None  # [bs, H], of which the head made the logits behind topk

    def generate_attn_arg_prefill(
        self, req_pool_indices: Tensor, paged_kernel_lens: Tensor, req_to_token: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Arguments of draft-extend, page size 1: (kv_indices, kv_indptr, qo_indptr, no custom mask: it is causal).

        paged_kernel_lens int [bs] are the lengths read, the extended rows included.
        """
        kv_indptr, kv_indices = kv_arguments(req_pool_indices, paged_kernel_lens, req_to_token)
        qo_indptr = torch.zeros_like(kv_indptr)
        qo_indptr[1:] = self.accept_length.cumsum(0)
        return kv_indices, kv_indptr, qo_indptr, None

    def generate_attn_arg_decode(
        self,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        req_to_token: Tensor,
        frontier: Frontier | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of one draft step, the first by default: see `Frontier.generate_attn_arg_decode`."""
        step = frontier or Frontier.first(self)
        return step.generate_attn_arg_decode(req_pool_indices, paged_kernel_lens, req_to_token)


@dataclass(frozen=True)
class Frontier:
    """The topk nodes per request that one draft step feeds, and whom each may see.

    Step i (0-based) feeds the nodes of level i + 1 at position seq_len + i. Node (level i + 1, column c) writes window
    slot i * topk + c. `lineage[b, c]` marks the window slots of c's ancestors and of c itself, so a node never attends
    to another branch, whatever column its parent came from.
    """

    step: int
    tokens: Tensor  # int64 [bs, topk]
    hidden: Tensor  # [bs * topk, H]
    scores: Tensor  # float32 [bs, topk]
    lineage: Tensor  # bool [bs, topk, (step + 1) * topk]

    @classmethod
    def first(cls, draft: EagleDraftInput) -> Frontier:
        bs, topk = draft.topk_index.shape
        own = torch.eye(topk, dtype=torch.bool, device=draft.topk_index.device).expand(bs, -1, -1)
        hidden = draft.hidden_states.repeat_interleave(topk, dim=0)
        return cls(0, draft.topk_index, hidden, draft.topk_logp, own)

    def advance(self, child_tokens: Tensor, child_scores: Tensor, feedback: Tensor) -> tuple[Frontier, Tensor]:
        """The best topk of the topk * topk children, and which they are: flat indices int64 [bs, topk].

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
        return Frontier(self.step + 1, tokens, hidden, scores, torch.cat([inherited, own], dim=2)), chosen

    def attention_batch(self, rows: Tensor, seq_lens: Tensor, req_to_token: Tensor, layout: Layout) -> AttentionBatch:
        """One pass of topk rows over prefix and window, under the lineage. Columns of later steps are hidden."""
        bs, topk, reached = self.lineage.shape
        assert layout.window is not None
        later = layout.window - reached
        device = self.tokens.device
        depths = torch.arange(layout.window // topk, device=device).repeat_interleave(topk)
        mask = TreeMask(
            F.pad(self.lineage, (0, later)) if later else self.lineage,
            row_depths=depths.new_full((bs, topk), self.step),
            column_depths=depths.expand(bs, -1),
        )
        places = seq_lens[:, None] + torch.arange(reached - topk, reached, device=device)
        out_slots = req_to_token[rows[:, None], places].view(-1).long()
        return AttentionBatch(rows, seq_lens + layout.window, req_to_token, out_slots, mask, layout)

    def generate_attn_arg_decode(
        self, req_pool_indices: Tensor, seq_lens: Tensor, req_to_token: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same pass as bs * topk decode queries with explicit slots: (kv_indices, kv_indptr, qo_indptr).

        Each reads seq_len + step + 1 slots: the prefix, its ancestors and itself.
        """
        bs, topk, window = self.lineage.shape
        offset = torch.arange(req_to_token.shape[1], device=seq_lens.device)[None] - seq_lens[:, None]  # [bs, width]
        place = offset.clamp(0, window - 1)[:, None].expand(-1, topk, -1)
        seen = (offset < 0)[:, None] | (self.lineage.gather(2, place) & (offset < window)[:, None])
        table = req_to_token.index_select(0, req_pool_indices)[:, None].expand(-1, topk, -1)
        kv_lens = (seq_lens + self.step + 1).repeat_interleave(topk)
        kv_indptr = torch.zeros(bs * topk + 1, dtype=torch.int32, device=seq_lens.device)
        kv_indptr[1:] = kv_lens.cumsum(0)
        qo_indptr = torch.arange(bs * topk + 1, dtype=torch.int32, device=seq_lens.device)
        return table[seen], kv_indptr, qo_indptr


def draft_layout(seq_lens: tuple[int, ...], forwards: int, topk: int) -> Layout:
    """Every draft step of requests of these committed lengths: one plan serves all `forwards` of them.

    Each reads the whole window; the columns that later steps will write are masked, and must hold finite numbers.
    """
    window = forwards * topk
    return Layout((topk,) * len(seq_lens), tuple(length + window for length in seq_lens), window=window)


def beam_layout(seq_lens: tuple[int, ...], step: int, topk: int) -> Layout:
    """Draft step `step` alone, for backends that give each node a list of the slots it reads."""
    window = (step + 1) * topk
    lens = tuple(length + window for length in seq_lens)
    return Layout((topk,) * len(lens), lens, window=window, seen=step + 1)
