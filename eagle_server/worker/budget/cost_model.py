"""How long the stages of a cycle take, as a function of their size: measured at start-up, and refined while serving.

A curve is linear between knots. An observation moves them by a part of its relative error, less far from its size, and
within a factor of what was measured at start-up. All curves share one factor, the machine's speed, because other
processes slow down everything at once. It returns to 1 while the curves take over what lasts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_server.worker.budget.outcome import Outcome
from eagle_server.worker.budget.policy import POLICY, BudgetPolicy
from eagle_server.worker.clock import PREFILL, READ, UNUSED

Floats = NDArray[np.float64]

_SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]
_KNOTS = np.array(_SIZES, float)
_NEAR = 0.5 ** np.abs(np.log2(_KNOTS[:, None] / _KNOTS))  # half as much at twice or half the size
_KV = 1024.0  # attention's cost is counted per this many KV tokens
_LEAK = 0.98  # the speed's distance to 1 is multiplied by this at each observation
_PROPOSING = 0.3  # draft steps: the fixed cost of proposing a tree, added to that of its steps
_OF_DRAFTING = ("extend", "build_tree", "keep")  # stages that take time in cycles with drafts only
LONGEST_WAIT = 0.01  # seconds between cycles of a loaded engine
_SHORTEST = 1e-6  # seconds


def draft_steps(forwards: Floats | float) -> Floats:
    """The time of `propose` with this many forwards, counted in draft steps. 0: it is measured with draft-extend."""
    return np.where(np.asarray(forwards) > 0, forwards + _PROPOSING, 0.0)


def extended_rows(drafting: Floats | float, steps: Floats | float) -> Floats:
    """The expected rows of draft-extend. Each request has as many as the one with most accepted tokens needs."""
    return drafting * (1 + np.minimum(steps, 1.5 + 0.5 * np.log2(np.maximum(drafting, 1.0))))


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one cycle by what they depend on, see `CostModel`, without its prompts. step: None: none was made."""

    verify: float
    other: float  # of the host, in all cycles
    extend: float = 0.0
    step: float | None = None

    @classmethod
    def of(cls, stages: Mapping[str, float], forwards: int) -> StageTimes:
        """From the seconds of a cycle's stages. `forwards`: of the drafter's propose."""
        propose, verify = stages.get("propose", 0.0), stages.get("verify", 0.0)
        extend = sum(stages.get(stage, 0.0) for stage in _OF_DRAFTING) if "propose" in stages else 0.0
        apart = sum(stages.get(stage, 0.0) for stage in (PREFILL, READ, UNUSED))
        other = sum(stages.values()) - verify - extend - propose - apart
        if forwards:
            return cls(verify, other, extend, propose / float(draft_steps(forwards)))
        return cls(verify, other, extend + propose)


def _above(rows: float) -> int:
    """The knot at the right end of the segment that `rows` is in; beyond the last knot the last one."""
    return min(max(bisect_left(_SIZES, rows), 1), len(_SIZES) - 1)


class CostCurve:
    """Seconds of a stage against its number of rows and the KV tokens that it reads."""

    def __init__(self, policy: BudgetPolicy = POLICY) -> None:
        self.policy = policy
        self.seconds: Floats = np.zeros(len(_KNOTS))
        self.per_kv = 0.0  # seconds per _KV tokens
        self.is_known = False
        self._fit = self.seconds, self.per_kv

    def fit(self, points: Mapping[int, float], per_kv: float = 0.0) -> None:
        """Begin with measured seconds by number of rows, and seconds per KV token.

        Beyond the last point the curve goes on as before it.
        """
        if not points:
            return
        rows = np.array(sorted(points), float)
        seconds = np.maximum(np.maximum.accumulate([points[int(each)] for each in rows]), _SHORTEST)
        self.seconds = np.interp(_KNOTS, rows, seconds)
        if len(rows) > 1:
            slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
            beyond = rows[-1] < _KNOTS
            self.seconds[beyond] = seconds[-1] + slope * (_KNOTS[beyond] - rows[-1])
        self.per_kv, self.is_known = per_kv * _KV, True
        self._fit = self.seconds.copy(), self.per_kv

    def predict(self, rows: Floats | float, kv: Floats | float = 0.0) -> Floats:
        """Seconds at speed 1 for numbers of rows and KV tokens of any shape."""
        slope = (self.seconds[-1] - self.seconds[-2]) / (_KNOTS[-1] - _KNOTS[-2])
        more = slope * np.maximum(np.asarray(rows) - _KNOTS[-1], 0.0)
        return np.asarray(np.interp(rows, _KNOTS, self.seconds) + more + self.per_kv * kv / _KV)

    def at(self, rows: float, kv: float = 0.0) -> float:
        """`predict` for one number of rows, at least 1; much faster."""
        right = _above(rows)
        low, high = float(self.seconds[right - 1]), float(self.seconds[right])
        share = (rows - _SIZES[right - 1]) / (_SIZES[right] - _SIZES[right - 1])
        return low + share * (high - low) + self.per_kv * kv / _KV

    def move(self, rows: float, kv: float, error: float) -> None:
        """Correct the curve by a part of the relative error of its prediction: observed / predicted - 1."""
        right = _above(rows)
        nearest = right if rows > (_SIZES[right - 1] + _SIZES[right]) / 2 else right - 1
        of_rows, of_kv = self.at(rows), self.per_kv * kv / _KV
        step, farthest = self.policy.rate * error / (of_rows + of_kv), self.policy.farthest
        first, per_kv = self._fit
        moved = self.seconds * (1 + step * of_rows * _NEAR[nearest])
        moved = np.minimum(np.maximum(moved, first / farthest), first * farthest)
        self.per_kv = min(max(self.per_kv * (1 + step * of_kv), per_kv / farthest), per_kv * farthest)
        # more rows never take less time
        moved[right:] = np.maximum.accumulate(moved[right:])
        moved[: right + 1] = np.minimum.accumulate(moved[right::-1])[::-1]
        self.seconds = moved

    def describe(self, largest: float) -> dict[str, Any]:
        """Rows and milliseconds up to `largest` rows, for people."""
        shown = largest >= _KNOTS
        return {
            "rows": [int(each) for each in _KNOTS[shown]],
            "ms": [round(1e3 * float(each), 3) for each in self.seconds[shown]],
            "ms_per_1024_kv_tokens": round(1e3 * float(self.per_kv), 3),
        }


@dataclass
class CostModel:
    """The stages of a cycle.

    verify: the target's forward, by rows verified. joins: what prompts add to it, by their rows. extend: all that a
    cycle with drafts does once more, by rows of draft-extend. step: one more draft step, by the rows that it feeds:
    nodes, or a block drafter's whole blocks.
    """

    policy: BudgetPolicy = POLICY
    verify: CostCurve = field(init=False)
    joins: CostCurve = field(init=False)
    extend: CostCurve = field(init=False)
    step: CostCurve = field(init=False)
    kv_per_node: float = 0.0  # with each further node of a request, its KV costs this much more than with the root
    speed: float = 1.0  # seconds now to seconds of the curves
    between: float = 0.0  # seconds of all else in a cycle without drafts
    reading: float = 0.0  # seconds per row that the drafter reads before a request drafts; 0: not known
    error: float = 0.0  # mean relative error of the newest predictions of whole cycles

    def __post_init__(self) -> None:
        self.verify, self.joins, self.extend, self.step = (CostCurve(self.policy) for _ in range(4))

    def kv_cost(self, kv: float, nodes: Floats | float) -> Floats:
        """KV tokens that cost as much to the roots alone as `kv` tokens do to `nodes` per request, of any shape."""
        return kv * (1 + self.kv_per_node * (np.asarray(nodes) - 1))

    def cycle(
        self,
        rows: Floats | float,
        drafting: Floats | float,
        steps: Floats | float,
        forwards: Floats | float,
        fed: Floats | float,
        kv: Floats | float = 0.0,
    ) -> Floats:
        """Seconds of cycles that verify `rows` over `kv` tokens, see `kv_cost`. Arrays of any shapes that go together.

        `drafting` requests draft trees of `steps` levels, in `forwards` draft steps that feed `fed` rows of each.
        """
        drafts = self.extend.predict(extended_rows(drafting, steps))
        drafts = drafts + draft_steps(forwards) * self.step.predict(fed * drafting)
        return self.speed * (self.verify.predict(rows, kv) + drafts) + self.between

    def learn(self, outcome: Outcome) -> float:
        """Update all curves by the stages' seconds. Returns what was predicted for decoding, in seconds."""
        times = StageTimes.of(outcome.stages, outcome.forwards)
        if outcome.read:
            row = outcome.stages.get(READ, 0.0) / outcome.read
            self.reading += (2 * self.policy.rate if self.reading else 1.0) * (row - self.reading)
        kv = float(sum(decode.seq_len for decode in outcome.decodes))
        kv = float(self.kv_cost(kv, outcome.rows / len(outcome.decodes)))
        if outcome.joined:
            added = max(times.verify - self.speed * self.verify.at(max(outcome.rows, 1.0), kv), _SHORTEST)
            if not self.joins.is_known:
                self.joins.fit({1: added / self.speed / outcome.joined, outcome.joined: added / self.speed})
            self.observe(self.joins, outcome.joined, 0.0, added)
            return 0.0
        predicted, seconds = self.observe(self.verify, outcome.rows, kv, times.verify), times.verify
        is_usual, waited = outcome.waited < LONGEST_WAIT and not outcome.has_prompts, times.other + outcome.waited
        if not outcome.drafting and is_usual:
            self.wait(waited)
        if outcome.drafting and times.step is not None:
            steps = float(draft_steps(outcome.forwards))
            predicted += steps * self.observe(self.step, outcome.fed, 0.0, times.step)
            seconds += steps * times.step
        if outcome.drafting and is_usual and not outcome.is_lesson:  # lessons take time themselves
            extend = times.extend + max(0.0, waited - self.between)
            predicted += self.observe(self.extend, outcome.extended, 0.0, extend)
            seconds += extend
        self.compare(predicted, seconds)
        return predicted

    def joining(self, outcome: Outcome) -> float:
        """About the seconds that the rows of prompts took of the verify forward."""
        return self.speed * self.joins.at(outcome.joined) if outcome.joined and self.joins.is_known else 0.0

    def observe(self, curve: CostCurve, rows: float, kv: float, seconds: float) -> float:
        """A stage took `seconds`. Returns the seconds that were predicted."""
        if not curve.is_known:
            curve.fit({int(max(rows, 1)): seconds / self.speed})
            return seconds
        predicted = self.speed * curve.at(max(rows, 1.0), kv)
        policy = self.policy
        error = min(max(seconds / predicted, 1 / policy.outlier), policy.outlier) - 1
        if curve is self.verify:  # the longest stage, and in every cycle
            speed = 1 + (self.speed * (1 + 2 * policy.rate * error) - 1) * _LEAK
            self.speed = min(max(speed, 1 / policy.farthest), policy.farthest)
        curve.move(max(rows, 1.0), kv, error)
        return predicted

    def compare(self, predicted: float, seconds: float) -> None:
        """A whole cycle was predicted to take `predicted`, and took `seconds`."""
        if seconds > 0:
            self.error += self.policy.rate * (min(1.0, abs(predicted / seconds - 1)) - self.error)

    def wait(self, seconds: float) -> None:
        """All but the target's forward took `seconds` in a cycle without drafts."""
        most = self.policy.outlier * self.between if self.between else seconds
        self.between += 2 * self.policy.rate * (min(seconds, most) - self.between)

    def describe(self, largest: int) -> dict[str, Any]:
        """The curves for /v1/server_info."""
        return {
            "verify": self.verify.describe(largest),
            "joins": self.joins.describe(largest),
            "draft_extend": self.extend.describe(largest),
            "draft_step": self.step.describe(largest),
            "speed": round(self.speed, 3),
            "relative_error": round(self.error, 3),
        }
