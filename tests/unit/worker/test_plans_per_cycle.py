"""FlashInfer's plans in a cycle: the host plans no captured forward, and no plan waits for the device.

A plan overwrites pinned memory that the last plan copies from, so it first waits for that copy. On the device the copy
stands behind everything that was launched before it. Here a launch has only ended if the host has read results that
were copied after it. What is planned after a cycle's results are copied is for the next cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from eagle_server.attention.flashinfer import mla as flashinfer_mla
from eagle_server.attention.flashinfer import wrappers as flashinfer_wrappers
from eagle_server.speculation.static_tree import PRESETS, truncated
from eagle_server.worker.cycle import Cycle
from tests.support.covering import covering
from tests.support.engines import random_head, random_target, request, run, speculative, tree_size
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCall, FirstCallRecorder

CHOICES = truncated(PRESETS["mc_sim_7b_63"], 3)
DRAFTING: dict[str, dict[str, Any]] = {
    "tree": {},
    "chain": {"topk": 1},
    "tree, cascade": {"verify_attention": "cascade", "draft_attention": "cascade"},
    "tree, a query per node": {"draft_attention": "per_node"},
    "tree and n-grams": {"ngram_steps": 4},
    "static tree": {"topk": 10, "choices": CHOICES, "nodes": len(CHOICES) + 1},
}


class Device:
    """Counts launches, and those that have ended for certain."""

    def __init__(self) -> None:
        self.launched = self.ended = self.waits = 0
        self.plans: Counter[int] = Counter()  # of the running cycle, by wrapper
        self.replanned = 0  # further plans of a wrapper in a cycle
        self._static: set[Any] = set()  # wrappers that graphs may hold
        self.replanned_static = 0

    def becomes_idle(self) -> None:
        self.ended, self.waits, self.replanned = self.launched, 0, 0
        self.plans.clear()

    def launch(self, _: Any) -> None:
        self.launched += 1

    def plan(self, wrapper: Any) -> None:
        self.plans[id(wrapper)] += 1
        self.replanned += self.plans[id(wrapper)] > 1

    def plan_static(self, wrapper: Any) -> None:
        """A prompt may be planned first with the rows of a captured forward."""
        self.replanned_static += wrapper in self._static
        self._static.add(wrapper)

    def copy(self, results: Any) -> None:
        results.__dict__["behind"] = self.launched
        self.plans.clear()

    def read(self, results: Any) -> None:
        self.ended = results.__dict__["behind"]


class PlanCopy:
    """A `Fence`. A plan on an idle device is copied at once."""

    def __init__(self, device: Device) -> None:
        self._device, self._behind = device, 0

    def passed(self) -> bool:
        return self._behind <= self._device.ended

    def wait(self) -> None:
        self._device.waits += not self.passed()

    def set(self) -> None:
        self._behind = self._device.launched


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, happens: Callable[[Any], None]) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        happens(self)
        return original(self, *arguments, **named)

    patch.setattr(owner, name, method)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    for module in (flashinfer_wrappers, flashinfer_mla):
        monkeypatch.setattr(module, "Fence", lambda _: PlanCopy(device))
    for owner in (flashinfer_wrappers.PagedWrapper, flashinfer_mla.MLAWrapper):
        before(monkeypatch, owner, "plan", device.plan)
        before(monkeypatch, owner, "run", device.launch)
    before(monkeypatch, flashinfer_wrappers.StaticWrapper, "plan", device.plan_static)
    before(monkeypatch, FirstCall, "replay", device.launch)
    before(monkeypatch, Cycle, "start_copy", device.copy)
    before(monkeypatch, Cycle, "outputs", device.read)
    return device


@pytest.mark.parametrize(("drafting", "graph_sizes"), covering(DRAFTING, [((1, 2, 4),), ((),)], together=1), ids=str)
def test_a_cycle_plans_each_wrapper_once_and_waits_for_no_copy(
    device: Device, drafting: str, graph_sizes: tuple[int, ...]
) -> None:
    target = random_target()
    shape = {"topk": 4, "model_steps": 4, **DRAFTING[drafting]}
    if shape["topk"] == 1:
        shape["nodes"] = tree_size(4, 1)
    settings = {"backend": "flashinfer", "graph_sizes": graph_sizes, "max_running_requests": 4, "poison": False}
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
    head = random_head(target, "EAGLE3")
    engine = speculative(target, head, stand_ins=stand_ins, chunked_prefill_size=16, **settings, **shape)
    device.becomes_idle()  # graphs were captured
    asked = [request(i, range(1, 9 + 12 * i), ignore_eos=True) for i in range(4)]
    run(engine, asked[:1])
    # While requests come and go, a draft-extend that ran ahead may be redone. So none runs ahead here.
    engine.worker.drafting.extends_ahead = False
    run(engine, asked[1:2], joining={2: asked[2:]})
    assert device.ended > 20
    assert not device.waits, "the host waits for the device"
    assert not device.replanned_static, "the host plans what the device plans"
    if graph_sizes:  # without graphs a wrapper is borrowed again once its plan has been copied
        assert not device.replanned
