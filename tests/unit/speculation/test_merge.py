"""Two trees joined into one: no path twice, no node without its parent, and the best nodes within the budget."""

from __future__ import annotations

import math
import random

import pytest
import torch

from eagle_server.speculation.merge import REFUSED, UNASKED, best, chances, join_trees
from eagle_server.speculation.tree import Tree, build_tree

STEPS = 4
Path = tuple[int, ...]


def random_paths(draw: random.Random, size: int, padding: int) -> dict[Path, float]:
    """A random tree as paths with estimates. Parents come first, and siblings differ."""
    nodes: dict[Path, float] = {}
    while len(nodes) < size - padding:
        parent = draw.choice([(), *(path for path in nodes if len(path) < STEPS)])
        nodes.setdefault((*parent, draw.randrange(4)), draw.uniform(0.01, 1.0))
    return nodes


def scored(trees: list[dict[Path, float]], width: int) -> Tree:
    tokens = torch.full((len(trees), width), -1)
    parents, scores = torch.zeros(len(trees), width, dtype=torch.int64), torch.zeros(len(trees), width)
    for row, nodes in enumerate(trees):
        numbers = {(): 0, **{path: i + 1 for i, path in enumerate(nodes)}}
        for i, path in enumerate(nodes):
            tokens[row, i], parents[row, i] = path[-1], numbers[path[:-1]]
            scores[row, i] = math.log(math.prod(nodes[path[:n]] for n in range(1, len(path) + 1)))
    roots = torch.full((len(trees),), 9)
    return build_tree(roots, torch.full_like(roots, 3), tokens, parents, STEPS, scores)


def paths_of(tree: Tree, row: int) -> list[Path]:
    """The path of every drafted node that is not padding."""
    found: list[Path] = [()]
    for token, parent in zip(tree.tokens[row, 1:].tolist(), tree.parents[row, 1:].tolist(), strict=True):
        assert parent < len(found), "parents come first"
        found.append((-1,) if token < 0 else (*found[parent], token))
    return [path for path in found[1:] if path != (-1,)]


@pytest.mark.parametrize("seed", range(20))
def test_the_union_holds_every_path_once_and_the_best_of_them_are_kept(seed: int) -> None:
    draw = random.Random(seed)
    first = [random_paths(draw, 10, draw.randrange(3)) for _ in range(3)]
    second = [random_paths(draw, 12, draw.randrange(13)) for _ in range(3)]
    union, _ = join_trees(scored(first, 10), scored(second, 12), STEPS)
    everything = best(union, torch.full((3, 22), 0.5), 22)
    drawn = torch.rand(3, 22, generator=torch.Generator().manual_seed(seed)) * 0.98 + 0.001
    kept = best(union, drawn, 7)
    for row in range(3):
        paths = paths_of(everything, row)
        assert len(paths) == len(set(paths))
        assert set(paths) == {*first[row], *second[row]}
        few = paths_of(kept, row)
        assert len(few) == min(7, len(paths))
        assert all(path[:-1] in {(), *few} for path in few), "closed under ancestors"
        assert len(set(few)) == len(few)
        worth = path_chances(drawn, row, [*first[row]], [*second[row]])
        assert sorted((worth[path] for path in few), reverse=True) == pytest.approx(
            sorted(worth.values(), reverse=True)[:7]
        )


def path_chances(drawn: torch.Tensor, row: int, first: list[Path], second: list[Path]) -> dict[Path, float]:
    """The reference: a duplicate has the chance of the node in the first source. A path's chance is the product."""
    each: dict[Path, float] = {}
    for i, path in [*enumerate(first), *((10 + i, path) for i, path in enumerate(second))]:
        each.setdefault(path, drawn[row, i].item())
    return {path: torch.tensor([each[path[:n]] for n in range(1, len(path) + 1)]).prod().item() for path in each}


def test_what_each_source_said_of_a_node() -> None:
    first = scored([{(1,): 0.5, (1, 2): 0.4}], 2)
    second = scored([{(1,): 0.9, (3,): 0.1, (3, 4): 0.7, (1, 5): 0.2}], 5)
    union, estimates = join_trees(first, second, STEPS)
    assert union.tokens.tolist() == [[9, 1, 2, -1, 3, 4, 5, -1]]
    assert union.parents.tolist() == [[-1, 0, 1, 0, 0, 4, 1, 0]]
    said = list(zip(*estimates[:, 0].tolist(), strict=True))
    assert said[0] == pytest.approx((0.5, 0.9))  # both
    assert said[1] == pytest.approx((0.4, REFUSED))  # the second guessed 5 there
    assert said[3] == pytest.approx((REFUSED, 0.1))
    assert said[4] == pytest.approx((UNASKED, 0.7))  # the first has nothing under 3
    assert said[5] == pytest.approx((REFUSED, 0.2))


def test_a_node_of_both_is_worth_more_and_a_contested_one_half() -> None:
    first, second = scored([{(1,): 0.6, (2,): 0.2}], 2), scored([{(1,): 0.5, (1, 3): 0.8}], 2)
    union, estimates = join_trees(first, second, STEPS)
    found = chances(estimates)[0].tolist()
    assert found[0] == pytest.approx(0.6 + 0.4 * 0.25)
    assert found[1] == pytest.approx(0.1), "the second proposed another child of the root"
    assert found[3] == pytest.approx(0.8), "the first proposed nothing there"
    assert best(union, chances(estimates), 2).tokens.tolist() == [[9, 1, 3]]
