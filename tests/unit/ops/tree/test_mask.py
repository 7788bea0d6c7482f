"""The packed mask against numpy.packbits of the expanded mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle_server.ops.tree.mask import SlidingWindow, pack_tree_mask
from tests.support.covering import covering
from tests.support.kernels import DEVICE, each_variant, generator, on_device

UNTOUCHED = 90


def written_out(
    window: torch.Tensor, kv_len: int, sliding: int, row_depths: list[int], column_depths: list[int]
) -> np.ndarray:
    rows, width = window.shape
    prefix = kv_len - width
    full = np.zeros((rows, kv_len), dtype=bool)
    for i in range(rows):
        for p in range(kv_len):
            seen = p < prefix or bool(window[i, p - prefix])
            position = p if p < prefix else prefix + column_depths[p - prefix]
            full[i, p] = seen and (not sliding or position > prefix + row_depths[i] - sliding)
    return full


@each_variant(pack_tree_mask)
@pytest.mark.parametrize(
    ("bs", "rows", "width", "sliding"),
    covering(
        [(1, 1, 1), (3, 2, 2), (5, 6, 6), (3, 13, 13), (2, 4, 12), (1, 64, 64), (35, 1, 2)],
        [0, 1, 5, 40],
        together=1,  # what is masked and how bits are packed do not interact
    ),
)
def test_the_bits_equal_those_of_the_expanded_mask(variant: str, bs: int, rows: int, width: int, sliding: int) -> None:
    source = generator(bs, rows, sliding)
    window = torch.rand(bs, rows, width, generator=source) < 0.5
    kv_lens = width + torch.randint(0, 60, (bs,), generator=source)
    kv_lens[0] = width  # no prefix
    row_depths = torch.randint(0, 7, (bs, rows), generator=source)
    column_depths = torch.randint(0, 7, (bs, width), generator=source)
    parts = [
        np.packbits(written_out(*each, sliding=sliding, row_depths=r, column_depths=c), bitorder="little").tolist()
        for *each, r, c in zip(window, kv_lens.tolist(), row_depths.tolist(), column_depths.tolist(), strict=True)
    ]
    expected = sum(parts, [])
    out = torch.full((len(expected) + 11,), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
    mask_indptr = torch.full((bs + 1,), -1, dtype=torch.int32, device=DEVICE)
    window, kv_lens, row_depths, column_depths = on_device(window, kv_lens, row_depths, column_depths)
    for lens in (kv_lens, kv_lens.int()):
        depths = SlidingWindow(sliding, row_depths, column_depths) if sliding else None
        pack_tree_mask(window, lens, out, mask_indptr, depths)
        assert mask_indptr.tolist() == [0, *np.cumsum([len(part) for part in parts]).tolist()]
        assert out.tolist() == expected + [UNTOUCHED] * 11


@each_variant(pack_tree_mask)
def test_the_worked_example_packs_into_the_published_bytes(variant: str) -> None:
    rows = ["100000", "110000", "101000", "110100", "110010", "110011"]
    window = torch.tensor([[[bit == "1" for bit in row] for row in rows]])
    out, mask_indptr = (
        torch.zeros(8, dtype=torch.uint8, device=DEVICE),
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
    )
    pack_tree_mask(*on_device(window, torch.tensor([10])), out, mask_indptr)
    assert out.tolist() == [31, 252, 240, 197, 47, 63, 253, 12]
    assert mask_indptr.tolist() == [0, 8]
