"""The shape of draft trees, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eagle_server.plan import TreeShape

# Rows of a captured verify forward (docs/design/adaptive-trees.md). Up to 64 they cost next to nothing, so of shapes of
# the same depth only the largest is captured. Up to about 256 the target's weights decide the time. Beyond, chains cost
# less than trees for what they give; none has more than 512, except the flags' tree of one request.
_FREE_ROWS, _TREE_ROWS, _CHAIN_ROWS = 64, 256, 512


@dataclass(frozen=True)
class TreeConfig:
    """The shape of the draft trees. The default is no tree: plain decoding.

    `model_steps` and `topk` describe the trees of a draft model, `ngram_steps` the n-gram tries. `nodes` is the number
    of nodes that the target verifies per request, root included, whichever of the two drafted them.
    """

    model_steps: int = 0
    topk: int = 1
    nodes: int = 1
    choices: tuple[tuple[int, ...], ...] = ()  # a static tree, see `speculation.static_tree`; (): a dynamic one
    ngram_steps: int = 0  # 0: no n-grams

    @property
    def steps(self) -> int:
        """Levels of the deepest tree."""
        return max(self.model_steps, self.ngram_steps)

    def shapes(self, widest: int) -> tuple[TreeShape, ...]:
        """Trees that follow the load where shapes are fixed, the largest first, down to a chain.

        Each is a part of the one before it, so what a lesson has drafted tells all that are smaller. `widest`: the
        largest topk that the drafter lets a budget choose. If that is 1, each has half the steps and nodes of the one
        before. Static trees and tries have only their own shape.
        """
        whole = TreeShape(self.steps, self.nodes, self.topk if widest > 1 else 0)
        if self.choices or self.ngram_steps:
            return (whole,)
        return tuple(dict.fromkeys((whole, *(self._narrower() if widest > 1 else self._halves()))))

    def _narrower(self) -> Iterator[TreeShape]:
        steps = max(1, self.steps - 1)
        for nodes, topk in ((2, 2), (4, 2), (8, 4)):
            if (shape := _tree(steps, self.nodes // nodes, self.topk // topk)) is not None:
                yield shape
        for length in (steps, self.steps // 2, self.steps // 3):
            length = max(1, min(length, self.nodes - 1))
            yield TreeShape(length, length + 1, 1)

    def _halves(self) -> Iterator[TreeShape]:
        steps, nodes = self.steps, self.nodes
        while steps > 1 and nodes > 2:  # noqa: PLR2004
            steps = -(-steps // 2)
            pool = self.topk + (steps - 1) * self.topk**2
            nodes = steps + 1 if self.topk == 1 else max(2, min(-(-nodes // 2), pool + 1))
            yield TreeShape(steps, nodes)

    def captured_shapes(self, requests: int, widest: int, *, adaptive: bool) -> tuple[TreeShape, ...]:
        """What cycles of this many requests may draft and have graphs for, the largest first, and nothing last."""
        if not adaptive:
            return (TreeShape(self.model_steps, self.nodes),)
        shapes = self.shapes(widest)
        rows = {shape: _TREE_ROWS if shape.topk > 1 else _CHAIN_ROWS for shape in shapes}
        fitting = [shape for shape in shapes if requests * shape.nodes <= max(rows[shape], self.nodes)]
        free = {shape.steps: shape for shape in fitting[::-1] if requests * shape.nodes <= _FREE_ROWS}
        fitting = [shape for shape in fitting if shape.nodes >= free.get(shape.steps, shape).nodes]
        return (*(fitting or shapes[-1:]), TreeShape(0, 1))


def extend_widths(steps: int) -> tuple[int, ...]:
    """Rows per request that draft-extend is captured with, the narrow ones first, if trees have up to `steps` levels.

    A cycle accepts at most one token more than its trees have levels. The last width holds what the deepest accepts.
    """
    widest = steps + 1
    narrow = max(2, steps // 2 + 1)
    return (narrow, widest) if narrow < widest else (widest,)


def fitting(shapes: Mapping[int, Sequence[TreeShape]], requests: int) -> Sequence[TreeShape]:
    """Of shapes by the sizes of batches, in order: those of the first that holds so many requests, else of the last.

    Empty where there are none.
    """
    return next((each for size, each in shapes.items() if size >= requests), ((), *shapes.values())[-1])


def _tree(steps: int, nodes: int, topk: int) -> TreeShape | None:
    """A tree of at most so many nodes; None if it has no more than a chain."""
    nodes = min(nodes, 1 + topk + (steps - 1) * topk**2)
    return TreeShape(steps, nodes, topk) if topk > 1 and nodes > steps + 1 else None
