"""Measured speeds of plain decoding and of drafting as shares of those foretold, because a model may be wrong."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_server.worker.budget.policy import BudgetPolicy


@dataclass
class MeasuredSpeed:
    """The measured speed over the foretold one. Older cycles weigh less in foretold, seconds and requests.

    The answers' lengths change from cycle to cycle, and the foretold speed with them. The share is of all alike.
    """

    policy: BudgetPolicy
    until: int  # the cycle in which it is measured anew
    foretold: float = 0.0  # seconds
    seconds: float = 0.0
    requests: float = 0.0  # of each cycle, added up
    cycles: int = 0
    seen: int = 0  # requests, none of them forgotten

    def add(self, requests: int, foretold: float, seconds: float) -> None:
        """One more cycle, whose tokens should have taken `foretold` seconds."""
        if self.requests:
            seconds = min(seconds, self.policy.outlier * requests * self.seconds / self.requests)
        kept = 1 - 1 / self.policy.window
        self.foretold, self.seconds = kept * self.foretold + foretold, kept * self.seconds + seconds
        self.requests, self.cycles = kept * self.requests + requests, self.cycles + 1
        self.seen += requests

    @property
    def is_plain_known(self) -> bool:
        """Whether it suffices as the speed of plain decoding."""
        return self.cycles >= self.policy.plain_cycles

    @property
    def is_enough(self) -> bool:
        """Whether drafting was measured so long that plain decoding should be."""
        return self.cycles >= self.policy.drafted_cycles

    @property
    def share(self) -> float:
        """Of the foretold speed; nearer to 1 while few were seen, because how many tokens come varies."""
        known = min(1.0, self.seen / self.policy.convincing)
        return 1 + known * (self.foretold / self.seconds - 1) if known else 1.0
