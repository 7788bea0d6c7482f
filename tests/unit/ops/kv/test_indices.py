"""kv_indices from the page table: torch twin and kernel against slices of the table."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from eagle_server.attention.spec_info import DraftWindow, EagleDraftInput
from eagle_server.ops.kv.indices import build_draft_decode_kv_indices, build_kv_indices, draft_slots, window_slots
from tests.support.kernels import DEVICE, each_variant, generator, on_device

UNTOUCHED = -7


def page_table(bs: int, width: int) -> tuple[Tensor, Tensor]:
    """A table of shuffled slots with more rows than requests, and `bs` shuffled req_pool_indices."""
    source = generator(bs, width)
    table = torch.randperm((bs + 3) * width, generator=source).view(bs + 3, width).int()
    return on_device(table, torch.randperm(bs + 3, generator=source)[:bs])


@each_variant(build_kv_indices)
@pytest.mark.parametrize("lens_type", [torch.int32, torch.int64])
@pytest.mark.parametrize(("bs", "width"), [(1, 5), (3, 40), (5, 1100), (131, 3)])
def test_the_slots_of_each_request_are_in_token_order(
    variant: str, bs: int, width: int, lens_type: torch.dtype
) -> None:
    table, req_pool_indices = page_table(bs, width)
    kv_lens = torch.randint(0, width + 1, (bs,), generator=generator(width)).to(lens_type).to(DEVICE)
    kv_lens[0] = width
    out = torch.full((bs * width + 9,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    kv_indptr = build_kv_indices(table, req_pool_indices, kv_lens, out)
    assert kv_indptr.dtype is torch.int32
    assert kv_indptr.tolist() == [0, *itertools.accumulate(kv_lens.tolist())]
    slots = [slot for row, n in zip(req_pool_indices, kv_lens, strict=True) for slot in table[row, :n].tolist()]
    assert out.tolist() == slots + [UNTOUCHED] * (len(out) - len(slots))


def test_a_view_of_a_wider_table_is_accepted() -> None:
    """A view of a wider table, as for the first slot of each page."""
    table = torch.arange(24, dtype=torch.int32, device=DEVICE).view(2, 12)[:, :6]
    out = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    req_pool_indices, lens = on_device(torch.tensor([1, 0]), torch.tensor([3, 2]))
    assert build_kv_indices(table, req_pool_indices, lens, out).tolist() == [0, 3, 5]
    assert out.tolist() == [12, 13, 14, 0, 1]


@each_variant(window_slots)
@pytest.mark.parametrize(("bs", "width", "count", "offset"), [(1, 9, 1, 0), (3, 40, 7, 2), (4, 1100, 700, -3)])
def test_a_windows_slots_are_those_of_its_positions(variant: str, bs: int, width: int, count: int, offset: int) -> None:
    table, req_pool_indices = page_table(bs, width)
    starts = torch.randint(max(0, -offset), width - count - max(0, offset) + 1, (bs,), generator=generator(width))
    found = window_slots(table, req_pool_indices, starts.to(DEVICE), count, offset=offset)
    assert found.dtype is torch.int64
    for row, start, slots in zip(req_pool_indices.tolist(), starts.tolist(), found, strict=True):
        assert torch.equal(slots, table[row, start + offset : start + offset + count].long())


@each_variant(draft_slots)
@pytest.mark.parametrize(("bs", "steps", "topk"), [(1, 5, 8), (3, 1, 2), (4, 7, 3), (2, 40, 10), (2, 0, 4)])
def test_a_step_has_the_slots_behind_those_of_the_step_before(variant: str, bs: int, steps: int, topk: int) -> None:
    width = steps * topk + 9
    table, req_pool_indices = page_table(bs, width)
    lens = torch.randint(0, 10, (bs,), generator=generator(width))
    slots, positions = draft_slots(table, req_pool_indices, lens.to(DEVICE), steps, topk)
    assert slots.shape == positions.shape == (steps, bs * topk)
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), lens.tolist(), strict=True)):
        for step in range(steps):
            first, own = length + step * topk, slice(b * topk, (b + 1) * topk)
            assert torch.equal(slots[step, own], table[row, first : first + topk].long())
            assert positions[step, own].tolist() == [length + step] * topk


def beam(bs: int, topk: int, step: int) -> Tensor:
    """ancestor_mask [bs, topk, (step + 1) * topk]: one random ancestor per level, and the node itself."""
    source = generator(bs, topk, step)
    ancestor_mask = torch.zeros(bs, topk, step + 1, topk, dtype=torch.bool)
    choice = torch.randint(topk, (bs, topk, step + 1, 1), generator=source)
    choice[:, :, step, 0] = torch.arange(topk)
    return ancestor_mask.scatter(3, choice, value=True).flatten(2)


@each_variant(build_draft_decode_kv_indices)
@pytest.mark.parametrize(("bs", "topk", "step", "width"), [(1, 1, 0, 6), (3, 4, 2, 50), (5, 3, 4, 700), (2, 8, 5, 64)])
def test_draft_step_queries_read_the_prefix_their_ancestors_and_themselves(
    variant: str, bs: int, topk: int, step: int, width: int
) -> None:
    table, req_pool_indices = page_table(bs, width)
    ancestor_mask = beam(bs, topk, step)
    window, seen = ancestor_mask.shape[2], step + 1
    seq_lens = torch.randint(0, width - window + 1, (bs,), generator=generator(step))
    seq_lens[-1] = width - window
    expected, ends = [], [0]
    for b, k in itertools.product(range(bs), range(topk)):
        length = int(seq_lens[b])
        read = [*range(length), *(length + w for w in range(window) if ancestor_mask[b, k, w])]
        expected.append(table[req_pool_indices[b]].cpu()[read])
        ends.append(ends[-1] + len(read))
    out = torch.full((bs * topk * width,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    lens, ancestor_mask = on_device(seq_lens, ancestor_mask)
    kv_indptr = build_draft_decode_kv_indices(table, req_pool_indices, lens, ancestor_mask, seen, out)
    assert kv_indptr.dtype is torch.int32
    assert kv_indptr.tolist() == ends
    assert out[: ends[-1]].tolist() == torch.cat(expected).tolist()
    assert set(out[ends[-1] :].tolist()) <= {UNTOUCHED}

    draft = EagleDraftInput(step, lens, lens, lens, ancestor_mask, DraftWindow.of(topk, window, DEVICE))
    slots, indptr, _ = draft.generate_attn_arg_decode(req_pool_indices, lens, table)
    assert torch.equal(out[: ends[-1]], slots)
    assert torch.equal(kv_indptr, indptr)


@each_variant(build_draft_decode_kv_indices)
def test_the_worked_examples_second_draft_step(variant: str) -> None:
    """Sections 4 and 5 of the reference: both nodes are children of the first node of the previous level."""
    table = torch.arange(100, 120, dtype=torch.int32, device=DEVICE).view(2, 10)
    ancestor_mask = torch.tensor([[[1, 0, 1, 0], [1, 0, 0, 1]]], dtype=torch.bool)
    req_pool_indices, lens, ancestor_mask = on_device(torch.tensor([1]), torch.tensor([4]), ancestor_mask)
    out = torch.zeros(12, dtype=torch.int32, device=DEVICE)
    kv_indptr = build_draft_decode_kv_indices(table, req_pool_indices, lens, ancestor_mask, 2, out)
    assert kv_indptr.tolist() == [0, 6, 12]
    assert [slot - 110 for slot in out.tolist()] == [0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 7]
