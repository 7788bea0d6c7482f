"""Two trees joined into one: no path twice, no node without its parent, and the best nodes within the budget."""

from __future__ import annotations

import math
import random

import pytest
import torch

from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.merge import REFUSED, UNASKED, best, join_trees
from eagle_server.speculation.tree import Tree, build_tree, compacted
from eagle_server.worker.budget.calibration import Calibration
from tests.support.trees import tree_of

DEPTH = 4
Path = tuple[int, ...]


def random_paths(draw: random.Random, size: int, padding: int) -> dict[Path, float]:
    """A random tree as paths with estimates. Parents come first, and siblings differ."""
    nodes: dict[Path, float] = {}
    while len(nodes) < size - padding:
        parent = draw.choice([(), *(path for path in nodes if len(path) < DEPTH)])
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
    return build_tree(roots, torch.full_like(roots, 3), tokens, parents, DEPTH, scores)


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
    union, _ = join_trees(scored(first, 10), scored(second, 12), DEPTH)
    everything, _ = best(union, torch.full((3, 22), 0.5), 22)
    chances = torch.rand(3, 22, generator=torch.Generator().manual_seed(seed)) * 0.98 + 0.001
    kept, order = best(union, chances, 7)
    for row in range(3):
        paths = paths_of(everything, row)
        assert len(paths) == len(set(paths))
        assert set(paths) == {*first[row], *second[row]}
        few = paths_of(kept, row)
        assert len(few) == min(7, len(paths))
        assert all(path[:-1] in {(), *few} for path in few), "closed under ancestors"
        assert len(set(few)) == len(few)
        worth = path_chances(chances, row, [*first[row]], [*second[row]])
        assert sorted((worth[path] for path in few), reverse=True) == pytest.approx(
            sorted(worth.values(), reverse=True)[:7]
        )
        assert order[row].shape == (7,)


def path_chances(chances: torch.Tensor, row: int, first: list[Path], second: list[Path]) -> dict[Path, float]:
    """The reference: a duplicate has the chance of the node in the first source. A path's chance is the product."""
    each: dict[Path, float] = {}
    for i, path in [*enumerate(first), *((10 + i, path) for i, path in enumerate(second))]:
        each.setdefault(path, chances[row, i].item())
    return {path: torch.tensor([each[path[:n]] for n in range(1, len(path) + 1)]).prod().item() for path in each}


def test_what_each_source_said_of_a_node() -> None:
    first = scored([{(1,): 0.5, (1, 2): 0.4}], 2)
    second = scored([{(1,): 0.9, (3,): 0.1, (3, 4): 0.7, (1, 5): 0.2}], 5)
    union, estimates = join_trees(first, second, DEPTH)
    assert union.tokens.tolist() == [[9, 1, 2, -1, 3, 4, 5, -1]]
    assert union.parents.tolist() == [[-1, 0, 1, 0, 0, 4, 1, 0]]
    said = list(zip(*estimates[:, 0].tolist(), strict=True))
    assert said[0] == pytest.approx((0.5, 0.9))  # both
    assert said[1] == pytest.approx((0.4, REFUSED))  # the second guessed 5 there
    assert said[3] == pytest.approx((REFUSED, 0.1))
    assert said[4] == pytest.approx((UNASKED, 0.7))  # the first has nothing under 3
    assert said[5] == pytest.approx((REFUSED, 0.2))


def test_calibration_follows_what_was_accepted() -> None:
    """Two sources have equal estimates, but only the second one's nodes are accepted. Its chance rises."""
    calibration = Calibration(torch.device("cpu"))
    first, second = scored([{(1,): 0.5}], 1), scored([{(2,): 0.5}], 1)
    for _ in range(100):
        union, estimates = join_trees(first, second, DEPTH)
        chances, bins, priors = calibration.chances(estimates, union.depths[:, 1:])
        tree, order = best(union, chances, 2)
        hit = tree.tokens[0].tolist().index(2)
        accepted = Accepted(
            torch.tensor([[0, hit]]),
            torch.tensor([1]),
            torch.tensor([[2, 7]]),
            torch.tensor([2]),
            torch.tensor([True]),
            torch.zeros(1, 3),
        )
        calibration.observe(bins.gather(1, order), priors.gather(1, order), tree, accepted, 1)
    kept, given_up = chances[0, 1].item(), chances[0, 0].item()
    assert kept > 0.8
    assert given_up < 0.1
    assert kept < 1, "parents must outrank their children"
    assert tree.tokens[0].tolist() == [9, 2, 1]


def test_nodes_below_a_refused_one_and_padding_teach_nothing() -> None:
    calibration = Calibration(torch.device("cpu"))
    union, estimates = join_trees(scored([{(1,): 0.5, (1, 2): 0.9}] * 2, 2), scored([{}, {}], 2), DEPTH)
    chances, bins, priors = calibration.chances(estimates, union.depths[:, 1:])
    tree, order = best(union, chances, 3)
    nothing = Accepted(
        torch.tensor([[0, -1], [0, -1]]),
        torch.tensor([0, 0]),
        torch.tensor([[7, -1], [7, -1]]),
        torch.tensor([2, 2]),
        torch.tensor([True, True]),
        torch.zeros(2, 4),
    )
    calibration.observe(bins.gather(1, order), priors.gather(1, order), tree, nothing, 1)
    assert calibration.accepted.sum() == 0
    assert calibration.expected.sum() == pytest.approx(0.5), "one node of one request was tried"


def test_a_compacted_tree_teaches_what_the_padded_one_teaches() -> None:
    """Nodes 1 and 4 are left of the first tree, and all of the second."""
    parents, tokens = [[-1, 0, 0, 2, 1]] * 2, [[9, 5, -1, -1, 7], [9, 5, 6, 7, 8]]
    padded = tree_of(parents, tokens, [3, 8], 2)
    tree = compacted(padded)
    bins, priors = torch.arange(8).view(2, 4), torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    learned = []
    for each, path in ((padded, [[0, 1, 4], [0, 2, 3]]), (tree, [[0, 1, 2], [0, 2, 3]])):
        calibration, rest = Calibration(torch.device("cpu")), torch.zeros(2, 3, dtype=torch.int64)
        accepted = Accepted(torch.tensor(path), rest[:, 0], rest, rest[:, 0], rest[:, 0] == 0, torch.zeros(2, 5))
        calibration.observe(bins, priors, each, accepted, 2)
        learned.append((calibration.accepted, calibration.expected))
    assert learned[0][0].nonzero()[:, 0].tolist() == [0, 3, 5, 6]
    for one, other in zip(*learned, strict=True):
        assert torch.allclose(one, other)
