"""The lookahead slots that a drafter asks for hold all KV that it writes, also where it runs ahead, and it asks for no
more.

Positions without an allocated slot are slot 0 in the page table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from eagle_server.engine.assembly import assemble, drafters
from eagle_server.engine.engine import Engine
from eagle_server.scheduling import scheduler
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.scenes import REQUESTS, as_on_a_gpu
from tests.support.engines import pools, run

WITH_KV = [name for name in CASES if name.startswith(("EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "PEAGLE"))]
SIZES = (1, 2, 3, 4)  # no padding, whose KV is written to slot 0
TIGHT = {  # drafters that write more slots than verification does, if trees have so many nodes
    "EAGLE3 chain": 5,
    "EAGLE3 drafting more than it verifies": 12,
    "STANDALONE": 5,
    "DFLASH chain": 3,
    "PEAGLE chain": 5,
}


def missed_writes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many rows of draft KV are written without a slot, while four requests are decoded."""
    drafter, pool, missed = engine.worker.drafter, pools(engine)[1], list[int]()
    assert pool is not None
    drafting = False

    def write(index: int, slots: Tensor, *kv: Tensor) -> None:
        if drafting:
            missed.append(int((slots == 0).sum()))
        written(index, slots, *kv)

    def watched(call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            nonlocal drafting
            drafting = True
            result = call(*args)
            drafting = False
            return result

        return wrapped

    written = pool.write
    monkeypatch.setattr(pool, "write", write)
    for name in ("extend", "propose"):
        monkeypatch.setattr(drafter, name, watched(getattr(drafter, name)))
    run(engine, REQUESTS[:2], joining={3: REQUESTS[4:5], 5: REQUESTS[6:7]})
    assert missed, "drafts were made"
    return sum(missed)


def built(drafting: Drafting, monkeypatch: pytest.MonkeyPatch, *, fewer: int = 0) -> Engine:
    monkeypatch.setattr(scheduler, "SPARE_SLOTS", 0)
    asked = drafters.lookahead_slots
    monkeypatch.setattr(assemble, "lookahead_slots", lambda row, tree: asked(row, tree) - fewer)
    settings = {**as_on_a_gpu(SIZES), "max_running_requests": len(SIZES)}
    return drafting.engine(page_size=1, **settings)


@pytest.mark.parametrize("drafting", WITH_KV, indirect=True)
def test_a_drafter_writes_kv_into_its_own_slots_alone(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed_writes(built(drafting, monkeypatch), monkeypatch) == 0


@pytest.mark.parametrize(("drafting", "nodes"), TIGHT.items(), indirect=["drafting"])
def test_one_slot_less_would_not_do(drafting: Drafting, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = replace(drafting, case=replace(drafting.case, size=nodes))
    try:
        assert missed_writes(built(fewer, monkeypatch, fewer=1), monkeypatch) > 0
    except ValueError as error:  # the warm-up over the longest text
        assert "buffers were made for" in str(error)
