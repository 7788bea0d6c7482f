"""The cost of a cycle on this machine: engines with different trees, timed alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eagle_server.engine.engine import Engine
from eagle_tools.training.tree_search.tree_engines import Task

WARM_UP = 3  # cycles that are not counted


@dataclass
class Cost:
    """Timed cycles of one engine: the seconds of each, and the tokens of all."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    def tokens_per_cycle(self, batch: int) -> float:
        return self.tokens / (len(self.times) * batch)


class Treadmill:
    """An engine that always has `task.batch` requests to decode."""

    def __init__(self, engine: Engine, task: Task) -> None:
        self.engine, self.task = engine, task
        self._started = dict[str, bool]()  # for each request that has not ended: whether its prompt is done
        self._added = 0

    def step(self) -> tuple[float, int]:
        """Seconds and tokens of one cycle in which every request decodes and no prompt is computed."""
        while len(self._started) < self.task.batch or not all(self._started.values()):
            for _ in range(self.task.batch - len(self._started)):
                request = self.task.request(self._added, endless=True)
                self._started[request.request_id] = False
                self._added += 1
                self.engine.add(request)
            self._advance()
        start = time.perf_counter()
        tokens = self._advance()
        return time.perf_counter() - start, tokens

    def _advance(self) -> int:
        tokens = 0
        for delta in self.engine.step():
            if delta.error is not None:
                raise ValueError(delta.error)
            tokens += len(delta.token_ids)
            self._started[delta.request_id] = True
            if delta.finish_reason is not None:
                del self._started[delta.request_id]
        return tokens


def measure_costs(engines: Sequence[Engine], task: Task, rounds: int, done: Callable[[], object]) -> list[Cost]:
    """`rounds` cycles of each engine, run alternately, so that a busy machine slows all of them equally."""
    mills = [Treadmill(engine, task) for engine in engines]
    costs = [Cost() for _ in engines]
    for number in range(WARM_UP + rounds):
        for mill, cost in zip(mills, costs, strict=True):
            seconds, tokens = mill.step()
            if number >= WARM_UP:
                cost.times.append(seconds)
                cost.tokens += tokens
        if number >= WARM_UP:
            done()
    return costs
