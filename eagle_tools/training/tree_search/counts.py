"""Counts, for each depth and rank, of how often the child was the target's draw, given an accepted parent."""

from __future__ import annotations

from collections.abc import Iterable

from eagle_tools.tree.record import DraftedTree

LEAST_TRIES = 20  # an accuracy from fewer tries is mostly chance, so no tree is grown on it


class RankCounts:
    """Counts of tries and hits, [depth][rank].

    A (depth, rank) was tried if its parent is on the accepted path and has a child of that rank. Ranks follow the
    drafter's order of siblings. `leaves[d]` counts accepted parents at depth d (0: the root) without any drafted child,
    where the tree was too small to measure. A root alone does not count: nothing is drafted where a text ends.
    """

    def __init__(self, steps: int, ranks: int) -> None:
        self.tried = [[0] * ranks for _ in range(steps)]
        self.hits = [[0] * ranks for _ in range(steps)]
        self.leaves = [0] * steps
        self.cycles = self.emitted = 0

    def add(self, trees: Iterable[DraftedTree]) -> None:
        """Count the trees of one cycle."""
        for tree in trees:
            self._add(tree)

    def _add(self, tree: DraftedTree) -> None:
        children = tree.children()
        if not children[0]:
            return
        self.cycles += 1
        self.emitted += len(tree.emitted)
        following = (*tree.path[1:], None)
        for depth, (parent, accepted) in enumerate(zip(tree.path, following, strict=True)):
            if depth == len(self.tried):
                return
            self.leaves[depth] += not children[parent]
            for rank, child in enumerate(children[parent][: len(self.tried[depth])]):
                self.tried[depth][rank] += 1
                self.hits[depth][rank] += child == accepted

    def accuracies(self, least: int = LEAST_TRIES) -> list[list[float]]:
        """Hits / tries, [depth][rank]; 0 for fewer than `least` tries."""
        return [
            [hit / tried if tried >= max(least, 1) else 0.0 for hit, tried in zip(*row, strict=True)]
            for row in zip(self.hits, self.tried, strict=True)
        ]
