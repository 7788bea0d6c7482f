"""On a GPU few cycles record events, because these cost the host time, and the totals are of the measured cycles."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from eagle_server.engine.engine import Engine
from eagle_server.request import CycleStats
from eagle_server.worker import clock
from eagle_server.worker.budget.policy import POLICY
from tests.support.engines import random_head, random_target, request, speculative
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder

EVERY = POLICY.observed_every
STAGES = ("budget", "extend", "propose", "build_tree", "verify", "accept", "keep", "emit", "unused")


class FakeEvent:
    """Counts what torch.cuda.Event would record. Every stage takes a millisecond."""

    recorded: Counter[str] = Counter()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.recorded["events"] += 1

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


@pytest.fixture(params=["auto", "off"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose device is emulated, with streams."""
    monkeypatch.setattr(clock, "has_streams", lambda device: True)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
    shape: dict[str, Any] = {"backend": "flashinfer", "graph_sizes": (1, 2), "max_running_requests": 2}
    target = random_target()
    adaptive = request.param == "auto"
    return speculative(
        target, random_head(target, "EAGLE3"), 3, 4, **shape, stand_ins=stand_ins, adaptive=adaptive, estimating=True
    )


def stepped(engine: Engine) -> tuple[CycleStats, int]:
    """The next cycle, and how many events it recorded."""
    FakeEvent.recorded.clear()
    engine.step()
    cycle = engine.take_cycle()
    assert cycle is not None
    return cycle, FakeEvent.recorded["events"]


def test_one_cycle_of_several_records_events(engine: Engine) -> None:
    engine.add(request(0, range(1, 9), max_tokens=200, ignore_eos=True))
    prefill, events = stepped(engine)
    assert (prefill.stage_seconds, events) == ({}, 2), "the budget subtracts each cycle's prompts"
    cycles = [stepped(engine) for _ in range(2 * EVERY)]
    measured = [cycle.stage_seconds for cycle, _ in cycles if cycle.stage_seconds]
    assert len(measured) == 2
    for seconds in measured:
        assert seconds.keys() <= {*STAGES} and {"verify", "emit"} <= seconds.keys()
    # A measured cycle records its own stages; the first of them, run ahead, the cycle before.
    recorded = [count for _, count in cycles if count]
    assert sum(recorded) == sum(2 * round(1e3 * sum(seconds.values())) for seconds in measured)
    assert len(recorded) <= 2 * len(measured)
    stats = engine.stats()
    assert stats.measured_cycles == len(measured)
    for name in STAGES:
        total = sum(seconds.get(name, 0.0) for seconds in measured)
        assert stats.stage_seconds.get(name, 0.0) == pytest.approx(total)


def test_a_joining_prompt_leaves_no_half_measured_cycle(engine: Engine) -> None:
    """Totals over measured cycles hold all of their stages."""
    engine.add(request(0, range(1, 9), max_tokens=200, ignore_eos=True))
    seen = list[dict[str, float]]()
    for number in range(3 * EVERY):
        if number % 5 == 0:
            engine.add(request(number + 1, range(2, 9), max_tokens=4, ignore_eos=True))
        seen.append(stepped(engine)[0].stage_seconds)
    measured = [seconds for seconds in seen if seconds]
    assert len(measured) >= 2
    assert all({"verify", "accept", "emit"} <= seconds.keys() for seconds in measured)


def test_a_profile_may_name_every_cycle(engine: Engine) -> None:
    engine.worker.drafting.budget.lessons.measured_every = 1
    engine.add(request(0, range(1, 9), max_tokens=60, ignore_eos=True))
    assert all(stepped(engine)[0].stage_seconds for _ in range(4))
