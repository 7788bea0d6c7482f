"""What the soak says of memory."""

from __future__ import annotations

import pytest

from eagle_tools.bench.soak import growth

SECONDS = [float(at) for at in range(1801)]


def test_memory_that_is_given_back_does_not_grow() -> None:
    assert growth(SECONDS, [10**9 + 10**9 * (at % 220 > 150) + 10**6 * (at > 1790) for at in range(1801)]) == 0


def test_a_leak_below_peaks_is_seen() -> None:
    sizes = [10**9 + 10**6 * at + 10**9 * (at % 220 > 150) for at in range(1801)]
    assert growth(SECONDS, sizes) == pytest.approx(60e6, rel=0.05)


def test_one_sample_is_no_line() -> None:
    assert growth([0.0], [10**9]) == 0
