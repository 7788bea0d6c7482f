"""Moving KV within windows where sources and targets overlap, in the layouts of both pools."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_server.cache.pool import KVPool, LatentPool
from eagle_server.ops import kv_move
from tests.support.kernels import DEVICE, every_way, generator, on_device, take

SLOTS = 97


def paths(bs: int, steps: int) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Arguments of `keep_accepted`: ascending paths, shuffled windows; and the slots of all moves, [bs, steps] each."""
    source = generator(bs, steps)
    size = 3 * steps
    windows = 1 + torch.randperm(SLOTS - 1, generator=source)[: bs * size].view(bs, size)
    path = torch.full((bs, steps + 1), -1)
    path[:, 0] = 0
    for request in range(bs):
        kept = int(torch.randint(steps + 1, (), generator=source)) if request else steps
        path[request, 1 : kept + 1] = 1 + torch.randperm(size - 1, generator=source)[:kept].sort().values
    lens, rows = torch.randint(9, (bs,), generator=source), torch.randperm(bs, generator=source)
    table = torch.zeros(bs + 1, 9 + size, dtype=torch.int32)
    for row, first, window in zip(rows.tolist(), lens.tolist(), windows, strict=True):
        table[row, first : first + size] = window
    nodes = torch.arange(steps + 1)
    return (path, lens, rows, table), windows.gather(1, torch.where(path < 0, nodes, path)), windows[:, : steps + 1]


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("bs", "steps"), [(1, 1), (3, 5), (5, 6)])
@pytest.mark.parametrize(("heads", "size"), [(None, 37), (2, 8), (3, 700)])
def test_accepted_nodes_move_to_the_front(
    way: str, dtype: torch.dtype, bs: int, steps: int, heads: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layout [2, layers, slots, heads, size], or [layers, slots, size]; 37 elements are not a multiple of any word."""
    shape = (2, SLOTS, size) if heads is None else (2, 2, SLOTS, heads, size)
    slot_dim = 1 if heads is None else 2
    before = (40 * torch.randn(shape, generator=generator(size))).to(dtype)
    arguments, source, target = paths(bs, steps)
    words = before.view(torch.uint8)
    expected = words.clone().index_copy_(slot_dim, target.flatten(), words.index_select(slot_dim, source.flatten()))
    data = before.to(DEVICE)
    take(way, monkeypatch, kv_move)
    kv_move.keep_accepted(data, slot_dim, *on_device(*arguments))
    assert torch.equal(data.view(torch.uint8).cpu(), expected)


def test_pools_move_keys_and_values_of_every_layer() -> None:
    kv = KVPool(2, SLOTS, 2, 4, torch.float32, DEVICE)
    latent = LatentPool(2, SLOTS, 6, 2, torch.float32, DEVICE)
    for pool, dim in ((kv, 2), (latent, 1)):
        pool.data.copy_(torch.randn(pool.data.shape, generator=generator(dim)))
        before = pool.data.clone()
        arguments, source, target = paths(3, 4)
        pool.keep(*on_device(*arguments))
        for here, there in zip(source.flatten().tolist(), target.flatten().tolist(), strict=True):
            assert torch.equal(pool.data.select(dim, there), before.select(dim, here))
