"""qo_indptr, kv_indptr and kv_indices: how a batch of requests reads and writes paged KV."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, Causal, Layout, TreeMask


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
    rows: Tensor, kv_lens: Tensor, req_to_token: Tensor, mask: Causal | TreeMask, layout: Layout
) -> AttentionBatch:
    """The attention contract's batch for requests `rows` whose last q_lens of kv_lens positions are the queries.

    Where all requests have as many queries, nothing but `layout.q_len` is taken from the host: a captured graph replays
    with other lengths.
    """
    if layout.q_len is not None:
        places = kv_lens[:, None] + torch.arange(-layout.q_len, 0, device=kv_lens.device)
        out_slots = req_to_token[rows[:, None], places].view(-1)  # a whole row may be half a megabyte
    else:
        table = req_to_token.index_select(0, rows)
        lens = zip(layout.q_lens, layout.kv_lens, strict=True)
        out_slots = torch.cat([table[i, n - q : n] for i, (q, n) in enumerate(lens)])
    return AttentionBatch(rows, kv_lens, req_to_token, out_slots.long(), mask, layout)
