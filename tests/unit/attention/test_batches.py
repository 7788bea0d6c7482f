"""Index arrays of attention batches: the slots that a forward reads and writes."""

from __future__ import annotations

import torch

from eagle_server.attention.batches import attn_args_prefill, extend_batch, extend_layout, prefill_batch
from eagle_server.attention.interface import Causal, Layout, PagedRequests
from eagle_server.attention.spec_info import kv_arguments

REQ_TO_TOKEN = torch.arange(300, 360, dtype=torch.int32).view(3, 20)


def test_kv_arguments_list_each_requests_slots_in_token_order() -> None:
    kv_indptr, kv_indices = kv_arguments(torch.tensor([2, 0, 1]), torch.tensor([3, 1, 20]), REQ_TO_TOKEN)
    assert kv_indptr.tolist() == [0, 3, 4, 24]
    assert kv_indptr.dtype is torch.int32
    assert kv_indices.tolist() == [340, 341, 342, 300, *range(320, 340)]


def test_a_batch_writes_its_last_slots() -> None:
    ragged = Layout((2, 3), (5, 3))
    batch = prefill_batch(torch.tensor([1, 0]), torch.tensor([5, 3]), REQ_TO_TOKEN, Causal(), ragged)
    assert ragged.q_len is None
    assert batch.out_cache_loc.tolist() == [323, 324, 300, 301, 302]
    uniform = Layout((2, 2), (5, 3))
    batch = prefill_batch(torch.tensor([1, 0]), torch.tensor([5, 3]), REQ_TO_TOKEN, Causal(), uniform)
    assert uniform.q_len == 2
    assert batch.out_cache_loc.tolist() == [323, 324, 301, 302]


def test_draft_extend_has_a_query_for_every_row_that_may_be_accepted() -> None:
    """As many for every request, so that its shapes depend on no acceptance: those that count come first."""
    extend_lens, lens = (1, 4, 2), (5, 9, 2)  # accepted drafts and the bonus
    layout = extend_layout(lens, extend_lens, width=4)
    assert (layout.q_lens, layout.kv_lens) == ((4, 4, 4), (8, 9, 4))
    requests = PagedRequests(torch.tensor([0, 1, 2]), torch.tensor(lens), REQ_TO_TOKEN)
    batch = extend_batch(requests, requests.seq_lens - torch.tensor(extend_lens), layout)
    kv_indices, kv_indptr, qo_indptr, mask = attn_args_prefill(batch)
    assert qo_indptr.tolist() == [0, 4, 8, 12]
    assert kv_indptr.tolist() == [0, 8, 17, 21]
    assert kv_indices.tolist() == [*range(300, 308), *range(320, 329), *range(340, 344)]
    assert batch.out_cache_loc.tolist() == [*range(304, 308), *range(325, 329), *range(340, 344)]
    assert mask is None
