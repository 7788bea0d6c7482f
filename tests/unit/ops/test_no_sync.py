"""The torch twins never read a value to determine a shape. CUDA graphs require this.

Meta tensors have no values: `.item()`, a boolean selection or `nonzero` fails on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.attention.spec_info import retrive_links
from eagle_server.ops.kv.indices import build_draft_decode_kv_indices, build_kv_indices, draft_slots, window_slots
from eagle_server.ops.kv.move import keep_accepted
from eagle_server.ops.kv.prefill_plan import PrefillPlan, plan_prefill
from eagle_server.ops.sampling.correction import Correction, correct_guesses
from eagle_server.ops.sampling.draw import draw_tokens
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.ops.sampling.topk import DrawNoise, score_children, topk_logprobs
from eagle_server.ops.sampling.truncate import truncate_rows
from eagle_server.ops.tree.accept import walk_tree
from eagle_server.ops.tree.accepted import extend_rows, newest_rows, next_lengths, store_accepted
from eagle_server.ops.tree.build import link_tree, select_nodes
from eagle_server.ops.tree.candidates import CandidatePool, Children, best_candidates, best_children
from eagle_server.ops.tree.mask import SlidingWindow, pack_tree_mask
from tests.support.reference import verify_tree_greedy


def valueless(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_no_twin_reads_a_value() -> None:
    bs, size, topk, steps, vocab = 3, 6, 2, 3, 50
    lens, nodes, mask = valueless(bs), valueless(bs, size), valueless(bs, size, size, dtype=torch.bool)
    table, indices = valueless(9, 40, dtype=torch.int32), valueless(400, dtype=torch.int32)
    indptr = valueless(bs + 1, dtype=torch.int32)
    assert build_kv_indices(table, lens, lens, indices).shape == (bs + 1,)
    assert window_slots(table, lens, lens, 4).shape == (bs, 4)
    assert draft_slots(table, lens, lens, steps, topk)[1].shape == (steps, bs * topk)
    info = [8, bs * size, 224, 16, 0, 32, 64, 256, 96, 112, 0, 0, 400, 1, 1]
    workspace = valueless(512, dtype=torch.uint8)
    plan_prefill(indptr, PrefillPlan.of(workspace, info, (indptr, indptr[1:]), size, topk, -1, 400))
    ancestor_mask = valueless(bs, topk, 4, dtype=torch.bool)
    assert build_draft_decode_kv_indices(table, lens, lens, ancestor_mask, 2, indices).shape == (bs * topk + 1,)
    keep_accepted(valueless(2, 2, 40, 1, 8), 2, valueless(bs, steps), lens, lens, table)
    out = valueless(100, dtype=torch.uint8)
    pack_tree_mask(mask, lens, out, indptr, SlidingWindow(4, nodes, nodes))
    parents, depths, ancestors = link_tree(nodes[:, 1:], valueless(bs, topk * (steps - 1) + 1), topk, steps)
    assert (parents.shape, depths.shape, ancestors.shape) == ((bs, size), (bs, size), (bs, size, size))
    links = retrive_links(parents)
    path, *_ = walk_tree(nodes, parents, depths, ancestors, nodes, valueless(bs, size, dtype=torch.float32), steps)
    assert path.shape == verify_tree_greedy(nodes, *links, nodes, steps)[0].shape == (bs, steps + 1)
    children = valueless(bs, topk, topk, dtype=torch.float32)
    best = best_children(children, valueless(bs, topk, topk), ancestor_mask, 1)
    assert best.ancestor_mask.shape == ancestor_mask.shape
    assert best_candidates(children.flatten(1), valueless(bs, topk * topk), None, 3).tokens.shape == (bs, 3)
    ratios = valueless(2, steps, 2, 5, dtype=torch.float32)
    correction = Correction(ratios, ratios[0, 0, 0, 1:], lens, 1, 0.0)
    assert correct_guesses(children, correction).shape == children.shape
    stored = valueless(9, steps + 2), valueless(9, steps + 2, 7, dtype=torch.float32)
    features = valueless(bs * size, 7, dtype=torch.float32)
    assert store_accepted(features, path, path, lens, *stored).shape == (*path.shape, 7)
    assert next_lengths(lens, lens, path).verified_id.shape == (bs,)
    assert extend_rows(*stored, lens, lens, lens, 4).features.shape == (bs * 4, 7)
    assert newest_rows(features, features, lens, topk)[1].shape == (bs * topk, 7)
    logits = valueless(bs, vocab, dtype=torch.float32)
    assert gumbel(lens, lens, vocab).shape == (bs, vocab)
    assert draw_tokens(logits, lens, lens, logits[:, 0])[0].shape == (bs,)
    limits = valueless(3, bs, dtype=torch.float32)
    assert truncate_rows(logits[:, None], limits[0], limits, lens, lens).shape == (bs, 1, vocab)
    assert topk_logprobs(logits, topk)[1].shape == (bs, topk)
    noise = DrawNoise(lens, lens, logits[:, 0])
    assert topk_logprobs(logits, topk, valueless(vocab), noise)[1].shape == (bs, topk)
    first = Children(valueless(bs, topk), *2 * [valueless(bs, topk, dtype=torch.float32)])
    pool = CandidatePool.empty(first, steps)
    level = score_children(logits.repeat_interleave(topk, 0), first.scores, pool.level(1), None, noise, correction)
    assert level.scores.shape == children.shape
    assert select_nodes(lens, lens, pool, size - 1).mask.shape == (bs, size, size)
