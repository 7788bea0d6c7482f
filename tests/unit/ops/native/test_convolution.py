"""DFlash 2's convolutions in the one native call of a block's layers, against the layers one by one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from eagle_server.attention.interface import PagedRequests
from eagle_server.attention.torch_native import torch_native
from eagle_server.engine.assembly.pools import make_pool
from eagle_server.models.drafts.block import BlockAttention, BlockHead
from eagle_server.models.layers import pack_linears
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.worker.drafters.block import _Planned, extend_layout, window_layout
from tests.support.engines import random_block, random_target, randomized

CONTEXTS, ROWS, WIDTH = (9, 2, 15, 5, 12), 4, 20
# hidden size, taps, channels that share a dynamic kernel; more taps than rows too
SIZES = {"published": (64, 2, 16), "more taps than rows": (32, 6, 8), "odd": (40, 3, 5), "wide groups": (192, 2, 48)}
FORMATS: dict[str, tuple[torch.dtype, Quantization | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, "int8"),
    "int4": (torch.float32, "int4"),
}

pytestmark = pytest.mark.usefixtures("kernels", "threads")


def head_of(size: str, form: str, *, exact: bool = False) -> BlockHead:
    """`exact`: in float32, with the weights of that format."""
    (hidden, *convolution), (dtype, quantization) = SIZES[size], FORMATS[form]
    target = random_target(hidden=hidden).to(dtype)
    head = random_block(target, convolution=(convolution[0], convolution[1]))
    randomized(head, 1, 0.1).to(dtype)
    if exact:
        target.float()
        return head.float()
    pack_linears(head, quantization)
    return head


@torch.inference_mode()
def rows_of(head: BlockHead, requests: list[int], *, by_layer: bool = False) -> Tensor:
    """y [requests, ROWS, hidden] of blocks behind CONTEXTS of random keys and values. `by_layer`: without that call."""
    pool = make_pool(head.kv, len(CONTEXTS) * WIDTH, torch.device("cpu"))
    for number, side in enumerate((*pool.keys, *pool.values)):
        side.copy_(torch.randn(side.shape, generator=torch.Generator().manual_seed(number)))
    backend, lens = torch_native(pool), [CONTEXTS[i] for i in requests]
    table = torch.arange(len(CONTEXTS) * WIDTH, dtype=torch.int32).view(-1, WIDTH)
    paged = PagedRequests(torch.tensor(requests), torch.tensor(lens), table)
    causal, bidirectional = (
        partial(_Planned(backend.plan(layout), layout).bind, paged)
        for layout in (extend_layout(lens, (0,) * len(lens), ROWS), window_layout(lens, ROWS, ROWS))
    )
    native = head._native
    head._native = [] if by_layer else native
    roots, positions = torch.tensor([3 + i for i in requests]), torch.tensor(lens)[:, None] + torch.arange(ROWS)
    y = head.rows(roots, positions, BlockAttention(causal, bidirectional, ROWS))
    head._native = native
    return y.float()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_one_call_computes_what_the_layers_compute(size: str, form: str) -> None:
    head = head_of(size, form)
    assert [len(native.layers) for native in head._native] == [1, 1]
    every = list(range(len(CONTEXTS)))
    at_once, by_layer = rows_of(head, every), rows_of(head, every, by_layer=True)
    if form == "bfloat16":  # torch rounds after each operation
        exact = rows_of(head_of(size, form, exact=True), every)
        assert 0 < (at_once - exact).norm() < (by_layer - exact).norm()
    else:
        torch.testing.assert_close(at_once, by_layer, rtol=0, atol=1e-4)
    for convs in (head.attention_convs, head.mlp_convs):
        for side in (0, 1):  # each of the four kernels counts
            base = convs[0].base
            base[side] += 0.5
            changed = head_of(size, form)
            changed.load_state_dict(head.state_dict(), strict=False)
            changed.fuse()
            assert (rows_of(changed, every) - at_once).abs().max() > 0.05
            base[side] -= 0.5


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_a_block_has_the_same_rows_alone_and_in_every_batch(size: str, form: str) -> None:
    head = head_of(size, form)
    together = rows_of(head, list(range(len(CONTEXTS))))
    for request, y in enumerate(together):
        assert torch.equal(rows_of(head, [request])[0], y)
    assert torch.equal(rows_of(head, [3, 0]), together[[3, 0]])
