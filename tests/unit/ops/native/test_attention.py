"""The native attention to long contexts, which is computed by ranges, against attention by its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_server.algorithms import DEEPEST_TREE
from eagle_server.attention.interface import AttentionBatch, Causal, LayerSpec, Layout, TreeMask
from eagle_server.attention.native import NativeAttention
from eagle_server.attention.torch_native import TorchNativeAttention
from eagle_server.cache.pool import KVPool, KVShape

SLOTS, LONGEST = 4600, 2250
SIZES = {"few heads": (4, 1, 64), "groups": (16, 2, 32), "odd": (3, 3, 20), "wide": (10, 2, 96)}
SPECS = {
    "plain": LayerSpec(0, 0.1),
    "softcap": LayerSpec(0, 0.3, softcap=2.0),
    "sinks": LayerSpec(0, 0.1, sinks=torch.linspace(-1, 4, 16)),
    "window": LayerSpec(0, 0.1, sliding_window=700),
    "short window": LayerSpec(0, 0.1, sliding_window=130),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slots_of(requests: int, run: int) -> Tensor:
    """int32 [requests, LONGEST], runs of slots that follow each other, in any order."""
    runs = torch.randperm((SLOTS - 1) // run, generator=torch.Generator().manual_seed(run))
    slots = (runs[:, None] * run + torch.arange(run)).flatten() + 1
    return slots[: requests * LONGEST].view(requests, LONGEST).int()


def batch_of(q_lens: list[int], kv_lens: list[int], table: Tensor, mask: Causal | TreeMask) -> AttentionBatch:
    places = [table[i, n - q : n] for i, (q, n) in enumerate(zip(q_lens, kv_lens, strict=True))]
    layout = Layout(tuple(q_lens), tuple(kv_lens), None if isinstance(mask, Causal) else mask.visible.shape[2])
    return AttentionBatch(
        *(torch.arange(len(q_lens)), torch.tensor(kv_lens), table, torch.cat(places).long(), mask, layout)
    )


def pool_of(size: str, dtype: torch.dtype) -> KVPool:
    _, kv_heads, dim = SIZES[size]
    pool = KVPool([KVShape(kv_heads, dim)], SLOTS, dtype, torch.device("cpu"))
    pool.groups[0].copy_(random(*pool.groups[0].shape, seed=5))
    return pool


def attended(pool: KVPool, batch: AttentionBatch, q: Tensor, spec: LayerSpec) -> Tensor:
    """By the native kernels, over what the cache holds."""
    backend = NativeAttention.of(pool)
    assert backend is not None
    return backend.bind(batch).attend(q, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [1, 64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("kernels", "threads")
def test_long_contexts_are_torchs(spec: str, size: str, run: int, dtype: torch.dtype) -> None:
    heads, _, dim = SIZES[size]
    layer, pool = SPECS[spec], pool_of(size, dtype)
    if layer.sinks is not None:
        layer = LayerSpec(0, layer.scale, sinks=layer.sinks[:heads])
    batch = batch_of([1, 70], [LONGEST, 1500], slots_of(2, run), Causal())
    q = random(71, heads, dim)
    exact = pool_of(size, torch.float32)
    exact.groups[0].copy_(pool.groups[0])
    expected = TorchNativeAttention(exact).bind(batch).attend(q, layer)
    rounding = 1e-2 if dtype == torch.bfloat16 else 2e-5  # of queries and chances where tiles compute
    torch.testing.assert_close(attended(pool, batch, q, layer), expected, atol=rounding, rtol=rounding)


PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 6, 8)  # of the nodes of a tree
DEEP = (-1, *range(DEEPEST_TREE))  # a chain


def tree_of(parents: tuple[int, ...]) -> TreeMask:
    nodes = len(parents)
    visible, depths = torch.zeros(1, nodes, nodes, dtype=torch.bool), torch.zeros(1, nodes, dtype=torch.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[0, node], depths[0, node] = visible[0, parent], depths[0, parent] + 1
        visible[0, node, node] = True
    return TreeMask(visible, depths, depths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parents", [PARENTS, DEEP])
@pytest.mark.parametrize("spec", ["plain", "sinks", "window", "short window"])
@pytest.mark.parametrize("size", ["few heads", "groups", "odd"])
@pytest.mark.usefixtures("kernels", "threads")
def test_a_node_has_the_bits_of_its_token_in_plain_decoding(
    size: str, spec: str, parents: tuple[int, ...], dtype: torch.dtype
) -> None:
    (heads, _, dim), layer, nodes, mask = SIZES[size], SPECS[spec], len(parents), tree_of(parents)
    if layer.sinks is not None:
        layer = LayerSpec(0, layer.scale, sinks=layer.sinks[:heads])
    pool, table = pool_of(size, dtype), slots_of(1, 16)
    for prefix in (5, 60, 100, 126, 127, 128, 190, 250, 765, 833, 1080, 1086, 1087, 1152, 2110):
        q = random(nodes, heads, dim, seed=prefix)
        found = attended(pool, batch_of([nodes], [prefix + nodes], table, mask), q, layer)
        for node in range(0, nodes, 1 + nodes // 12):
            path = mask.visible[0, node].nonzero()[:, 0] + prefix
            plain = torch.cat([table[:, :prefix], table[:, path], table[:, prefix + nodes :]], dim=1)
            alone = attended(pool, batch_of([1], [prefix + len(path)], plain, Causal()), q[node : node + 1], layer)
            assert torch.equal(found[node], alone[0]), (prefix, node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["plain", "window", "short window"])
@pytest.mark.usefixtures("kernels", "threads")
def test_a_prompts_rows_have_the_same_bits_in_chunks_of_any_size(spec: str, dtype: torch.dtype) -> None:
    heads, _, dim = SIZES["groups"]
    pool, table, length = pool_of("groups", dtype), slots_of(2, 64), 1000
    q = random(length, heads, dim)
    whole = attended(pool, batch_of([length], [length], table[:1], Causal()), q, SPECS[spec])
    for start, end in ((0, 130), (64, 128), (63, 65), (126, 129), (400, 641), (699, 700), (829, 1000)):
        batch = batch_of([1, end - start], [LONGEST, end], table.flip(0), Causal())
        beside = attended(pool, batch, torch.cat([q[:1], q[start:end]]), SPECS[spec])
        assert torch.equal(beside[1:], whole[start:end])
