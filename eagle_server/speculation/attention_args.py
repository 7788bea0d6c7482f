"""qo_indptr, kv_indptr and kv_indices: how a batch of requests reads and writes paged KV."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, Causal, TreeMask


def indptr(lens: tuple[int, ...], device: torch.device) -> Tensor:
    """[0, l0, l0 + l1, ...] as int32 [len(lens) + 1]."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)


def kv_arguments(req_pool_indices: Tensor, kv_lens: Tensor, req_to_token: Tensor) -> tuple[Tensor, Tensor]:
    """kv_indptr int32 [bs + 1] and kv_indices int32 [sum kv_lens] (slots, page size 1), from device tensors."""
    kv_indptr = torch.zeros(len(kv_lens) + 1, dtype=torch.int32, device=kv_lens.device)
    kv_indptr[1:] = kv_lens.cumsum(0)
    table = req_to_token.index_select(0, req_pool_indices)
    columns = torch.arange(table.shape[1], device=table.device)
    return kv_indptr, table[columns[None] < kv_lens[:, None]]


def page_arguments(
    req_pool_indices: Tensor, kv_lens: Tensor, req_to_token: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """kv_indptr, kv_indices and kv_last_page_len counted in pages, as FlashInfer's paged wrappers take them."""
    pages = torch.div(kv_lens + page_size - 1, page_size, rounding_mode="floor")
    kv_indptr, first_slots = kv_arguments(req_pool_indices, pages, req_to_token[:, ::page_size])
    last_page_len = (kv_lens - 1) % page_size + 1
    return kv_indptr, torch.div(first_slots, page_size, rounding_mode="floor"), last_page_len.int()


def batch_arguments(
    rows: Tensor,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    req_to_token: Tensor,
    mask: Causal | TreeMask,
) -> AttentionBatch:
    """The attention contract's batch for requests `rows` whose last q_lens of kv_lens positions are the queries."""
    device = req_to_token.device
    if len(kv_lens) == 1:
        slots = req_to_token.index_select(0, rows)[0, : kv_lens[0]]
        out_slots = slots[kv_lens[0] - q_lens[0] :]
    else:
        table = req_to_token.index_select(0, rows)
        pieces = [table[i, :n] for i, n in enumerate(kv_lens)]
        slots = torch.cat(pieces)
        out_slots = torch.cat([piece[n - q :] for piece, n, q in zip(pieces, kv_lens, q_lens, strict=True)])
    return AttentionBatch(
        qo_indptr=indptr(q_lens, device),
        kv_indptr=indptr(kv_lens, device),
        kv_indices=slots,
        out_slots=out_slots.long(),
        mask=mask,
        q_lens_host=q_lens,
        kv_lens_host=kv_lens,
    )
