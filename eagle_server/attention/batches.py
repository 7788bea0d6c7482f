"""Attention batches: which KV slots each forward reads and writes. All batches are made here.

    forward         rows per request      slots read                        mask
    prompt chunks   the chunk             prefix and chunk                  causal
    draft-extend    extend_width          prefix and accepted tokens        causal
    draft step      topk                  prefix and the draft's window     each node's ancestor_mask
    static level    nodes with children   prefix and the draft's window     each node's ancestors
    verify          draft_token_num, or   prefix and the tree's window      the tree's mask; causal for a chain
                    the tree's own nodes

The host plans a forward from its `Layout`. The batch holds the device tensors. As in SGLang, draft-extend, draft steps
and verify have a `spec_info`, which computes qo_indptr, kv_indptr and kv_indices (`attn_args_prefill`,
`attn_args_decode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle_server.attention.interface import (
    AttentionBatch,
    AttnArgs,
    Causal,
    DraftStepInput,
    Layout,
    SpecInput,
    TreeMask,
    VerifyInput,
)
from eagle_server.ops.indices import build_draft_decode_kv_indices, build_kv_indices, indptr_of, window_slots
from eagle_server.ops.upload import upload

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
    qo_indptr = indptr_of(upload(q_lens, device)) if q_len is None else even_indptr(len(q_lens), q_len, device)
    return kv_indices, kv_indptr, qo_indptr, batch.mask if isinstance(batch.mask, TreeMask) else None


def attn_args_decode(batch: AttentionBatch, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """kv_indices, kv_indptr and qo_indptr of a draft step. Each node is a decode query. `out`: see `kv_arguments`."""
    if isinstance(batch.spec_info, DraftStepInput):
        return batch.spec_info.generate_attn_arg_decode(
            batch.req_pool_indices, batch.spec_lens, batch.req_to_token, out
        )
    assert isinstance(batch.mask, TreeMask) and batch.layout.num_visible is not None
    ancestor_mask, prefix = batch.mask.visible, batch.kv_lens - batch.mask.visible.shape[2]
    return draft_decode_arguments(
        batch.req_pool_indices, prefix, batch.req_to_token, ancestor_mask, batch.layout.num_visible, out
    )


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
    starts = req_pool_indices * req_to_token.shape[1] - kv_indptr[:-1]  # in the flat table, less what stands before
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


# The batch and layout of each forward.


def prefill_batch(
    req_pool_indices: Tensor, kv_lens: Tensor, req_to_token: Tensor, mask: Causal | TreeMask, layout: Layout
) -> AttentionBatch:
    """Prompt chunks. Other forwards without a spec_info use it too. The queries are the last q_lens of kv_lens
    positions.

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


def extend_batch(
    draft: SpecInput, first: Tensor, req_pool_indices: Tensor, req_to_token: Tensor, layout: Layout
) -> AttentionBatch:
    """Draft-extend of an EagleDraftInput, causal. The rows start at position first, int64 [bs]."""
    width = layout.q_lens[0]
    return _speculative(draft, req_pool_indices, first + width, first + width, first, req_to_token, layout)


def draft_layout(seq_lens: Sequence[int], forwards: int, topk: int) -> Layout:
    """One layout for all draft steps of requests with these lengths, so one plan serves all `forwards` steps.

    Each step reads the whole window. The columns of later steps are masked, but must hold finite numbers.
    """
    window = forwards * topk
    return Layout((topk,) * len(seq_lens), tuple(length + window for length in seq_lens), mask_width=window)


def draft_decode_layout(seq_lens: Sequence[int], step: int, topk: int) -> Layout:
    """One draft step, for backends that give each node its own list of slots."""
    window = (step + 1) * topk
    lens = tuple(length + window for length in seq_lens)
    return Layout((topk,) * len(lens), lens, mask_width=window, num_visible=step + 1)


def draft_step_batch(  # noqa: PLR0913, PLR0917
    draft: SpecInput,
    out_cache_loc: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    layout: Layout,
    before: AttentionBatch | None = None,
) -> AttentionBatch:
    """A draft step of an EagleDraftInput: topk rows that write the window slots out_cache_loc int64 [bs * topk].

    `before`: the previous step's batch. With the same layout it has listed the slots already.
    """
    assert layout.mask_width is not None
    mask = draft.tree_mask
    assert mask is not None
    if before is not None and before.layout is layout:
        return replace(before, spec_info=draft, mask=mask, out_cache_loc=out_cache_loc, keeps_slots=True)
    kv_lens = seq_lens + layout.mask_width
    return AttentionBatch(req_pool_indices, kv_lens, req_to_token, out_cache_loc, mask, layout, draft, seq_lens)


def static_level_layout(seq_lens: Sequence[int], rows: int, window: int) -> Layout:
    """A level of a static tree that feeds `rows` nodes. The window has one slot per fed node of the whole tree."""
    return Layout((rows,) * len(seq_lens), tuple(length + window for length in seq_lens), mask_width=window)


def static_level_batch(  # noqa: PLR0913, PLR0917  `start` belongs to the mask
    mask: TreeMask, start: int, req_pool_indices: Tensor, seq_lens: Tensor, req_to_token: Tensor, layout: Layout
) -> AttentionBatch:
    """A level of a static tree. Its fed nodes write the window slots from `start` on."""
    assert layout.mask_width is not None
    out_cache_loc = cache_locations(req_pool_indices, seq_lens + start, layout.q_lens[0], req_to_token)
    return AttentionBatch(req_pool_indices, seq_lens + layout.mask_width, req_to_token, out_cache_loc, mask, layout)


def verify_layout(
    seq_lens: Sequence[int], draft_token_num: int, topk: int, counts: Sequence[int] | None = None
) -> Layout:
    """The verify forward of requests with these lengths. `counts`: the nodes of each tree, if they differ."""
    q_lens = (draft_token_num,) * len(seq_lens) if counts is None else tuple(counts)
    kv_lens = tuple(map(sum, zip(seq_lens, q_lens, strict=True)))
    return Layout(q_lens, kv_lens, mask_width=None if topk == 1 else draft_token_num)


def verify_batch(
    tree: VerifyInput, req_pool_indices: Tensor, seq_lens: Tensor, req_to_token: Tensor, layout: Layout
) -> AttentionBatch:
    """The verify forward of an EagleVerifyInput: node i writes window slot i."""
    kv_lens = seq_lens + (layout.q_lens[0] if tree.counts is None else tree.counts)
    batch = _speculative(tree, req_pool_indices, seq_lens, kv_lens, seq_lens, req_to_token, layout)
    return batch if tree.rows is None else replace(batch, out_cache_loc=batch.out_cache_loc.index_select(0, tree.rows))


def cache_locations(req_pool_indices: Tensor, first: Tensor, count: int, req_to_token: Tensor) -> Tensor:
    """Slots int64 [bs * count] of `count` positions per request, starting at first, int64 [bs]."""
    return window_slots(req_to_token, req_pool_indices, first, count).view(-1)


def _speculative(  # noqa: PLR0913, PLR0917
    spec_info: SpecInput,
    req_pool_indices: Tensor,
    paged_kernel_lens: Tensor,
    kv_lens: Tensor,
    first: Tensor,
    req_to_token: Tensor,
    layout: Layout,
) -> AttentionBatch:
    out_cache_loc = cache_locations(req_pool_indices, first, max(layout.q_lens), req_to_token)
    mask = Causal() if layout.mask_width is None else spec_info.tree_mask
    assert mask is not None
    return AttentionBatch(
        req_pool_indices, kv_lens, req_to_token, out_cache_loc, mask, layout, spec_info, paged_kernel_lens
    )
