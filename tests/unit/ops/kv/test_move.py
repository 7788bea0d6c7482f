"""Moving KV within windows where sources and targets overlap, in the layouts of both pools."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_server.cache.pool import KVPool, KVShape, LatentPool, LatentShape
from eagle_server.ops.kv.move import keep_accepted
from tests.support.kernels import DEVICE, each_variant, generator, on_device, take

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


@each_variant(keep_accepted)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("bs", "steps"), [(1, 1), (3, 5), (5, 6)])
@pytest.mark.parametrize(("heads", "size"), [(None, 37), (2, 8), (3, 700)])
def test_accepted_nodes_move_to_the_front(
    variant: str, dtype: torch.dtype, bs: int, steps: int, heads: int | None, size: int
) -> None:
    """Layout [2, layers, slots, heads, size], or [layers, slots, size]; 37 elements are not a multiple of any word."""
    shape = (2, SLOTS, size) if heads is None else (2, 2, SLOTS, heads, size)
    slot_dim = 1 if heads is None else 2
    before = (40 * torch.randn(shape, generator=generator(size))).to(dtype)
    arguments, source, target = paths(bs, steps)
    words = before.view(torch.uint8)
    expected = words.clone().index_copy_(slot_dim, target.flatten(), words.index_select(slot_dim, source.flatten()))
    data = before.to(DEVICE)
    keep_accepted(data, slot_dim, *on_device(*arguments))
    assert torch.equal(data.view(torch.uint8).cpu(), expected)


def test_pools_move_keys_and_values_of_every_layer() -> None:
    kv = KVPool([KVShape(2, 4), KVShape(1, 6), KVShape(2, 4)], SLOTS, torch.float32, DEVICE)
    assert [tuple(keys.shape) for keys in kv.keys] == [(SLOTS, 2, 4), (SLOTS, 1, 6), (SLOTS, 2, 4)]
    latent = LatentPool([LatentShape(6, 2)] * 2, SLOTS, torch.float32, DEVICE)
    for pool in (kv, latent):
        layers = pool.keys if pool is latent else (*pool.keys, *pool.values)
        for layer in layers:
            layer.copy_(torch.randn(layer.shape, generator=generator(layer.shape[2])))
        before = [layer.clone() for layer in layers]
        arguments, source, target = paths(3, 4)
        pool.keep(*on_device(*arguments))
        for here, there in zip(source.flatten().tolist(), target.flatten().tolist(), strict=True):
            assert all(torch.equal(layer[there], old[here]) for layer, old in zip(layers, before, strict=True))


def test_layers_of_a_pool_share_no_memory_and_are_cleared_and_poisoned_in_every_shape() -> None:
    pool = KVPool([KVShape(2, 4), KVShape(1, 6), KVShape(2, 4)], SLOTS, torch.float32, DEVICE)
    sides = (*pool.keys, *pool.values)
    for number, side in enumerate(sides):
        side.fill_(number + 1)
    assert all(bool((side == number + 1).all()) for number, side in enumerate(sides))
    pool.poison(torch.tensor([3], device=DEVICE))
    pool.clear(torch.tensor([4], device=DEVICE))
    for side in sides:
        assert bool(side[3].isnan().all()) and bool((side[4] == 0).all()) and bool((side[5] > 0).all())
    assert pool.bytes_per_slot == 2 * (8 + 6 + 8) * 4


@pytest.mark.parametrize(("argument", "value"), [(0, 40), (1, 30), (1, -1), (2, 9), (2, -1), (3, SLOTS), (3, -1)])
def test_the_native_move_refuses_what_its_tables_do_not_hold(
    argument: int, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of the path, a length, a row of the page table, or a slot in it."""
    take("native", monkeypatch)
    arguments, *_ = paths(3, 5)
    data = torch.randn(2, SLOTS, 3)
    before = data.clone()
    arguments[argument][0, ...] = value
    with pytest.raises(IndexError, match="beyond"):
        keep_accepted(data, 1, *arguments)
    assert torch.equal(data, before)
