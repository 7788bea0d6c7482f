"""Weights in the blocks of GGUF files, by the native kernels against torch: every instruction set, odd sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eagle_server.ops.linear.blocks import FORMATS, BlockWeight, block_linear
from eagle_server.ops.native.linear import NativeWeight, native_linear, packable
from tests.support.block_rows import random_rows


def inputs_of(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(("blocks", "outputs"), [(1, 1), (3, 17), (2, 100), (1, 640), (5, 64)])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("kernels", "threads")
def test_blocks_are_multiplied_as_the_twin_does_and_no_row_changes_another(
    name: str, blocks: int, outputs: int
) -> None:
    inputs = blocks * FORMATS[name].inputs
    weight = BlockWeight((random_rows(name, outputs, inputs),))
    packed, bias = NativeWeight(weight), inputs_of(1, outputs)[0]
    assert torch.equal(packed.dense(), weight.dense())
    for rows in (1, 2, 5, 6, 7, 8, 13, 16, 31, 50):
        x = inputs_of(rows, inputs)
        y = native_linear(x, packed, bias)
        torch.testing.assert_close(y, block_linear(x, weight) + bias, atol=2e-5, rtol=2e-5)
        exact = F.linear(x.double(), weight.dense().double(), bias.double())
        torch.testing.assert_close(y.double(), exact, atol=0.1, rtol=0)
        assert torch.equal(y, torch.cat([native_linear(row[None], packed, bias) for row in x[:20]] + [y[20:]]))
    assert native_linear(torch.zeros(1, inputs), packed, bias).equal(bias[None])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("kernels", "threads")
def test_columns_in_another_order_are_multiplied_by_their_inputs(name: str) -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    stored = random_rows(name, 48, 512)
    weight, packed = BlockWeight((stored,), order), NativeWeight(BlockWeight((stored,), order))
    own = stored.dense().unflatten(1, (16, 32))
    dense = torch.stack([own[:, int((order == place).nonzero())] for place in range(16)], dim=1).flatten(1)
    assert torch.equal(weight.dense(), dense) and torch.equal(packed.dense(), dense)
    assert torch.equal(weight.rows(slice(16, 48)).dense(), dense[16:]) and weight.columns(0, 256) is None
    for rows in (1, 7, 31):
        x = inputs_of(rows, 512)
        y = native_linear(x, packed, None)
        torch.testing.assert_close(y, block_linear(x, weight), atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(y, F.linear(x, dense), atol=0.1, rtol=0)
        assert torch.equal(native_linear(x, packed.rows_from(16), None), y[:, 16:])


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_take_about_the_bytes_of_the_file(name: str) -> None:
    weight = random_rows(name, 64, 1024)
    assert weight.blocks.nbytes <= NativeWeight(BlockWeight((weight,))).data.nbytes <= 1.03 * weight.blocks.nbytes


@pytest.mark.usefixtures("kernels", "threads")
def test_a_layer_may_have_parts_of_several_formats() -> None:
    names = ["Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q4_0", "Q5_1"]
    parts = [BlockWeight((random_rows(name, 32, 512, seed),)) for seed, name in enumerate(names)]
    weight = BlockWeight.stacked([*parts, BlockWeight((random_rows("Q4_1", 5, 512),))])
    assert packable(weight) and len(weight.parts) == 6  # the Q4_0 are one
    packed = NativeWeight(weight)
    assert torch.equal(packed.dense(), weight.dense())
    for rows in (1, 3, 9):
        x = inputs_of(rows, 512)
        y = native_linear(x, packed, None)
        torch.testing.assert_close(y, block_linear(x, weight), atol=2e-5, rtol=2e-5)
        assert torch.equal(native_linear(x, packed.rows_from(48), None), y[:, 48:])
        assert torch.equal(native_linear(x, packed.rows_until(50), None), y[:, :50])
    odd = BlockWeight.stacked([weight, parts[0]])
    assert not packable(odd)  # 16 outputs would have two formats


def test_what_is_no_number_stays_none_beside_blocks() -> None:
    packed = NativeWeight(BlockWeight((random_rows("Q4_K", 32, 512),)))
    x = inputs_of(3, 512)
    x[0, 3], x[1, 300] = float("nan"), float("inf")
    y = native_linear(x, packed, None)
    assert not y[:2].isfinite().any()
    assert y[2].isfinite().all()
