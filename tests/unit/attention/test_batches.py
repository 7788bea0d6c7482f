"""Index arrays of attention batches: the slots that a forward reads and writes."""

from __future__ import annotations

import torch

from eagle_server.attention.batches import kv_arguments, prefill_batch
from eagle_server.attention.interface import Causal, Layout
from eagle_server.speculation.draft_input import EagleDraftInput

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


def test_draft_extend_has_one_query_per_accepted_token_and_one_for_the_bonus() -> None:
    """Section 13 of the reference: qo_indptr is cumsum(a + 1), not one query per request. It is causal: no mask."""
    draft = EagleDraftInput(
        verified_id=torch.tensor([7, 8, 9]),
        extend_lens=torch.tensor([1, 4, 2]),  # rows: accepted drafts and the bonus
    )
    req_pool_indices, lens = torch.tensor([0, 1, 2]), torch.tensor([5, 9, 2])
    kv_indices, kv_indptr, qo_indptr, mask = draft.generate_attn_arg_prefill(req_pool_indices, lens, REQ_TO_TOKEN)
    assert qo_indptr.tolist() == [0, 1, 5, 7]
    assert kv_indptr.tolist() == [0, 5, 14, 16]
    assert kv_indices.tolist() == [*range(300, 305), *range(320, 329), 340, 341]
    assert mask is None
