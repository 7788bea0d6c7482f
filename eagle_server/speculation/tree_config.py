"""The shape of draft trees, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeConfig:
    """The shape of the draft trees. The default is no tree: plain decoding.

    `num_steps` and `topk` describe the trees of a draft model, `ngram_depth` the n-gram tries. `num_draft_tokens` is
    the number of nodes that the target verifies per request, root included, whichever of the two drafted them.
    """

    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    choices: tuple[tuple[int, ...], ...] = ()  # a static tree, see `speculation.static_tree`; (): a dynamic one
    ngram_depth: int = 0  # 0: no n-grams
    ngram_share_tokens: int = 0  # tokens of all requests' texts to look n-grams up in; 0: the request's own text only

    @property
    def depth(self) -> int:
        """Depth of the deepest tree."""
        return max(self.num_steps, self.ngram_depth)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Pairs (num_steps, num_draft_tokens) of trees that follow the load, the largest first.

        Each has half the steps and nodes of the one before. Static trees and tries have only their own shape.
        """
        shapes = [(self.depth, self.num_draft_tokens)]
        while shapes[-1][0] > 1 and shapes[-1][1] > 2 and not self.choices and not self.ngram_depth:  # noqa: PLR2004
            steps, size = shapes[-1]
            steps = -(-steps // 2)
            pool = self.topk + (steps - 1) * self.topk**2
            shapes.append((steps, steps + 1 if self.topk == 1 else max(2, min(-(-size // 2), pool + 1))))
        return tuple(shapes)

    def captured_shapes(self, *, adaptive: bool) -> tuple[tuple[int, int], ...]:
        """Pairs (num_steps, num_draft_tokens) of the cycles that graphs are captured for, the largest first."""
        return (*self.shapes, (0, 1)) if adaptive else ((self.num_steps, self.num_draft_tokens),)

    @property
    def num_lookahead_slots(self) -> int:
        """Lookahead slots per decoding request: KV slots that drafting and verifying write after its own tokens.

        Draft steps write one slot for verified_id, which a draft language model reads first, and one per node that
        they feed. A block drafter writes verified_id and one row per level. Verifying writes one per node. Extend
        writes one row per level of the tree, and one more; P-EAGLE's writes its rows of all levels but one behind them.
        At least two: the next plain forward may run before its slot is allocated, see `Worker`.
        """
        drafting = 0 if self.choices else max((self.num_steps - 1) * self.topk + 1, self.depth + self.num_steps)
        return max(2, drafting, self.num_draft_tokens, self.ngram_depth + 1 if self.ngram_depth else 0)
