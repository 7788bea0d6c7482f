"""The shape of draft trees, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Pairs (steps, nodes) of trees that follow the load, the largest first.

        Each has half the steps and nodes of the one before. Static trees and tries have only their own shape.
        """
        shapes = [(self.steps, self.nodes)]
        while shapes[-1][0] > 1 and shapes[-1][1] > 2 and not self.choices and not self.ngram_steps:  # noqa: PLR2004
            steps, size = shapes[-1]
            steps = -(-steps // 2)
            pool = self.topk + (steps - 1) * self.topk**2
            shapes.append((steps, steps + 1 if self.topk == 1 else max(2, min(-(-size // 2), pool + 1))))
        return tuple(shapes)

    def captured_shapes(self, *, adaptive: bool) -> tuple[tuple[int, int], ...]:
        """Pairs (steps, nodes) of the cycles that graphs are captured for, the largest first."""
        return (*self.shapes, (0, 1)) if adaptive else ((self.model_steps, self.nodes),)

    @property
    def num_lookahead_slots(self) -> int:
        """Lookahead slots per decoding request: KV slots that drafting and verifying write after its own tokens.

        Draft steps write one slot for verified_id, which a draft language model reads first, and one per node that
        they feed. A block drafter writes verified_id and one row per level. Verifying writes one per node. Extend
        writes one row per level of the tree, and one more; P-EAGLE's writes its rows of all levels but one behind them.
        At least two: `Worker._run_ahead` writes position seq_len + 1 before the scheduler allocates it.
        """
        drafting = 0 if self.choices else max((self.model_steps - 1) * self.topk + 1, self.steps + self.model_steps)
        return max(2, drafting, self.nodes, self.ngram_steps + 1 if self.ngram_steps else 0)
