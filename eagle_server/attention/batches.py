"""Attention batches: which KV slots each forward reads and writes. All batches are made here.

    forward         rows per request      slots read                        mask
    prompt chunks   the chunk             prefix and chunk                  causal
    draft-extend    extend_width          prefix and accepted tokens        causal
    draft step      topk                  prefix and the draft's window     each node's ancestor_mask
    static level    nodes with children   prefix and the draft's window     each node's ancestors
    block           its rows              prefix and the rows               none, or causal
    verify          nodes, or            prefix and the tree's window      the tree's mask; causal for a chain
                    the tree's own nodes
    mixed           verify's, then prompt chunks': each reads and sees what it does apart

The host plans a forward from its `Layout`. The batch holds the device tensors. As in SGLang, draft steps and verify
have a `spec_info`, which computes qo_indptr, kv_indptr and kv_indices (`attn_args_prefill`, `attn_args_decode`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, AttnArgs, Causal, Layout, PagedRequests, TreeMask
from eagle_server.attention.spec_info import (
    EagleDraftInput,
    EagleVerifyInput,
    draft_decode_arguments,
    even_indptr,
    kv_arguments,
)
from eagle_server.ops.device import upload
from eagle_server.ops.kv.indices import indptr_of, window_slots

MIXED_ROWS, MIXED_CHUNKS = 256, 8  # the most rows of prompt chunks in a mixed forward, and the most chunks
# For graphs chunks are cut into pieces of equal rows, the last one padded, so that a plan of equal rows serves all
# lengths. 32 rows of 4 query heads per KV head fill a tile of fa2, which has 128 rows.
PIECE_ROWS = MIXED_ROWS // MIXED_CHUNKS
CAPTURED_PIECES = (2, 8)  # numbers of pieces that graphs are captured for: 64 rows hold a short prompt, 256 all

# Arguments of FlashInfer's plan and run, computed on the device.


def attn_args_prefill(batch: AttentionBatch, out: Tensor | None = None) -> AttnArgs:
    """kv_indices, kv_indptr, qo_indptr and mask of a forward. `out`: see `kv_arguments`."""
    total = sum(batch.layout.kv_lens)
    if batch.spec_info is not None:
        return batch.spec_info.generate_attn_arg_prefill(
            batch.req_pool_indices, batch.spec_lens, batch.req_to_token, total, out
        )
    kv_indptr, kv_indices = kv_arguments(batch.req_pool_indices, batch.kv_lens, batch.req_to_token, total, out)
    q_lens, q_len, device = batch.layout.q_lens, batch.layout.q_len, batch.kv_lens.device
    if batch.row_slots is not None and q_len is not None:
        places = kv_indptr[1:, None] + torch.arange(-q_len, 0, device=device)
        kv_indices[places.view(-1)] = batch.row_slots.to(torch.int32)
    qo_indptr = indptr_of(upload(q_lens, device)) if q_len is None else even_indptr(len(q_lens), q_len, device)
    return kv_indices, kv_indptr, qo_indptr, batch.mask if isinstance(batch.mask, TreeMask) else None


def attn_args_decode(batch: AttentionBatch, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """kv_indices, kv_indptr and qo_indptr of a draft step. Each node is a decode query. `out`: see `kv_arguments`."""
    if isinstance(batch.spec_info, EagleDraftInput):
        return batch.spec_info.generate_attn_arg_decode(
            batch.req_pool_indices, batch.spec_lens, batch.req_to_token, out
        )
    assert isinstance(batch.mask, TreeMask) and batch.layout.num_visible is not None
    ancestor_mask, prefix = batch.mask.visible, batch.kv_lens - batch.mask.visible.shape[2]
    return draft_decode_arguments(
        batch.req_pool_indices, prefix, batch.req_to_token, ancestor_mask, batch.layout.num_visible, out
    )


# The batch and layout of each forward.


def prefill_batch(
    req_pool_indices: Tensor, kv_lens: Tensor, req_to_token: Tensor, mask: Causal | TreeMask, layout: Layout
) -> AttentionBatch:
    """A forward whose query rows are the last q_lens of each request's kv_lens positions: prompts, draft-extend.

    If all requests have the same number of queries, the host gives only `layout.q_len`, so a captured graph replays
    with other lengths.
    """
    if layout.q_len is not None:
        out_cache_loc = cache_locations(req_pool_indices, kv_lens - layout.q_len, layout.q_len, req_to_token)
    else:
        table = req_to_token.index_select(0, req_pool_indices)
        lens = zip(layout.q_lens, layout.kv_lens, strict=True)
        out_cache_loc = torch.cat([table[i, n - q : n] for i, (q, n) in enumerate(lens)]).long()
    return AttentionBatch(req_pool_indices, kv_lens, req_to_token, out_cache_loc, mask, layout)


def extend_layout(seq_lens: Sequence[int], extend_lens: Sequence[int], width: int) -> Layout:
    """Draft-extend with `width` rows per request. Only the first extend_lens rows are used; the rest is padding."""
    lens = zip(seq_lens, extend_lens, strict=True)
    return Layout((width,) * len(seq_lens), tuple(n - count + width for n, count in lens))


def extend_batch(requests: PagedRequests, first: Tensor, layout: Layout) -> AttentionBatch:
    """Draft-extend, causal. The rows start at position first, int64 [bs]."""
    kv_lens = first + layout.q_lens[0]
    return prefill_batch(requests.req_pool_indices, kv_lens, requests.req_to_token, Causal(), layout)


def window_layout(seq_lens: Sequence[int], rows: int, window: int) -> Layout:
    """Rows over a prefix and `window` slots behind it, under a mask: draft steps, levels of static trees, blocks.

    Each forward reads the whole window. The slots of later forwards are masked, but must hold finite numbers. So draft
    steps of equally many rows have one layout, and one plan serves them all.
    """
    return Layout((rows,) * len(seq_lens), tuple(length + window for length in seq_lens), mask_width=window)


def draft_decode_layout(seq_lens: Sequence[int], step: int, topk: int) -> Layout:
    """One draft step, for backends that give each node its own list of slots."""
    window = (step + 1) * topk
    lens = tuple(length + window for length in seq_lens)
    return Layout((topk,) * len(lens), lens, mask_width=window, num_visible=step + 1)


def draft_step_batch(
    draft: EagleDraftInput,
    out_cache_loc: Tensor,
    requests: PagedRequests,
    layout: Layout,
    before: AttentionBatch | None = None,
) -> AttentionBatch:
    """A draft step: topk rows that write the window slots out_cache_loc int64 [bs * topk].

    `before`: the previous step's batch. If its layout is the same object, its kv_indices are used again.
    """
    assert layout.mask_width is not None
    mask = draft.tree_mask
    if before is not None and before.layout is layout:
        return replace(before, spec_info=draft, mask=mask, out_cache_loc=out_cache_loc, keeps_slots=True)
    indices, lens, req_to_token = requests.req_pool_indices, requests.seq_lens, requests.req_to_token
    return AttentionBatch(
        indices, lens + layout.mask_width, req_to_token, out_cache_loc, mask, layout, draft, paged_kernel_lens=lens
    )


def window_batch(mask: TreeMask, start: int, requests: PagedRequests, layout: Layout) -> AttentionBatch:
    """The rows of a `window_layout`. They write the window's slots from `start` on."""
    assert layout.mask_width is not None
    indices, lens, req_to_token = requests.req_pool_indices, requests.seq_lens, requests.req_to_token
    out_cache_loc = cache_locations(indices, lens + start, layout.q_lens[0], req_to_token)
    return AttentionBatch(indices, lens + layout.mask_width, req_to_token, out_cache_loc, mask, layout)


def verify_layout(seq_lens: Sequence[int], nodes: int, topk: int, counts: Sequence[int] | None = None) -> Layout:
    """The verify forward of requests with these lengths. `counts`: the nodes of each tree, if they differ."""
    q_lens = (nodes,) * len(seq_lens) if counts is None else tuple(counts)
    kv_lens = tuple(map(operator.add, seq_lens, q_lens))
    return Layout(q_lens, kv_lens, mask_width=None if topk == 1 else nodes)


def verify_batch(verify: EagleVerifyInput, requests: PagedRequests, layout: Layout) -> AttentionBatch:
    """The verify forward: node i writes window slot i."""
    tree, mask = verify.tree, verify.tree_mask
    indices, lens, req_to_token = requests.req_pool_indices, requests.seq_lens, requests.req_to_token
    slots = cache_locations(indices, lens, max(layout.q_lens), req_to_token)
    kv_lens = lens + (layout.q_lens[0] if tree.counts is None else tree.counts)
    return AttentionBatch(
        indices,
        kv_lens,
        req_to_token,
        slots if tree.rows is None else slots.index_select(0, tree.rows),
        Causal() if mask is None or layout.mask_width is None else mask,
        layout,
        verify,
        paged_kernel_lens=lens,
    )


def pieces_layout(chunks: Sequence[tuple[int, int]], count: int) -> Layout:
    """Chunks (first position, rows), cut into pieces of PIECE_ROWS rows, and padding: `count` pieces.

    A piece is a request of its own: it sees the pieces before it in KV. The last piece of a chunk may end behind it.
    Padding reads as many slots as it has rows, because causal rows are the last ones of their KV.
    """
    kv_lens = [start + end for start, rows in chunks for end in piece_ends(rows)]
    kv_lens += [PIECE_ROWS] * (count - len(kv_lens))
    return Layout((PIECE_ROWS,) * count, tuple(kv_lens))


def pieces_batch(requests: PagedRequests, out_cache_loc: Tensor, row_slots: Tensor, layout: Layout) -> AttentionBatch:
    """The pieces of `pieces_layout`. Their seq_lens are the lengths that they read.

    Padding rows write slot 0. `row_slots`: what they read instead, a slot of their own request, because slot 0 may hold
    NaN if the text of another request gave some.
    """
    indices, kv_lens, req_to_token = requests.req_pool_indices, requests.seq_lens, requests.req_to_token
    return AttentionBatch(indices, kv_lens, req_to_token, out_cache_loc, Causal(), layout, row_slots=row_slots)


def piece_ends(rows: int) -> range:
    """Where the pieces of a chunk end, from its first row on."""
    return range(PIECE_ROWS, rows + PIECE_ROWS, PIECE_ROWS)


def mixed_layout(trees: Layout, prompts: Layout) -> Layout:
    """A verify forward and prompt chunks in one."""
    lens = (trees.q_lens + prompts.q_lens, trees.kv_lens + prompts.kv_lens)
    return Layout(*lens, mask_width=trees.mask_width, chunks=len(prompts.q_lens))


def mixed_batch(trees: AttentionBatch, prompts: AttentionBatch, layout: Layout) -> AttentionBatch:
    """The rows of the trees, then those of the prompt chunks. Both batches have the same page table."""
    indices, kv_lens, slots = (
        torch.cat([getattr(batch, name) for batch in (trees, prompts)])
        for name in ("req_pool_indices", "kv_lens", "out_cache_loc")
    )
    row_slots = prompts.row_slots
    return AttentionBatch(indices, kv_lens, trees.req_to_token, slots, trees.mask, layout, row_slots=row_slots)


def parts_of(batch: AttentionBatch) -> tuple[AttentionBatch, AttentionBatch]:
    """What `mixed_batch` has put together."""
    trees, prompts = batch.layout.parts
    requests, rows = len(trees.q_lens), sum(trees.q_lens)
    indices, kv_lens = (each.tensor_split([requests]) for each in (batch.req_pool_indices, batch.kv_lens))
    slots, table = batch.out_cache_loc.tensor_split([rows]), batch.req_to_token
    return (
        AttentionBatch(indices[0], kv_lens[0], table, slots[0], batch.mask, trees),
        AttentionBatch(indices[1], kv_lens[1], table, slots[1], Causal(), prompts, row_slots=batch.row_slots),
    )


def cache_locations(req_pool_indices: Tensor, first: Tensor, count: int, req_to_token: Tensor) -> Tensor:
    """Slots int64 [bs * count] of `count` positions per request, starting at first, int64 [bs]."""
    return window_slots(req_to_token, req_pool_indices, first, count).view(-1)
