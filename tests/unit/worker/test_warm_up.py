"""Warm-up runs no batch that the engine is too small for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines import random_head, random_target, request, run, speculative, tokens_of
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("requests", [1, 2])
def test_engines_for_one_and_two_requests_start_and_decode(requests: int, graphs: bool, adaptive: bool) -> None:
    target = random_target()
    settings: dict[str, Any] = {
        "max_running_requests": requests,
        "graph_sizes": tuple(range(1, requests + 1)) if graphs else (),
        "adaptive": adaptive,
        "poison": False,
    }
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder() if graphs else None}
    head = random_head(target, "EAGLE3")
    engine = speculative(target, head, 2, 2, backend="flashinfer", stand_ins=stand_ins, **settings)
    asked = [request(i, range(1, 9 + i), max_tokens=6, ignore_eos=True) for i in range(2)]
    expected = tokens_of(run(speculative(target, head, 2, 2), asked))
    assert tokens_of(run(engine, asked)) == expected
