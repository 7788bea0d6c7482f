"""Measures an engine in steady state: a fixed number of requests, all decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from eagle_server.engine.engine import Engine
from eagle_server.request import Request, SamplingParams

WARM_UPS = 3
STAGES = ("extend", "propose", "build_tree", "verify", "accept", "keep", "emit")  # of a cycle without prompts


@dataclass
class Pace:
    """Cycles of one batch size. `seconds` is wall time from result to result."""

    batch: int
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def step(self) -> float:
        """The median cycle's wall time."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / sum(self.seconds)

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens per request and cycle: the mean acceptance length."""
        return self.tokens / len(self.seconds) / self.batch

    def add(self, other: Pace) -> None:
        """Add the cycles of another run at the same batch size."""
        self.seconds += other.seconds
        self.tokens += other.tokens

    def document(self) -> dict[str, Any]:
        """For the report, times in milliseconds."""
        return {
            "batch": self.batch,
            "cycles": len(self.seconds),
            "cycle_ms": 1e3 * self.step,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_cycle": self.tokens_per_cycle,
        }


class Steady:
    """Runs `engine` until every prompt decodes. At the end it aborts the requests.

        with Steady(engine, prompts, cycles=20) as run:
            pace = run.cycles(20)

    `cycles` is the largest number of cycles that will be measured; it determines the length of the requests.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], cycles: int) -> None:
        self._engine, self._prompts = engine, prompts
        limits = engine.scheduler.limits
        # Cycles in which the first requests decode already, while the last ones still wait for their prompts.
        filling = sum(map(len, prompts)) // limits.chunked_prefill_size + len(prompts)
        self._longest = (filling + WARM_UPS + cycles) * (limits.steps + 1) + 1
        self.tokens: dict[str, list[int]] = {}

    def __enter__(self) -> Steady:
        for number, prompt in enumerate(self._prompts):
            room = self._engine.ready().max_request_tokens - len(prompt)
            if room < self._longest:
                raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room for {self._longest} more")
            greedy = SamplingParams(max_tokens=self._longest, seed=0, temperature=0.0, ignore_eos=True)
            request = Request(request_id=str(number), prompt_token_ids=list(prompt), sampling=greedy)
            self._engine.add(request)
        while len(self.tokens) < len(self._prompts):
            self._step()
        for _ in range(WARM_UPS):
            self._step()
        return self

    def cycles(self, count: int) -> Pace:
        """Measure `count` cycles."""
        pace = Pace(len(self._prompts))
        for _ in range(count):
            began = time.perf_counter()
            pace.tokens += self._step()
            pace.seconds.append(time.perf_counter() - began)
        return pace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for number in range(len(self._prompts)):
                self._engine.abort(str(number))
            while self._engine.has_work():
                self._engine.step()

    def _step(self) -> int:
        """One cycle; returns the number of tokens it gave."""
        count = 0
        for delta in self._engine.step():
            if delta.error is not None or delta.finish_reason is not None:
                raise RuntimeError(f"request {delta.request_id} ended: {delta.error or delta.finish_reason}")
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            count += len(delta.token_ids)
        return count
