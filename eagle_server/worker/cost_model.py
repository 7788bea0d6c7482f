"""How long the stages of a cycle take, as a function of their size: measured at start-up, and refined while serving.

A curve is linear between knots. An observation moves the two knots around its size (normalized least mean squares). All
curves share one factor, the machine's speed, because other processes slow down everything at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_KNOTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096], float)
_KV = 1024.0  # attention's cost is counted per this many KV tokens
_SHAPE_RATE, _SPEED_RATE = 0.05, 0.1  # how far one observation moves a curve, and the speed
_LONGEST_WAIT = 0.01  # seconds
_OUTLIER = 2.0  # an observation counts as at most this many times the prediction, or that fraction of it


class CostCurve:
    """Seconds of a stage against its number of rows and the KV tokens that it reads."""

    def __init__(self) -> None:
        self.seconds: Floats = np.zeros(len(_KNOTS))
        self.per_kv = 0.0  # seconds per _KV tokens
        self.observations = 0

    def fit(self, points: Mapping[int, float], per_kv: float = 0.0) -> None:
        """Begin with measured seconds by number of rows, and seconds per KV token.

        Beyond the last point the curve goes on as before it.
        """
        if not points:
            return
        self.per_kv = per_kv * _KV
        rows = np.array(sorted(points), float)
        seconds = np.maximum.accumulate([points[int(each)] for each in rows])
        self.seconds = np.interp(_KNOTS, rows, seconds)
        if len(rows) > 1:
            slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
            beyond = rows[-1] < _KNOTS
            self.seconds[beyond] = seconds[-1] + slope * (_KNOTS[beyond] - rows[-1])
        self.observations = max(self.observations, 1)

    def predict(self, rows: Floats | float, kv: float = 0.0) -> Floats:
        """Seconds at speed 1 for numbers of rows of any shape."""
        return np.asarray(np.interp(rows, _KNOTS, self.seconds) + self.per_kv * kv / _KV)

    def move(self, rows: float, kv: float, error: float) -> None:
        """Correct the curve by a part of the error of its prediction."""
        right = min(max(int(np.searchsorted(_KNOTS, rows)), 1), len(_KNOTS) - 1)
        share = min(max((rows - _KNOTS[right - 1]) / (_KNOTS[right] - _KNOTS[right - 1]), 0.0), 1.0)
        inputs = np.array([1 - share, share, kv / _KV])
        step = _SHAPE_RATE * error * inputs / (inputs @ inputs)
        self.seconds[right - 1 : right + 1] += step[:2]
        self.per_kv = max(0.0, self.per_kv + step[2])
        # more rows never take less time
        self.seconds[right:] = np.maximum(self.seconds[right:], self.seconds[right])
        self.seconds[:right] = np.minimum(self.seconds[:right], self.seconds[right])

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

    verify: all but drafting, by rows verified. extend: by rows of draft-extend. step: one more draft step, by the
    requests that draft.
    """

    verify: CostCurve = field(default_factory=CostCurve)
    extend: CostCurve = field(default_factory=CostCurve)
    step: CostCurve = field(default_factory=CostCurve)
    speed: float = 1.0  # seconds now to seconds of the curves
    between: float = 0.0  # seconds from one cycle to the next
    error: float = 0.0  # mean relative error of the newest predictions of whole cycles

    def observe(self, curve: CostCurve, rows: float, kv: float, seconds: float) -> float:
        """A stage took `seconds`. Returns the seconds that were predicted."""
        if not curve.observations:
            curve.fit({int(max(rows, 1)): seconds / self.speed})
            return seconds
        curve.observations += 1
        predicted = self.speed * float(curve.predict(rows, kv))
        seconds = min(max(seconds, predicted / _OUTLIER), predicted * _OUTLIER)
        self.speed *= (seconds / predicted) ** _SPEED_RATE if predicted > 0 else 1.0
        curve.move(rows, kv, seconds / self.speed - float(curve.predict(rows, kv)))
        return predicted

    def compare(self, predicted: float, seconds: float) -> None:
        """A whole cycle was predicted to take `predicted`, and took `seconds`."""
        if seconds > 0:
            self.error += _SHAPE_RATE * (min(1.0, abs(predicted / seconds - 1)) - self.error)

    def wait(self, seconds: float) -> None:
        """The time from the end of a cycle to the start of the next one was `seconds`. Long ones are no load."""
        if 0 < seconds < _LONGEST_WAIT:
            self.between += _SHAPE_RATE * (seconds - self.between)

    def describe(self, largest: int) -> dict[str, Any]:
        """The curves for /v1/server_info."""
        return {
            "verify": self.verify.describe(largest),
            "draft_extend": self.extend.describe(largest),
            "draft_step": self.step.describe(largest),
            "speed": round(self.speed, 3),
            "relative_error": round(self.error, 3),
        }
