"""The GPU kernels of the gated delta rule equal their torch twins in float64, over random trees and accepted paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from eagle_server.attention.recurrent import PromptRows, TreeRows
from eagle_server.cache.states import StatePool
from eagle_server.ops.recurrent import kernels as recurrent_kernels
from eagle_server.ops.recurrent.nodes import RecurrentLayer, RecurrentShape
from eagle_server.speculation.tree import Tree, compacted
from tests.support.kernels import DEVICE, climb, generator, needs_triton, on_device, random_parents
from tests.unit.ops.recurrent.test_nodes import SHAPES, close, random_layer, rows

WIDE = RecurrentShape(key_heads=1, value_heads=2, key_dim=12, value_dim=72, kernel=4)  # two blocks of value columns
WIDE_KEYS = RecurrentShape(key_heads=1, value_heads=1, key_dim=40, value_dim=8, kernel=4)  # two blocks of keys
KINDS = {**SHAPES, "wide keys": WIDE_KEYS, "wide": WIDE}
LAYERS, POOL_ROWS, ROOM = 2, 4, 64
pytestmark = needs_triton


def pool_of(shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> StatePool:
    pool = StatePool(LAYERS, POOL_ROWS, ROOM, shape, dtype, device)
    pool.poison()
    for part in pool.parts[2:]:  # nodes
        part.fill_(float("nan"))
    pool.native = None
    return pool


def copied(pool: StatePool, dtype: torch.dtype, device: torch.device) -> StatePool:
    """The same states in another dtype."""
    other = pool_of(pool.shape, dtype, device)
    for mine, theirs in zip(states_of(other), states_of(pool), strict=True):
        mine.copy_(theirs)
    return other


def states_of(pool: StatePool) -> tuple[Tensor, Tensor]:
    return pool.states, pool.rings


def wide(layer: RecurrentLayer) -> RecurrentLayer:
    parts = (part.double() for part in (layer.conv, layer.a_log, layer.dt_bias))
    return RecurrentLayer(layer.index, layer.shape, *parts)


def there(layer: RecurrentLayer) -> RecurrentLayer:
    return RecurrentLayer(layer.index, layer.shape, *on_device(layer.conv, layer.a_log, layer.dt_bias))


def each_part(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    parts = {field.name: getattr(tree, field.name) for field in fields(tree)}
    return Tree(**{name: change(part) if isinstance(part, Tensor) else part for name, part in parts.items()})


def moved(tree: Tree) -> Tree:
    return each_part(tree, lambda part: part.to(DEVICE))


def random_trees(bs: int, size: int, deepest: int, *, ragged: bool) -> Tree:
    parents = random_parents(bs, size, deepest, generator(bs, size))
    tokens = torch.zeros(bs, size, dtype=torch.int64)
    if ragged:
        for request in range(bs):
            tokens[request, max(1, size - 3 * request) :] = -1
    tree = Tree.linked(tokens, parents, torch.full((bs,), 40), deepest)
    return compacted(tree) if ragged else tree


CASES = [  # shape, dtype, requests, nodes, largest depth, whether trees differ in size
    ("even", torch.bfloat16, 4, 9, 8, True),
    ("even", torch.float32, 2, 16, 15, False),
    ("odd", torch.float32, 3, 9, 4, False),
    ("odd", torch.bfloat16, 3, 1, 1, False),
    ("no short convolution", torch.float32, 3, 5, 4, True),
    ("wide", torch.float32, 2, 7, 3, False),
    ("wide keys", torch.float32, 3, 7, 3, False),
    pytest.param("wide", torch.bfloat16, 4, 9, 8, True, marks=pytest.mark.deep),
    pytest.param("wide", torch.float32, 1, 33, 6, False, marks=pytest.mark.deep),
    pytest.param("odd", torch.bfloat16, 2, 64, 9, False, marks=pytest.mark.deep),
]


@pytest.mark.parametrize(("kind", "dtype", "bs", "size", "deepest", "ragged"), CASES)
def test_trees_and_accepted_paths_equal_the_twins(
    kind: str,
    dtype: torch.dtype,
    bs: int,
    size: int,
    deepest: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ragged: bool,
) -> None:
    """Texts of 1 token and more; then trees, which are kept along paths of every length, none included."""
    torch.manual_seed(size)
    shape, tolerance = KINDS[kind], 3e-5
    monkeypatch.setattr(recurrent_kernels, "on_gpu", lambda _: False)
    layers = [random_layer(shape, dtype, index) for index in range(LAYERS)]
    exact, requests = pool_of(shape, torch.float64, torch.device("cpu")), torch.randperm(POOL_ROWS)[:bs]
    for layer in layers:
        for row, length in zip(requests.tolist(), (1, 2, 7, 70), strict=False):
            x, gates = rows(length, shape, dtype)
            PromptRows(exact, [(row, 0, length)]).run(x.double(), gates.double(), wide(layer))
    pool, tree = copied(exact, dtype, DEVICE), random_trees(bs, size, deepest, ragged=ragged)
    for mine, theirs in zip(states_of(exact), states_of(pool), strict=True):
        mine.copy_(theirs)  # what they were rounded to
    counts = [tree.size] * bs if tree.counts is None else tree.counts.tolist()
    for layer in layers:
        x, gates = rows(sum(counts), shape, dtype)
        expected = TreeRows(exact, tree, requests).run(x.double(), gates.double(), wide(layer))
        before = [part.clone() for part in states_of(pool)]
        monkeypatch.setattr(recurrent_kernels, "on_gpu", lambda _: True)
        out = TreeRows(pool, moved(tree), requests.to(DEVICE)).run(*on_device(x, gates), there(layer))
        monkeypatch.setattr(recurrent_kernels, "on_gpu", lambda _: False)
        close(out.cpu(), expected, tolerance)
        for part, was in zip(states_of(pool), before, strict=True):
            torch.testing.assert_close(part, was, rtol=0, atol=0, equal_nan=True)
    ends = [min(end, own - 1) for end, own in zip((size - 1, 0, 2, -1), counts, strict=False)]  # -1: nothing was kept
    above = zip(tree.parents.tolist(), ends, strict=True)
    paths = [climb(parents, end)[::-1] if end >= 0 else [] for parents, end in above]
    longest = max(map(len, paths)) + 1
    path = torch.tensor([each + [-1] * (longest - len(each)) for each in paths])
    exact.keep(path, requests)
    monkeypatch.setattr(recurrent_kernels, "on_gpu", lambda _: True)
    pool.keep(*on_device(path, requests))
    for mine, theirs in zip(states_of(pool), states_of(exact), strict=True):
        close(mine[:, requests].cpu(), theirs[:, requests], tolerance)


def test_padding_requests_share_a_row_and_leave_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a captured graph: the batch ends with rows of padding, whose trees and paths mean nothing."""
    torch.manual_seed(0)
    monkeypatch.setattr(recurrent_kernels, "on_gpu", lambda _: True)
    shape = SHAPES["even"]
    layer, pool = random_layer(shape, torch.float32), pool_of(shape, torch.float32, DEVICE)
    for part in states_of(pool):
        part[:, 0] = torch.randn_like(part[:, 0])
    alone = copied(pool, torch.float32, DEVICE)
    tree, (x, gates) = random_trees(4, 9, 4, ragged=False), rows(36, shape, torch.float32)
    requests, first = torch.tensor([0, *[pool.pad_row] * 3]), each_part(tree, lambda part: part[:1])
    out = TreeRows(pool, moved(tree), requests.to(DEVICE)).run(*on_device(x, gates), there(layer))
    expected = TreeRows(alone, moved(first), requests[:1].to(DEVICE)).run(*on_device(x[:9], gates[:9]), there(layer))
    assert torch.equal(out[:9], expected), "a row's sums do not depend on other requests"
    assert out.isfinite().all()
    path = torch.tensor([[0, -1], *[[0, -1]] * 3])
    pool.keep(*on_device(path, requests))
    alone.keep(*on_device(path[:1], requests[:1]))
    for mine, theirs in zip(states_of(pool), states_of(alone), strict=True):
        assert torch.equal(mine[0, 0], theirs[0, 0])
        assert mine[0, pool.pad_row].isfinite().all()


def test_larger_trees_and_other_dtypes_are_left_to_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_kernels, "on_gpu", lambda _: True)
    shape, states = SHAPES["even"], torch.empty(0)
    assert recurrent_kernels.computed(states, shape, 64)
    assert not recurrent_kernels.computed(states, shape, 65)
    assert not recurrent_kernels.computed(states.double(), shape)
