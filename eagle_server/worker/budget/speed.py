"""Measured speeds of plain decoding and of drafting, because a model of costs may be wrong."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_server.worker.budget.policy import BudgetPolicy


@dataclass
class MeasuredSpeed:
    """A measured speed. Older cycles weigh less in tokens, seconds and weight."""

    policy: BudgetPolicy
    until: int  # the cycle in which it is measured anew
    losses: int = 0  # comparisons that it lost
    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    cycles: int = 0

    def restart(self) -> None:
        """Measure anew."""
        self.tokens = self.seconds = self.weight = 0.0
        self.cycles = 0

    def add(self, tokens: int, seconds: float) -> None:
        """One more cycle."""
        if self.weight:
            seconds = min(seconds, self.policy.outlier * self.seconds / self.weight)
        kept = 1 - 1 / self.policy.window
        self.tokens, self.seconds = kept * self.tokens + tokens, kept * self.seconds + seconds
        self.weight, self.cycles = kept * self.weight + 1, self.cycles + 1

    @property
    def is_plain_known(self) -> bool:
        """Whether it suffices as the speed of plain decoding."""
        return self.cycles >= self.policy.plain_cycles

    @property
    def is_enough(self) -> bool:
        """Whether it suffices to compare drafting."""
        return self.cycles >= self.policy.drafted_cycles

    def loses(self, plain: MeasuredSpeed) -> bool:
        """Whether drafting, measured by this one, was slower beyond doubt."""
        if not plain.is_plain_known or not self.is_enough:
            return False
        return self.tokens * plain.seconds < self.policy.least_measured * plain.tokens * self.seconds
