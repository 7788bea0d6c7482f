"""The output distribution of the acceptance rule, by exact enumeration.

Each position has one noise value u in [0, 1), shared by all nodes at this position. A node draws by inverse transform:
it inverts the cumulative distribution of its probs at u. The break points of these functions divide [0, 1) into cells.
No draw changes inside a cell, so one point per cell, weighted by the cell's size, covers all values of u. The result is
exact up to rounding.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from eagle_server.speculation.accept import Lossless
from eagle_server.speculation.sampling import SamplingBatch
from tests.support.sampling import request_sampling
from tests.support.trees import tree_of

LENGTH = 3  # tokens in the joint distribution
GREEDY = request_sampling(temperature=0.0)
Text = tuple[int, ...]
Point = tuple[tuple[float, float], ...]  # (size, midpoint) of a cell per position


@dataclass(frozen=True)
class Node:
    """`path` lists the tokens after the root; `parent` is a node number."""

    parent: int
    path: Text


@dataclass(frozen=True)
class Walk:
    """A rule's result for one set of draws: the output tokens, and whether the next token needs a fresh draw."""

    tokens: Text
    fresh: bool = False


@dataclass(frozen=True)
class Key:
    """Which noise a node uses.

    `offset` maps the node's depth to a position relative to the root. `reach`: how many text lengths share one noise
    value.
    """

    reach: int
    offset: Callable[[int], int]


Rule = Callable[[list[Node], list[list[int]]], list[Walk]]


class Problem:
    """Random next-token probs with zeros and ties, and a random tree for every text. Both depend only on the text."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.random, self.vocab = random.Random(seed), vocab
        self.probs = {
            text: self._random_probs() for n in range(LENGTH) for text in itertools.product(range(self.vocab), repeat=n)
        }
        self.trees = {text: self._tree() for text in self.probs}

    def _random_probs(self) -> list[float]:
        weights = [self.random.choice((0.0, 0.25, 0.25, self.random.random())) for _ in range(self.vocab)]
        total = math.fsum(weights)
        return [w / total for w in weights] if total else self._random_probs()

    def _tree(self) -> list[Node]:
        """A random tree. Parents come before children; siblings may have the same token."""
        nodes = [Node(-1, ())]
        for _ in range(self.random.randint(1, 7)):
            parent = self.random.choice([i for i, node in enumerate(nodes) if len(node.path) < LENGTH])
            nodes.append(Node(parent, (*nodes[parent].path, self.random.randrange(self.vocab))))
        return nodes

    def probability(self, text: Text, given: int = 0) -> float:
        return math.prod(self.probs[text[:i]][text[i]] for i in range(given, len(text)))

    def distribution(self) -> dict[Text, float]:
        return {text: self.probability(text) for text in itertools.product(range(self.vocab), repeat=LENGTH)}

    def draw(self, text: Text, u: float) -> int:
        """The next token after `text` if the noise is u."""
        total = 0.0
        for token, probability in enumerate(self.probs[text]):
            total += probability
            if u < total:
                return token
        raise AssertionError("u lies inside a cell, so below 1")

    def cells(self, lengths: range) -> list[tuple[float, float]]:
        """(size, midpoint) of each cell of a noise value that texts of these lengths use."""
        points = {0.0, 1.0}
        for text in self.probs:
            if len(text) in lengths:
                points.update(min(total, 1.0) for total in itertools.accumulate(self.probs[text]))
        return [(b - a, (a + b) / 2) for a, b in itertools.pairwise(sorted(points)) if b - a > 1e-13]


def output_distribution(problem: Problem, rule: Rule, key: Key) -> tuple[dict[Text, float], Counter[int]]:
    """The distribution of the first tokens if `rule` accepts, and how often each number of drafts was accepted."""
    distribution: defaultdict[Text, list[float]] = defaultdict(list)
    accepted: Counter[int] = Counter()
    cells = [problem.cells(range(position, position + key.reach)) for position in range(LENGTH)]
    groups: dict[Text, list[Point]] = {(): list(itertools.product(*cells))}
    while groups:
        text, points = groups.popitem()
        tree = problem.trees[text]
        draws = [[node_draw(problem, text, node, point, key) for node in tree] for point in points]
        for point, walk in zip(points, rule(tree, draws), strict=True):
            accepted[len(walk.tokens) - 1] += 1
            output = (*text, *walk.tokens)[:LENGTH]
            mass = math.prod(size for size, _ in point)
            if walk.fresh:
                for rest in itertools.product(range(problem.vocab), repeat=LENGTH - len(output)):
                    distribution[(*output, *rest)].append(mass * problem.probability((*output, *rest), len(output)))
            elif len(output) == LENGTH:
                distribution[output].append(mass)
            else:
                groups.setdefault(output, []).append(point)
    return {text: math.fsum(masses) for text, masses in distribution.items()}, accepted


def node_draw(problem: Problem, text: Text, node: Node, point: Point, key: Key) -> int:
    """The target's draw at a node. Beyond LENGTH tokens the value does not matter."""
    before = (*text, *node.path)
    if len(before) >= LENGTH:
        return 0
    return problem.draw(before, point[len(text) + key.offset(len(node.path))][1])


def production(tree: list[Node], draws: list[list[int]]) -> list[Walk]:
    """`accept`, with greedy sampling and logits that are largest at the given draws."""
    parents, tokens = [node.parent for node in tree], [(0, *node.path)[-1] for node in tree]
    inputs = tree_of([parents] * len(draws), [tokens] * len(draws), [0] * len(draws), LENGTH)
    logits = torch.nn.functional.one_hot(torch.tensor(draws).view(-1)).float()
    accepted = Lossless().accept(inputs, logits, SamplingBatch.of([GREEDY] * len(draws), logits.device))
    lengths, tokens = accepted.accept_length.tolist(), accepted.tokens.tolist()
    return [Walk(tuple(row[: length + 1])) for length, row in zip(lengths, tokens, strict=True)]


def fresh_bonus_after_a_miss(tree: list[Node], draws: list[list[int]]) -> list[Walk]:
    """A wrong rule: it draws the bonus again, although this draw already decided the rejection."""
    return [Walk(walk.tokens[:-1], fresh=True) for walk in production(tree, draws)]


def nodes_dropped_by_their_own_draw(tree: list[Node], draws: list[list[int]]) -> list[Walk]:
    """A wrong rule: it rejects a drafted node if the draw at this node is token 0, and draws again."""
    walks = []
    for row, walk in zip(draws, production(tree, draws), strict=True):
        path = walk.tokens[:-1]
        own = [next(row[i] for i, node in enumerate(tree) if node.path == path[:n]) for n in range(1, len(path) + 1)]
        cut = own.index(0) if 0 in own else None
        walks.append(walk if cut is None else Walk(path[:cut], fresh=True))
    return walks


def bonus_from_the_root(tree: list[Node], draws: list[list[int]]) -> list[Walk]:
    """A wrong rule: it reads the bonus from the root's row instead of the last accepted node's."""
    return [Walk((*walk.tokens[:-1], row[0])) for row, walk in zip(draws, production(tree, draws), strict=True)]


BY_POSITION = Key(reach=1, offset=lambda depth: depth)
ONE_KEY_FOR_TWO_DEPTHS = Key(reach=2, offset=lambda depth: max(depth - 1, 0))
MUTANTS: dict[str, tuple[Rule, Key]] = {
    "fresh bonus after a miss": (fresh_bonus_after_a_miss, BY_POSITION),
    "nodes dropped by their own draw": (nodes_dropped_by_their_own_draw, BY_POSITION),
    "bonus from the root's row": (bonus_from_the_root, BY_POSITION),
    "root and first level share their noise": (production, ONE_KEY_FOR_TWO_DEPTHS),
}


def distance(distribution: dict[Text, float], other: dict[Text, float]) -> float:
    """Total variation."""
    return (
        math.fsum(
            abs(distribution.get(text, 0.0) - other.get(text, 0.0)) for text in distribution.keys() | other.keys()
        )
        / 2
    )


def test_the_distribution_of_the_first_tokens_is_the_targets_for_any_tree() -> None:
    accepted: Counter[int] = Counter()
    for seed in range(24):
        problem = Problem(seed, vocab=(5, 3, 4, 3)[seed % 4])
        distribution, lengths = output_distribution(problem, production, BY_POSITION)
        assert distance(distribution, problem.distribution()) < 1e-12
        accepted += lengths
    assert min(accepted[n] for n in range(LENGTH)) > 100


@pytest.mark.parametrize("mutant", MUTANTS)
def test_enumeration_catches_a_planted_bias(mutant: str) -> None:
    rule, key = MUTANTS[mutant]
    problems = [Problem(seed, vocab=3) for seed in range(4)]
    distances = [distance(output_distribution(problem, rule, key)[0], problem.distribution()) for problem in problems]
    assert max(distances) > 0.02
