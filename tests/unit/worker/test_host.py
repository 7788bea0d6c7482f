"""The copy of a cycle's results, as it is made from a GPU."""

from __future__ import annotations

import torch

from eagle_server.worker import host


def test_tensors_of_any_dtype_arrive_bit_for_bit_in_one_copy() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 6, generator=generator)
    wide[1, 2], wide[2, 3] = float("nan"), -float("inf")
    given = [
        torch.rand(3, 1, generator=generator) < 0.5,
        torch.randint(-(1 << 62), 1 << 62, (5, 3), generator=generator),
        wide[:, ::2],
        torch.zeros(0, 4),
        torch.randn(7, generator=generator).bfloat16(),
        torch.tensor(9, dtype=torch.int32),
    ]
    for found, tensor in zip(host._unpacked(host._packed(given), given), given, strict=True):
        assert found.dtype is tensor.dtype
        torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True)
