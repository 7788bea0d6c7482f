"""All numbers that tune the budget, each with the experiment that chose it: a heading of docs/experiments.md.

[parts] 2026-11-25: a budget of fewer parts that chooses the width of draft steps
[whole] 2026-11-22: a budget that learns from whole trees and trusts what it measured
[out] 2026-11-27: long contexts, and each mechanism of the budget taken out
[joins] 2026-11-27: prompts in the forward that verifies, and costs observed more often
[sooner] 2026-11-27: attention by four sums, and a budget that forgets sooner
[shares] 2026-11-28: measured speeds as shares of those foretold
[phases] 2026-11-28: drafting that lost is tried again
[every] 2026-11-28: every cycle corrects guesses
[never]: the value was never measured, though the mechanism may have been.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BudgetPolicy:
    """A cycle is one forward of the target. A lesson is a cycle that drafts whole trees, from which estimates learn."""

    # Lessons.
    first_lessons: int = 10  # [parts] cycles at first that are all lessons, in each temperature bin
    lesson_period: int = 32  # [parts] cycles from one lesson to the next later
    probe_share: float = 0.004  # [never] of the time: for lessons where nothing is expected of drafting
    probe_chance: float = 0.5  # [never] least chance that a node of theirs must have to be verified

    # Chances of acceptance.
    forgetting: float = 250.0  # [sooner] cycles after which a tree counts 1 / e of a new one in what the next may give
    first_chance: float = 0.7  # [out] that a chain's next node is accepted, before the first lesson
    prior: float = 4.0  # [out] weight of the ratio over all depths in each bin, in expected acceptances
    memory: float = 400.0  # [out] expected acceptances in a bin after which the older ones count half; 40 may be better

    # Costs.
    observed_every: int = 4  # [joins] cycles from one whose stages are observed to the next
    rate: float = 0.05  # [never] weight of the newest observation in a curve; twice that in the machine's speed
    outlier: float = 2.0  # [never] times what was expected: a cycle counts as no more; another process had the core
    slowness_rate: float = 0.02  # [every] weight of the newest cycle in how much longer than expected its kind takes
    farthest: float = 5.0  # [never] a curve stays within this factor of what was measured at start-up

    # Comparing the measured speeds of plain decoding and of drafting.
    least_measured: float = 0.98  # [out] of plain decoding's speed: with less, drafting has lost
    plain_cycles: int = 8  # [whole] in a row, that measure plain decoding
    drafted_cycles: int = 48  # [never] with drafts, after which plain decoding is measured whatever is foretold
    convincing: float = 64.0  # [shares] tokens at least, after which a measured speed counts whole
    patience: int = (
        4  # [phases] times the cycles that were measured: until drafting that lost is tried again; doubled each time
    )
    period: int = 1000  # [out] cycles after which all is measured anew
    window: int = 100  # [out] cycles that a measured speed is the exponential moving average of


POLICY = BudgetPolicy()
WITH_EVENTS = replace(POLICY, observed_every=16)  # [never] where the host records events for it: about a millisecond
