"""Measured speeds of plain decoding and of drafting as shares of those foretold, because a model may be wrong."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_server.worker.budget.policy import BudgetPolicy


@dataclass
class MeasuredSpeed:
    """The measured speed over the foretold one. Older cycles weigh less in foretold, seconds and weight.

    The answers' lengths change from cycle to cycle, and the foretold speed with them. The share is of all alike.
    """

    policy: BudgetPolicy
    until: int  # the cycle in which it is measured anew
    losses: int = 0  # comparisons that it lost
    foretold: float = 0.0  # seconds
    seconds: float = 0.0
    weight: float = 0.0
    cycles: int = 0

    def restart(self) -> None:
        """Measure anew."""
        self.foretold = self.seconds = self.weight = 0.0
        self.cycles = 0

    def add(self, foretold: float, seconds: float) -> None:
        """One more cycle, whose tokens should have taken `foretold` seconds."""
        if self.weight:
            seconds = min(seconds, self.policy.outlier * self.seconds / self.weight)
        kept = 1 - 1 / self.policy.window
        self.foretold, self.seconds = kept * self.foretold + foretold, kept * self.seconds + seconds
        self.weight, self.cycles = kept * self.weight + 1, self.cycles + 1

    @property
    def is_plain_known(self) -> bool:
        """Whether it suffices as the speed of plain decoding."""
        return self.cycles >= self.policy.plain_cycles

    @property
    def is_enough(self) -> bool:
        """Whether it suffices to compare drafting."""
        return self.cycles >= self.policy.drafted_cycles

    def loses(self, plain: MeasuredSpeed, gain: float) -> bool:
        """Whether drafting, measured by this one and foretold to be `gain` times as fast, was slower beyond doubt."""
        if not plain.is_plain_known or not self.is_enough:
            return False
        return gain * self.foretold * plain.seconds < self.policy.least_measured * plain.foretold * self.seconds
