"""How often the child of each rank at each depth was what the target drew, given that its parent was accepted."""

from __future__ import annotations

from collections.abc import Iterable

from eagle_server.view.record import DraftedTree

LEAST_TRIES = 20  # an accuracy from fewer is chance: a tree must not grow on it


class RankCounts:
    """Counts of tries and hits, [depth][rank].

    A (depth, rank) was tried where its parent is on the accepted path and has a child of that rank: siblings are ranked
    as the drafter orders them. `leaves[d]` counts accepted parents at depth d (0: the root) below which nothing was
    drafted: what the tree was too narrow to measure.
    """

    def __init__(self, depth: int, ranks: int) -> None:
        self.tried = [[0] * ranks for _ in range(depth)]
        self.hits = [[0] * ranks for _ in range(depth)]
        self.leaves = [0] * depth
        self.cycles = self.emitted = 0

    def add(self, trees: Iterable[DraftedTree]) -> None:
        """One cycle."""
        for tree in trees:
            self._add(tree)

    def _add(self, tree: DraftedTree) -> None:
        children = tree.children()
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
        """Hits over tries, [depth][rank]; 0 where there were fewer than `least`."""
        return [
            [hit / tried if tried >= max(least, 1) else 0.0 for hit, tried in zip(*row, strict=True)]
            for row in zip(self.hits, self.tried, strict=True)
        ]
