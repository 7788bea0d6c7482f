"""A budget that has no reasons."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from eagle_server.engine.engine import Engine
from eagle_server.plan import Decode, TreeShape
from eagle_server.worker.budget.budget import CycleBudget, Lessons
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.budget.outcome import LessonOutcome, Outcome


class RandomBudget:
    """A `Budget` that draws requests, depth, width, size and price anew in every cycle, and keeps what it drew."""

    is_adaptive = True

    def __init__(self, estimates: AcceptanceEstimates, steps: int, nodes: int, topk: int = 0, seed: int = 0) -> None:
        self.estimates, self.lessons = estimates, Lessons()
        self._steps, self._nodes, self._topk = steps, nodes, topk
        self._random = random.Random(seed)
        self.shapes: dict[int, tuple[TreeShape, ...]] = {}  # any
        self.drawn: list[tuple[int, CycleBudget]] = []  # with the number of requests that could draft

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        share = self._random.choice((0.0, 0.3, 0.8, 1.0))
        budget = CycleBudget(
            drafting=tuple(i for i, each in enumerate(able) if each and self._random.random() < share),
            steps=self._random.randint(1, max(1, self._steps)),
            nodes=self._random.randint(2, self._nodes),
            topk=self._random.randint(0, self._topk),
            is_lesson=self.lessons.next(decodes, TreeShape(self._steps, self._nodes)),
            least_logp=self._random.choice((-math.inf, math.log(0.02), math.log(0.2))),
        )
        self.drawn.append((sum(able), budget))
        return budget

    def learn(self, outcome: Outcome) -> float:
        assert outcome.tokens >= 0 and outcome.seconds > 0 and outcome.rows >= len(outcome.decodes) > 0
        if isinstance(outcome, LessonOutcome):
            drafted, verified = outcome.logp, outcome.guesses
            assert drafted.shape == outcome.parents.shape and drafted.size
            assert verified.shape == outcome.is_node.shape == outcome.depths.shape
            assert len(drafted) == len(verified) == len(outcome.path) == len(outcome.drafting)
            self.estimates.learn(outcome)
        return 0.0

    def forget(self, req_pool_index: int) -> None:
        return None

    def state(self) -> None:
        return None


def budgeted(engine: Engine, steps: int, nodes: int, seed: int = 0) -> RandomBudget:
    """Give an engine with adaptive trees a random budget."""
    drafting = engine.worker.drafting
    assert drafting.estimates is not None, "built with adaptive=True"
    drafting.budget = budget = RandomBudget(drafting.estimates, steps, nodes, drafting.drafter.widest, seed)
    return budget
