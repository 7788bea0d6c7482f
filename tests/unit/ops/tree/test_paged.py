"""Attention of a few rows over the page table: torch twin against a loop in float64, kernels against the twin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eagle_server.ops.tree import paged
from eagle_server.ops.tree.paged import PagedRows, paged_attention
from tests.support.kernels import each_variant, needs_triton, on_device, take

SLOTS = 480
# query heads, KV heads, head size, rows, window (0: causal), prefixes
SHAPES = [
    (4, 2, 64, 7, 13, (0, 90)),  # a draft step; one request has no prefix
    (8, 2, 64, 24, 24, (130, 64, 3)),  # a tree
    (2, 2, 128, 1, 1, (200,)),  # one row, several parts
    (6, 1, 64, 5, 0, (17, 65)),  # a chain
    (16, 1, 32, 64, 64, (100,)),  # more pairs than a tile
    (2, 1, 48, 2, 2, (5, 5)),  # a head size that is no power of two
]


@dataclass(frozen=True)
class Case:
    q: Tensor
    keys: Tensor
    values: Tensor
    rows: PagedRows
    sinks: Tensor | None

    def run(self) -> Tensor:
        out = torch.full_like(self.q, math.nan)
        return paged_attention(self.q, self.keys, self.values, self.rows, self.q.shape[2] ** -0.5, self.sinks, out)


def case(
    shape: tuple[int, int, int, int, int, tuple[int, ...]], dtype: torch.dtype, *, sinks: bool = False, sliding: int = 0
) -> Case:
    """The first row of a tree sees the first column alone. Slots that are not read hold NaN."""
    heads, kv_heads, dim, count, width, prefixes = shape
    source = torch.Generator().manual_seed(count)
    bs, window = len(prefixes), width or count
    lens = torch.tensor(prefixes) + window
    table = torch.randperm(SLOTS, generator=source)[: SLOTS // bs * bs].view(bs, -1)
    keys, values = torch.full((2, SLOTS, kv_heads, dim), math.nan, dtype=dtype)
    mask = torch.rand(bs, count, window, generator=source) < 0.4
    mask[:, :, 0] = True
    mask[:, 0, 1:] = False
    for request, length in enumerate(lens.tolist()):
        for pool in (keys, values):
            pool[table[request, :length]] = torch.randn(length, kv_heads, dim, generator=source).to(dtype)
    q = torch.randn(bs * count, heads, dim, generator=source).to(dtype)
    weights, depths = torch.randn(heads, generator=source), torch.randint(9, (bs, count), generator=source)
    q, keys, values, indices, lens, table, mask, weights, depths = on_device(
        q, keys, values, torch.arange(bs), lens, table.int(), mask, weights, depths
    )
    rows = PagedRows(indices, lens, table, mask if width else None, sliding, depths if width else None)
    return Case(q, keys, values, rows, weights if sinks else None)


def by_loops(given: Case) -> Tensor:
    rows, (heads, kv_heads) = given.rows, (given.q.shape[1], given.keys.shape[1])
    bs = len(rows.kv_lens)
    out, count = torch.empty(given.q.shape, dtype=torch.float64), len(given.q) // bs
    for request, length in enumerate(rows.kv_lens.tolist()):
        table = rows.req_to_token[request]
        for node in range(count):
            window = count if rows.mask is None else rows.mask.shape[2]
            inside = range(node + 1) if rows.mask is None else rows.mask[request, node].nonzero().view(-1).tolist()
            depth = node if rows.row_depths is None else int(rows.row_depths[request, node])
            first = max(0, length - window + depth - rows.sliding + 1) if rows.sliding else 0
            if rows.sliding and rows.mask is None:
                inside = [column for column in inside if column > node - rows.sliding]
            columns = [*range(first, length - window), *(length - window + column for column in inside)]
            slots = table[columns].long()
            for head in range(heads):
                key, value = (
                    pool[slots, head * kv_heads // heads].double().cpu() for pool in (given.keys, given.values)
                )
                query = given.q[request * count + node, head].double().cpu()
                scores = key @ query * given.q.shape[2] ** -0.5
                if given.sinks is not None:
                    scores = torch.cat([scores, given.sinks[head].double().cpu()[None]])
                out[request * count + node, head] = scores.softmax(0)[: len(columns)] @ value
    return out


@pytest.mark.parametrize("sliding", [0, 4, 30])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_variant(paged_attention)
def test_it_is_softmax_over_what_a_row_sees(
    variant: str,
    shape: tuple[int, int, int, int, int, tuple[int, ...]],
    sinks: bool,
    sliding: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take(variant, monkeypatch)
    dtype, tolerance = (torch.float64, 1e-9) if variant == "torch" else (torch.float32, 1e-4)
    given = case(shape, dtype, sinks=sinks, sliding=sliding)
    torch.testing.assert_close(given.run().cpu().double(), by_loops(given), rtol=tolerance, atol=tolerance)


@needs_triton
def test_one_part_gives_the_same_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    take("triton", monkeypatch)
    given = case(SHAPES[1], torch.float32)
    several = given.run()
    monkeypatch.setattr(paged, "_MOST_PARTS", 1)
    torch.testing.assert_close(given.run(), several, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pairs", "groups", "tiles"),
    [
        (256, 8, (128, 8)),  # a tree of 64 at batch 1: 4 tiles for 8 KV heads
        (32, 8, (16, 16)),  # a draft step of topk 8
        (24, 256, (32, 1)),  # chains of 5 at batch 32
        (16, 512, (16, 1)),  # chains of 3 at batch 64
        (64, 64, (64, 4)),  # trees of 16 at batch 8
    ],
)
def test_programs_fill_the_device(pairs: int, groups: int, tiles: tuple[int, int]) -> None:
    assert paged._tiles(pairs, groups) == tiles
