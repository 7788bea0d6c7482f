"""The trees of each cycle as plain values. A drafter that wraps another one records them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from eagle_server.request import DraftTree
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.draft_tree import draft_tree
from eagle_server.worker.cycle import Cycle
from eagle_server.worker.worker import Worker


@dataclass(frozen=True)
class DraftedTree:
    """One request's tree of one cycle, without padding. Node 0 is the root; parents come before children.

    `emitted` holds the tokens of `path` after the root, and the bonus. A request that ends within them (stop,
    max_tokens) sends fewer.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # node numbers, -1 for the root
    scores: tuple[float | None, ...]  # log of the estimated chance of the path, None if there is none; 0 for the root
    path: tuple[int, ...]  # the accepted nodes, the root first
    emitted: tuple[int, ...]

    @classmethod
    def of(cls, tree: DraftTree, emitted: Sequence[int]) -> DraftedTree:
        """From the tree that a request gets, and all tokens that the cycle drew."""
        scores = [0.0, *[None] * (len(tree.token_ids) - 1)] if tree.scores is None else tree.scores
        return cls(tuple(tree.token_ids), tuple(tree.parents), tuple(scores), (0, *tree.path), tuple(emitted))

    @property
    def bonus(self) -> int:
        """The target's token after the last accepted node."""
        return self.emitted[-1]

    def children(self) -> list[list[int]]:
        """Node numbers of each node's children, those with the best scores first."""
        below: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                below[parent].append(node)
        return [sorted(nodes, key=self._preference) for nodes in below]

    def chance(self, node: int) -> float | None:
        """The drafter's estimate for a node given its parent, None if it has none."""
        if node == 0:
            return None
        score, above = self.scores[node], self.scores[self.parents[node]]
        if score is None or above is None:
            return None
        return math.exp(min(score - above, 0.0)) if math.isfinite(score) else 0.0

    def _preference(self, node: int) -> tuple[float, int]:
        score = self.scores[node]
        return (0.0 if score is None else -score, node)


@contextmanager
def recorded(worker: Worker, record: Callable[[list[DraftedTree]], None]) -> Iterator[None]:
    """Inside this context, `record` gets the trees of every cycle that the worker runs, one per request.

    They are copied to the host, which waits for the device in every cycle. So this is for inspection, not for serving.
    """

    def observe(cycle: Cycle) -> None:
        record(drafted_trees(cycle.tree, cycle.accepted, len(cycle.plan.decodes)))

    worker.observers.append(observe)
    try:
        yield
    finally:
        worker.observers.remove(observe)


def drafted_trees(tree: Tree, accepted: Accepted, requests: int) -> list[DraftedTree]:
    """The trees of the first `requests` of a batch; the others are padding."""
    tokens, parents = tree.tokens[:requests].tolist(), tree.parents[:requests].tolist()
    scores = None if tree.scores is None else tree.scores[:requests].tolist()
    paths, drawn = accepted.path[:requests].tolist(), accepted.tokens[:requests].tolist()
    trees = []
    for number, path in enumerate(paths):
        emitted = drawn[number][: sum(node >= 0 for node in path)]
        node_scores = None if scores is None else scores[number]
        drafted = draft_tree(tokens[number], parents[number], node_scores, path, emitted, tree.steps)
        trees.append(DraftedTree.of(drafted, emitted))
    return trees
