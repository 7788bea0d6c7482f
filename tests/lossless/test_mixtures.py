"""A mixture calibrates the drafts of both of its sources."""

from __future__ import annotations

import pytest

from tests.lossless.conftest import Drafting
from tests.lossless.scenes import REQUESTS
from tests.support.engines import run


@pytest.mark.parametrize("drafting", ["MEDUSA+NGRAM", "REDRAFTER+NGRAM, shared", "EAGLE3+NGRAM"], indirect=True)
def test_both_sources_are_calibrated(drafting: Drafting) -> None:
    """The calibration has counts for drafts of the head alone and of the tries alone."""
    engine = drafting.engine()
    run(engine, REQUESTS)
    counted = engine.worker.drafter.calibration.expected.view(3, 7, 7).sum(0) > 0  # type: ignore[attr-defined]
    assert counted[2:, :2].any(), "the head alone"
    assert counted[:2, 2:].any(), "the tries alone"
