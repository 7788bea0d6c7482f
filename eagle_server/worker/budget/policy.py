"""All numbers that tune the budget. docs/experiments.md has what was measured of them, and what was not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BudgetPolicy:
    """A cycle is one forward of the target. A lesson is a cycle that drafts whole trees, from which estimates learn."""

    # Lessons.
    first_lessons: int = 10  # cycles at first that are all lessons, in each temperature bin
    lesson_period: int = 32  # cycles from one lesson to the next later, and twice as often costs are observed
    probe_share: float = 0.004  # of the time: for lessons where nothing is expected of drafting
    probe_chance: float = 0.5  # least chance that a node of theirs must have to be verified

    # Chances of acceptance.
    forgetting: float = 1000.0  # cycles after which a tree counts 1 / e of a new one in what is expected of the next
    first_chance: float = 0.7  # that a chain's next node is accepted, before the first lesson
    prior: float = 4.0  # weight of the ratio over all depths in each bin, in expected acceptances
    memory: float = 400.0  # expected acceptances in a bin after which the older ones count half

    # Costs.
    rate: float = 0.05  # weight of the newest observation in a curve; twice that in the machine's speed
    outlier: float = 2.0  # times what was expected: a cycle counts as no more, because another process had the core
    farthest: float = 5.0  # a curve stays within this factor of what was measured at start-up

    # Comparing the measured speeds of plain decoding and of drafting.
    least_measured: float = 0.98  # of plain decoding's speed: with less, drafting has lost
    plain_cycles: int = 8  # in a row, that measure plain decoding
    drafted_cycles: int = 48  # with drafts that suffice to compare
    losses: int = 2  # comparisons in a row, each measured anew, after which drafting stays off
    period: int = 1000  # cycles that this counts for
    window: int = 100  # cycles that a measured speed is the exponential moving average of


POLICY = BudgetPolicy()
