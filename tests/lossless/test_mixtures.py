"""Mixtures weigh the opinions of both of their sources."""

from __future__ import annotations

import pytest

from tests.lossless.conftest import Drafting
from tests.lossless.scenes import REQUESTS
from tests.support.engines import run


@pytest.mark.parametrize("drafting", ["MEDUSA+NGRAM", "REDRAFTER+NGRAM, shared", "EAGLE3+NGRAM"], indirect=True)
def test_both_sources_are_judged(drafting: Drafting) -> None:
    """The calibration has bins where the head alone, the tries alone and both guessed."""
    engine = drafting.engine()
    run(engine, REQUESTS)
    said = engine.worker.drafter.calibration.expected.view(3, 7, 7).sum(0) > 0  # type: ignore[attr-defined]
    assert said[2:, :2].any(), "the head alone"
    assert said[:2, 2:].any(), "the tries alone"
