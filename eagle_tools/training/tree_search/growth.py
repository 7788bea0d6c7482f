"""The tree with the largest expected number of accepted nodes, grown from accuracies by depth and rank.

A node is written as the ranks on its path. Its worth is the probability that it is accepted, estimated as the product
of the accuracies on its path. The expected number of tokens per cycle is 1 + the sum of all worths.

Source: Medusa (arXiv 2401.10774), section 2.3.3.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Choice = tuple[int, ...]
Accuracies = Sequence[Sequence[float]]  # [depth][rank], of a node given that its parent was accepted


@dataclass(frozen=True)
class Grown:
    """A node and its worth."""

    choice: Choice
    worth: float


def grow(accuracies: Accuracies, nodes: int, steps: int | None = None) -> list[Grown]:
    """The `nodes` nodes of largest worth up to depth `steps`, best first; fewer if the others have worth 0.

    A child is never worth more than its parent. So every prefix of the list contains all ancestors of its nodes, and no
    tree of that size has a larger sum. Ties go to the shallower node, then to the lower ranks.
    """
    deepest = len(accuracies) if steps is None else min(steps, len(accuracies))
    waiting: list[tuple[float, int, Choice]] = []

    def offer_children(parent: Choice, worth: float) -> None:
        if len(parent) < deepest:
            for rank, accuracy in enumerate(accuracies[len(parent)]):
                if accuracy > 0:
                    heapq.heappush(waiting, (-worth * accuracy, len(parent) + 1, (*parent, rank)))

    offer_children((), 1.0)
    grown: list[Grown] = []
    while waiting and len(grown) < nodes:
        negative, _, choice = heapq.heappop(waiting)
        grown.append(Grown(choice, -negative))
        offer_children(choice, -negative)
    return grown


def expected_tokens(accuracies: Accuracies, choices: Sequence[Choice]) -> float:
    """Expected tokens per cycle with this tree, the bonus included."""
    return 1.0 + sum(worth_of(accuracies, choice) for choice in choices)


def worth_of(accuracies: Accuracies, choice: Choice) -> float:
    """The product of the accuracies on a path; 0 if a node of it was not measured."""
    worth = 1.0
    for depth, rank in enumerate(choice):
        known = depth < len(accuracies) and rank < len(accuracies[depth])
        worth *= accuracies[depth][rank] if known else 0.0
    return worth


def wide_tree(accuracies: Accuracies, nodes: int) -> list[Choice]:
    """A tree to measure with, at most `nodes` nodes: children of all ranks below the nodes of largest worth."""
    ranks = len(accuracies[0])
    families = max(1, nodes // ranks)
    inner = [(), *(grown.choice for grown in grow(accuracies, families - 1, len(accuracies) - 1))]
    return [(*parent, rank) for parent in inner for rank in range(ranks)]


def level_tree(nodes: int, steps: int, ranks: int) -> list[Choice]:
    """A tree that uses no measurement: equally many children per node, levels filled from the top.

    The number of children is the smallest with which `steps` levels hold `nodes` nodes.
    """
    width = next((k for k in range(1, ranks) if sum(k**d for d in range(1, steps + 1)) >= nodes), ranks)
    return _first(_by_level(width, steps), nodes)


def comb_tree(nodes: int, steps: int) -> list[Choice]:
    """Another tree that uses no measurement: equally many nodes per level, all children of the best node above."""
    width = -(-nodes // steps)
    return _first(((*(0,) * level, rank) for rank in range(width) for level in range(steps)), nodes)


def _by_level(width: int, steps: int) -> Iterator[Choice]:
    level: list[Choice] = [()]
    for _ in range(steps):
        level = [(*parent, rank) for parent in level for rank in range(width)]
        yield from level


def _first(choices: Iterator[Choice], count: int) -> list[Choice]:
    return [choice for choice, _ in zip(choices, range(count), strict=False)]
