"""Weights in the blocks of GGUF files are the package's, bit for bit, and can be cut and joined."""

from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from eagle_server.ops.linear import packed as module
from eagle_server.ops.linear.blocks import FORMATS, BlockRows, BlockWeight
from eagle_server.ops.linear.packed import pack_weight, unpack_weight
from tests.support.block_rows import random_rows


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_package(name: str) -> None:
    rows, kind = random_rows(name, 7, 768), GGMLQuantizationType[name]
    assert GGML_QUANT_SIZES[kind] == FORMATS[name][:2]
    assert rows.inputs == 768
    assert torch.equal(rows.dense(), torch.from_numpy(dequantize(rows.blocks.numpy(), kind)))


def test_rows_and_columns_are_those_of_the_whole() -> None:
    weight = BlockWeight.stacked([BlockWeight((random_rows(name, 20, 768),)) for name in ("Q4_K", "Q8_0", "Q6_K")])
    dense = weight.dense()
    assert weight.shape == dense.shape == (60, 768)
    for chosen in (slice(0, 20), slice(13, 41), slice(45, None), slice(60)):
        assert torch.equal(weight.rows(chosen).dense(), dense[chosen])
    part = weight.columns(256, 512)
    assert part is not None and torch.equal(part.dense(), dense[:, 256:512])
    assert weight.columns(0, 128) is None


@pytest.mark.parametrize("names", [("Q4_0", "Q4_0"), ("Q4_0", "Q8_0"), ("Q6_K",)])
def test_without_native_kernels_blocks_are_int4_or_multiplied_out(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available", lambda *_: False)
    weight = BlockWeight(tuple(random_rows(name, 64, 256) for name in names))
    packed = pack_weight(torch.empty(weight.shape), codes=weight)
    assert packed.native is None and (packed.rounded is not None) == ({*names} == {"Q4_0"})
    torch.testing.assert_close(unpack_weight(packed), weight.dense(), atol=0.01, rtol=0)
    again = pack_weight(torch.empty(weight.shape), "int8", codes=weight)
    assert again.rounded is not None
    torch.testing.assert_close(unpack_weight(again), weight.dense(), atol=0.01, rtol=0)


def test_int4_of_columns_in_another_order_is_the_weight() -> None:
    weight = BlockWeight((random_rows("Q4_0", 64, 256),), torch.tensor([3, 0, 7, 1, 2, 6, 5, 4]))
    as_int4 = weight.as_int4()
    assert as_int4 is not None
    torch.testing.assert_close(as_int4.dense(), weight.dense(), atol=1e-6, rtol=0)


def test_blocks_of_a_weight_need_not_be_contiguous() -> None:
    rows = random_rows("Q8_0", 16, 64)
    every = torch.cat([rows.blocks, rows.blocks], dim=1)[:, : rows.blocks.shape[1]]
    assert torch.equal(BlockRows("Q8_0", every).dense(), rows.dense())
