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
    patience: int  # times the measured cycles: how long until then, once drafting has lost
    is_lost: bool = False  # drafting was measured to be slower than plain decoding
    foretold: float = 0.0  # seconds
    seconds: float = 0.0
    requests: float = 0.0  # of each cycle, added up
    cycles: int = 0
    tokens: int = 0  # that came, none of them forgotten

    @classmethod
    def after(cls, last: MeasuredSpeed | None, policy: BudgetPolicy, cycle: int) -> MeasuredSpeed:
        """Begin anew in this cycle. If drafting has lost again and again, it is tried less and less often."""
        patience = policy.patience if last is None or not last.is_lost else 2 * last.patience
        return cls(policy, cycle + policy.period, patience)

    def lose(self, cycle: int) -> None:
        """Drafting is slower than plain decoding in this cycle. All requests may have been at hard places of texts."""
        if not self.is_lost:
            self.is_lost, self.until = True, cycle + min(self.patience * self.cycles, self.policy.period)

    def add(self, requests: int, tokens: int, foretold: float, seconds: float) -> None:
        """One more cycle, whose tokens should have come at the speed `foretold`."""
        if self.requests:
            seconds = min(seconds, self.policy.outlier * requests * self.seconds / self.requests)
        kept = 1 - 1 / self.policy.window
        self.foretold, self.seconds = kept * self.foretold + tokens / foretold, kept * self.seconds + seconds
        self.requests, self.cycles = kept * self.requests + requests, self.cycles + 1
        self.tokens += tokens

    @property
    def is_plain_known(self) -> bool:
        """Whether it suffices as the speed of plain decoding."""
        return self.cycles >= self.policy.plain_cycles

    @property
    def is_enough(self) -> bool:
        """Whether drafting was measured so long that plain decoding should be."""
        return self.cycles >= self.policy.drafted_cycles

    def share(self, left: int) -> float:
        """Of the foretold speed; nearer to 1 while little was seen. left: tokens that the answers may still get.

        Drafts are good at some places of an answer and bad at others, and all requests may be at the same ones. On
        average half of an answer is left, so twice as many tokens have seen all places.
        """
        seen = self.tokens / max(self.policy.convincing, 2 * left), self.cycles / self.policy.window
        known = min(1.0, max(seen))
        return 1 + known * (self.foretold / self.seconds - 1) if known else 1.0
