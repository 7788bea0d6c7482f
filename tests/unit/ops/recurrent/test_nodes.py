"""Every rule over trees equals the recurrence along each path, in float64 and in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.recurrent import PromptRows, TreeRows
from eagle_server.cache.states import StatePool
from eagle_server.ops.native.library import available
from eagle_server.ops.recurrent.nodes import CHUNK, RecurrentLayer, RecurrentShape
from eagle_server.speculation.tree import Tree, compacted

SHAPES = {
    "even": RecurrentShape(key_heads=2, value_heads=4, key_dim=8, value_dim=16, kernel=4),
    "odd": RecurrentShape(key_heads=3, value_heads=3, key_dim=5, value_dim=7, kernel=3),
    "no short convolution": RecurrentShape(key_heads=1, value_heads=2, key_dim=4, value_dim=4, kernel=2),
    "ssd": RecurrentShape(key_heads=2, value_heads=6, key_dim=16, value_dim=8, kernel=4, rule="ssd"),
    "ssd, odd": RecurrentShape(1, 3, key_dim=5, value_dim=35, kernel=3, rule="ssd", steps=(0.3, 1.5)),
    "kda": RecurrentShape(key_heads=3, value_heads=3, key_dim=8, value_dim=8, kernel=4, rule="kda"),
    "kda, odd": RecurrentShape(key_heads=2, value_heads=4, key_dim=7, value_dim=5, kernel=2, rule="kda"),
    "convolution": RecurrentShape(1, 1, key_dim=0, value_dim=37, kernel=3, rule="convolution"),
}
QWEN3_5_9B = RecurrentShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
ROWS = 3  # of the pool
PARENTS = [[-1, 0, 0, 1, 1, 2, 3, 3, 7], [-1, 0, 1, 1, 3, 4, 4, 0, 7], [-1, 0, 0, 0, 0, 0, 0, 0, 0]]


def random_layer(shape: RecurrentShape, dtype: torch.dtype, index: int = 0) -> RecurrentLayer:
    heads = 0 if shape.rule == "convolution" else shape.value_heads
    a_log, is_ssd = torch.empty(heads).uniform_(-4, 1), shape.rule == "ssd"
    conv, dt_bias = torch.randn(shape.channels, shape.kernel).to(dtype), torch.randn(shape.decays)
    bias = torch.randn(shape.channels).to(dtype) if is_ssd or shape.rule == "convolution" else None
    return RecurrentLayer(index, shape, conv, a_log, dt_bias, bias, torch.randn(heads) if is_ssd else None)


def rows(count: int, shape: RecurrentShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(count, shape.channels).to(dtype), torch.randn(count, shape.gates).to(dtype)


def reference(x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
    """One text, token by token, in float64: the recurrence as it is defined. [n, value_heads, V]."""
    shape = layer.shape
    bias = torch.zeros(shape.channels) if layer.conv_bias is None else layer.conv_bias
    past = F.pad(x.double(), (0, 0, shape.kernel - 1, 0))
    windows = torch.stack([past[i : i + shape.kernel].T for i in range(len(x))])
    convolved = (windows * layer.conv.double()).sum(2) + bias.double()
    if shape.rule == "convolution":
        return convolved[:, None]
    step = {"delta": delta_step, "kda": delta_step, "ssd": mamba2_step}[shape.rule]
    state, outputs = torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64), []
    for mixed, gate in zip(F.silu(convolved), gates.double(), strict=True):
        state, out = step(state, mixed, gate, layer)
        outputs.append(out)
    return torch.stack(outputs)


def delta_step(state: Tensor, mixed: Tensor, gate: Tensor, layer: RecurrentLayer) -> tuple[Tensor, Tensor]:
    """With one decay per head (Qwen), or one per key channel (Kimi)."""
    shape, heads = layer.shape, layer.shape.value_heads
    q, k, v = mixed.split([shape.key_heads * shape.key_dim] * 2 + [heads * shape.value_dim])
    q, k = (each.view(shape.key_heads, shape.key_dim) for each in (q, k))
    q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    q, k = (each.repeat_interleave(heads // shape.key_heads, 0) for each in (q, k))
    b, a = gate.split([heads, shape.decays])
    steps = F.softplus(a + layer.dt_bias.double()).view(heads, -1)
    state = state * (-layer.a_log.double().exp()[:, None] * steps).exp()[:, :, None]
    change = b.sigmoid()[:, None] * (v.view(heads, -1) - (state * k[:, :, None]).sum(1))
    state = state + k[:, :, None] * change[:, None]
    return state, (state * q[:, :, None]).sum(1) / math.sqrt(shape.key_dim)


def mamba2_step(state: Tensor, mixed: Tensor, gate: Tensor, layer: RecurrentLayer) -> tuple[Tensor, Tensor]:
    shape, heads = layer.shape, layer.shape.value_heads
    x, b, c = mixed.split([heads * shape.value_dim] + [shape.key_heads * shape.key_dim] * 2)
    b, c = (each.view(-1, shape.key_dim).repeat_interleave(heads // shape.key_heads, 0) for each in (b, c))
    x, dt = x.view(heads, -1), F.softplus(gate + layer.dt_bias.double()).clamp(*shape.steps)
    state = state * (-layer.a_log.double().exp() * dt).exp()[:, None, None]
    state = state + b[:, :, None] * (dt[:, None] * x)[:, None]
    assert layer.skip is not None
    return state, (state * c[:, :, None]).sum(1) + layer.skip.double()[:, None] * x


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def pool_of(shape: RecurrentShape, dtype: torch.dtype, layers: int = 1, nodes: int = 9) -> StatePool:
    pool = StatePool(layers, ROWS, nodes, shape, dtype, torch.device("cpu"))
    pool.poison()
    return pool


def trees(parents: Sequence[Sequence[int]] = PARENTS) -> Tree:
    size = len(parents[0])
    return Tree.linked(
        torch.zeros(len(parents), size, dtype=torch.int64),
        torch.tensor(parents),
        torch.tensor([40] * len(parents)),
        size - 1,
    )


def by_torch(pool: StatePool) -> StatePool:
    """Computed by the torch twin."""
    pool.native = None
    return pool


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["torch", "native"])
def computed(request: Any, dtype: torch.dtype) -> Callable[[StatePool], StatePool]:
    """Which of the two computes a pool."""
    if request.param == "torch":
        return by_torch
    if not available(torch.device("cpu"), dtype):
        pytest.skip("the native kernels do not compute in this dtype, or there is no compiler")
    return lambda pool: pool


@pytest.fixture(params=SHAPES)
def shape(request: Any) -> RecurrentShape:
    return SHAPES[request.param]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_prompts_in_any_chunks_equal_the_recurrence(
    shape: RecurrentShape, dtype: torch.dtype, tolerance: float, computed: Callable[[StatePool], StatePool]
) -> None:
    layer, pool, length = random_layer(shape, dtype), computed(pool_of(shape, dtype)), 2 * CHUNK + 9
    texts = [rows(length, shape, dtype) for _ in range(2)]
    expected = [reference(*text, layer) for text in texts]
    cuts = [0, 1, 3, 40, 40 + CHUNK + 1, length]
    for start, end in zip(cuts[:-1], cuts[1:], strict=True):
        forward = PromptRows(pool, [(row, start, end - start) for row in (2, 0)])
        x, gates = (torch.cat([text[part][start:end] for text in texts]) for part in (0, 1))
        out = forward.run(x, gates, layer)
        close(out, torch.cat([text[start:end] for text in expected]), tolerance)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("before", [1, 2, 20])
def test_every_node_of_a_tree_equals_the_recurrence_along_its_path(
    shape: RecurrentShape,
    dtype: torch.dtype,
    tolerance: float,
    before: int,
    computed: Callable[[StatePool], StatePool],
    *,
    ragged: bool,
) -> None:
    """Texts shorter than the convolution too. Each tree is verified and kept twice, along another path."""
    layer, pool, requests = random_layer(shape, dtype), computed(pool_of(shape, dtype)), torch.tensor([2, 0, 1])
    texts = [rows(before, shape, dtype) for _ in PARENTS]
    pieces = [(int(row), 0, before) for row in requests]
    PromptRows(pool, pieces).run(*(torch.cat([text[part] for text in texts]) for part in (0, 1)), layer)
    for ends in ((8, 6, 3), (4, 0, 0)):
        tree = trees()
        if ragged:
            tokens = tree.tokens.clone()
            tokens[1, 7:], tokens[2, 4:] = -1, -1
            tree = compacted(Tree(**{**vars(tree), "tokens": tokens}))
        counts = [9, 9, 9] if tree.counts is None else [9, 7, 4]
        nodes = [rows(count, shape, dtype) for count in counts]
        state = pool.states.clone()
        out = TreeRows(pool, tree, requests).run(*(torch.cat([each[part] for each in nodes]) for part in (0, 1)), layer)
        torch.testing.assert_close(pool.states, state, rtol=0, atol=0, equal_nan=True)  # a forward changes no state
        for text, own, parents, found in zip(texts, nodes, PARENTS, out.split(counts), strict=True):
            for node in range(len(own[0])):
                path = path_to(node, parents)
                x, gates = (torch.cat([text[part], own[part][path]]) for part in (0, 1))
                close(found[node], reference(x, gates, layer)[-1], tolerance)
        paths = [path_to(end, parents) for end, parents in zip(ends, PARENTS, strict=True)]
        longest = max(map(len, paths))
        pool.keep(torch.tensor([path + [-1] * (longest - len(path)) for path in paths]), requests)
        texts = [
            tuple(torch.cat([text[part], own[part][path]]) for part in (0, 1))  # type: ignore[misc]
            for text, own, path in zip(texts, nodes, paths, strict=True)
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_kernels_give_a_token_the_same_bits_in_a_prompt_a_step_and_a_tree(
    shape: RecurrentShape, dtype: torch.dtype
) -> None:
    """One text in one chunk; in two chunks beside another text; and in trees with wrong branches, kept node by node."""
    if not available(torch.device("cpu"), dtype):
        pytest.skip("there is no compiler")
    layer, length = random_layer(shape, dtype), 33
    (x, gates), other = rows(length, shape, dtype), rows(11, shape, dtype)
    whole = pool_of(shape, dtype)
    expected = PromptRows(whole, [(1, 0, length)]).run(x, gates, layer)
    pool, found = pool_of(shape, dtype), list[Tensor]()
    for start, end, beside in ((0, 5, 2), (5, 19, 9)):
        forward = PromptRows(pool, [(0, 2 if start else 0, beside), (1, start, end - start)])
        both = [torch.cat([mine[:beside], own[start:end]]) for mine, own in zip(other, (x, gates), strict=True)]
        found.append(forward.run(*both, layer)[beside:])
    at, requests = 19, torch.tensor([1])
    for path in ([0], [0, 1, 3, 7, 8], [0], [0, 2, 5], [0, 1, 4]):
        tree = trees([PARENTS[0] if len(path) > 1 else [-1]])
        nodes = rows(tree.size, shape, dtype)
        for part, values in zip(nodes, (x, gates), strict=True):
            part[path] = values[at : at + len(path)]
        out = TreeRows(pool, tree, requests).run(*nodes, layer)
        found.append(out[path])
        pool.keep(torch.tensor([[*path, -1, -1]]), requests)
        at += len(path)
    assert torch.equal(torch.cat(found), expected[:at])
    again = pool_of(shape, dtype)
    PromptRows(again, [(1, 0, at)]).run(x[:at], gates[:at], layer)
    assert torch.equal(again.states[:, 1], pool.states[:, 1])
    assert torch.equal(again.rings[:, 1], pool.rings[:, 1])


def test_native_states_refuse_a_tree_or_a_path_that_they_do_not_hold(shape: RecurrentShape) -> None:
    if not available(torch.device("cpu"), torch.float32):
        pytest.skip("there is no compiler")
    layer, pool, requests = random_layer(shape, torch.float32), pool_of(shape, torch.float32), torch.tensor([1])
    nodes = pool.inputs.shape[2]
    for parents in ([-1, *range(nodes)], [-1, 0, 2]):
        tree = trees([parents])
        with pytest.raises(IndexError, match="beyond"):
            TreeRows(pool, tree, requests).run(*rows(tree.size, shape, torch.float32), layer)
    states = pool.states.clone()
    for path, row in (([0, nodes], 1), ([0, 1], len(pool.states[0])), ([0, 1], -1)):
        with pytest.raises(IndexError, match="beyond"):
            pool.keep(torch.tensor([path]), torch.tensor([row]))
    torch.testing.assert_close(pool.states, states, rtol=0, atol=0, equal_nan=True)


def test_a_node_takes_at_most_48_kb_per_layer_at_the_shape_of_qwen3_5_9b() -> None:
    assert StatePool.bytes_per_node(1, QWEN3_5_9B, torch.bfloat16) <= 48 * 1024
    assert StatePool.bytes_per_request(1, QWEN3_5_9B, torch.bfloat16) > 2 * 1024**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pool_takes_the_bytes_that_are_planned(shape: RecurrentShape, dtype: torch.dtype) -> None:
    pool, sizes = StatePool(3, ROWS, 5, shape, dtype, torch.device("cpu")), (3, shape, dtype)
    parts = (pool.states, pool.rings, pool.inputs, pool.keys, pool.updates, pool.decays)
    planned = (ROWS + 1) * (StatePool.bytes_per_request(*sizes) + 5 * StatePool.bytes_per_node(*sizes))
    assert sum(part.nbytes for part in parts) == planned
