"""The shapes of trees that follow the load where shapes are fixed."""

from __future__ import annotations

import pytest

from eagle_server.speculation.tree_config import TreeConfig, fitting
from eagle_server.worker.graphs import bucket_sizes

LARGE = TreeConfig(6, 8, 64)
LADDERS: dict[TreeConfig, list[tuple[int, ...]]] = {
    LARGE: [(6, 64, 8), (5, 32, 4), (5, 16, 4), (5, 8, 2), (5, 6, 1), (3, 4, 1), (2, 3, 1)],
    TreeConfig(3, 4, 13): [(3, 13, 4), (2, 6, 2), (2, 3, 1), (1, 2, 1)],
    TreeConfig(2, 2, 5): [(2, 5, 2), (1, 2, 1)],
    TreeConfig(1, 4, 5): [(1, 5, 4), (1, 2, 1)],
}


@pytest.mark.parametrize("tree", LADDERS, ids=str)
def test_the_ladder_goes_down_to_chains(tree: TreeConfig) -> None:
    assert [tuple(shape) for shape in tree.shapes(tree.topk)] == LADDERS[tree]


@pytest.mark.parametrize("tree", [TreeConfig(s, k, n) for s in (1, 2, 5, 8) for k in (2, 3, 10) for n in (4, 9, 64)])
def test_each_shape_is_a_part_of_the_one_before_it(tree: TreeConfig) -> None:
    shapes = tree.shapes(tree.topk)
    assert len(set(shapes)) == len(shapes) and shapes[-1].topk == 1
    for larger, smaller in zip(shapes, shapes[1:], strict=False):
        assert all(small <= large for small, large in zip(smaller, larger, strict=True))
        assert smaller.nodes > smaller.steps


def test_a_drafter_without_a_width_has_halves_and_static_trees_and_tries_have_their_own() -> None:
    assert LARGE.shapes(1) == ((6, 64, 0), (3, 32, 0), (2, 16, 0), (1, 8, 0))
    assert TreeConfig(5, 1, 6).shapes(1) == ((5, 6, 0), (3, 4, 0), (2, 3, 0), (1, 2, 0))
    assert TreeConfig(4, 4, 26, choices=((0,),)).shapes(4) == ((4, 26, 4),)
    assert TreeConfig(6, 8, 64, ngram_steps=6).shapes(8) == ((6, 64, 8),)


def test_batches_have_the_shapes_that_fit_and_fewer_graphs_than_with_all() -> None:
    by_size = {size: LARGE.captured_shapes(size, 8, adaptive=True) for size in bucket_sizes(64)}
    largest = {size: tuple(shapes[0]) for size, shapes in by_size.items()}
    assert largest == {
        **dict.fromkeys((1, 2, 4), (6, 64, 8)),
        8: (5, 32, 4),
        16: (5, 16, 4),
        **dict.fromkeys((24, 32), (5, 8, 2)),
        **dict.fromkeys((40, 48, 56, 64), (5, 6, 1)),
    }
    assert [tuple(shape) for shape in by_size[1]] == [(6, 64, 8), (5, 32, 4), (3, 4, 1), (2, 3, 1), (0, 1, 0)]
    assert [tuple(shape) for shape in by_size[8][:-1]] == [(5, 32, 4), (5, 16, 4), (5, 8, 2), (3, 4, 1), (2, 3, 1)]
    assert [tuple(shape) for shape in by_size[64][:-1]] == [(5, 6, 1), (3, 4, 1), (2, 3, 1)]
    assert max(size * shape.nodes for size, shapes in by_size.items() for shape in shapes) == 384  # rows of logits
    trees = sum(shape.topk > 1 for shapes in by_size.values() for shape in shapes)
    chains = sum(shape.topk == 1 for shapes in by_size.values() for shape in shapes)
    assert (trees, chains) == (14, 29)


def test_batches_beyond_the_largest_size_have_its_shapes() -> None:
    by_size = {size: LARGE.captured_shapes(size, 8, adaptive=True) for size in (1, 8)}
    assert [fitting(by_size, requests) for requests in (1, 2, 8, 9)] == [by_size[1], *[by_size[8]] * 3]
    assert fitting({}, 3) == ()


def test_one_shape_is_left_where_none_fits() -> None:
    assert LARGE.captured_shapes(4096, 8, adaptive=True) == ((2, 3, 1), (0, 1, 0))
    assert LARGE.captured_shapes(4096, 8, adaptive=False) == ((6, 64, 0),)
    assert TreeConfig(6, 8, 600).captured_shapes(1, 8, adaptive=True)[0] == (6, 600, 8)
