"""A budget that has no reasons."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from eagle_server.engine.engine import Engine
from eagle_server.plan import Decode, TreeShape
from eagle_server.worker.budget.budget import CycleBudget
from eagle_server.worker.budget.prospects import Floats, Ints


class RandomBudget:
    """A `Budget` that draws requests, depth, width, size and price anew in every cycle, and keeps what it drew."""

    def __init__(self, steps: int, nodes: int, topk: int = 0, seed: int = 0) -> None:
        self._steps, self._nodes, self._topk = steps, nodes, topk
        self._random = random.Random(seed)
        self.drawn: list[tuple[int, CycleBudget]] = []  # with the number of requests that could draft

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool], *, lesson: bool = False) -> CycleBudget:
        share = self._random.choice((0.0, 0.3, 0.8, 1.0))
        budget = CycleBudget(
            drafting=tuple(i for i, each in enumerate(able) if each and self._random.random() < share),
            steps=self._random.randint(1, max(1, self._steps)),
            nodes=self._random.randint(2, self._nodes),
            topk=self._random.randint(0, self._topk),
            least_logp=self._random.choice((-math.inf, math.log(0.02), math.log(0.2))),
        )
        self.drawn.append((sum(able), budget))
        return budget

    def largest(self, requests: int) -> TreeShape:
        return TreeShape(self._steps, self._nodes)

    def saw_trees(self, decodes: Sequence[Decode], logp: Floats, parents: Ints, shape: TreeShape) -> None:
        assert logp.shape == parents.shape and len(logp) == len(decodes) and logp.size

    def took(self, requests: int, *, has_drafted: bool, tokens: int, seconds: float) -> None:
        assert requests > 0 and tokens >= 0 and seconds > 0

    def forget(self, req_pool_index: int) -> None:
        return None

    def state(self) -> None:
        return None


def budgeted(engine: Engine, steps: int, nodes: int, seed: int = 0) -> RandomBudget:
    """Give an engine with adaptive trees a random budget."""
    drafting = engine.worker.drafting
    assert drafting.estimates is not None, "built with adaptive=True"
    drafting.budget = budget = RandomBudget(steps, nodes, drafting.drafter.widest, seed)
    return budget
