"""Clients take turns: no flood of one makes another wait for more than two requests of each."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from eagle_server.scheduling import admission
from eagle_server.scheduling.scheduler import Scheduler
from eagle_server.scheduling.sequence import Sequence
from tests.support.engines import request
from tests.unit.scheduling.test_scheduler import GREEDY, cycle, names, scheduler


def send(it: Scheduler, client: str, name: str, **sampling: Any) -> None:
    it.add(replace(request(name, range(4), **sampling), client=client), GREEDY, frozenset())


def test_one_request_beside_a_flood_gets_the_first_slot_that_is_free() -> None:
    it = scheduler(2000, max_running_requests=4)
    for number in range(60):
        send(it, "flood", f"flood {number}", max_tokens=20 + 10 * number)
    cycle(it)
    send(it, "other", "other", max_tokens=5)
    while len(names(it)[0]) == 4 and "flood 0" in names(it)[0]:
        cycle(it)
    cycle(it)
    assert names(it)[0] == ["flood 1", "flood 2", "flood 3", "other"]
    assert names(it)[1][0] == "flood 4"


def test_the_requests_of_one_client_start_as_they_came() -> None:
    it = scheduler(2000, max_running_requests=1)
    for number in range(6):
        send(it, "ab"[number % 2], f"{number}", max_tokens=1)
    started = []
    while it.has_work():
        cycle(it)
        started += [name for name in names(it)[0] if name not in started]
        started += [name for name in map(str, range(6)) if name not in started and name not in names(it)[1]]
    assert started == ["0", "1", "2", "3", "4", "5"]


def test_a_request_starts_however_many_new_clients_come() -> None:
    it = scheduler(2000, max_running_requests=1)
    for number in range(2):
        send(it, "a", f"a{number}", max_tokens=1)
    for number in range(40):
        send(it, f"new {number}", f"new {number}", max_tokens=1)
        cycle(it)
    assert "a1" not in names(it)[1]


def test_what_was_aborted_before_its_start_costs_no_turn() -> None:
    it = scheduler(2000, max_running_requests=1)
    send(it, "b", "b0", max_tokens=30)
    cycle(it)
    for number in range(8):
        send(it, "a", f"a{number}", max_tokens=1)
    send(it, "b", "b1", max_tokens=1)
    for number in range(8):
        it.abort(f"a{number}")
    for number in range(2, 8):
        send(it, "b", f"b{number}", max_tokens=1)
    send(it, "a", "late", max_tokens=1)
    assert names(it)[1].index("late") <= 2


def test_an_abort_looks_at_few_of_the_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one client aborts all that it has, in any order."""
    it, count, reads = scheduler(2000, max_running_requests=1), 1000, Counter[str]()
    for number in range(count):
        send(it, "a", str(number), max_tokens=1)
    read = Sequence.__getattribute__

    def counted(sequence: Sequence, name: str) -> Any:
        reads[name] += 1
        return read(sequence, name)

    monkeypatch.setattr(Sequence, "__getattribute__", counted)
    for number in (*range(0, count, 2), *range(count - 1, 0, -2)):
        it.abort(str(number))
    assert not it.has_work()
    assert reads.total() < 50 * count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The queue's clock, which stands at `now`."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def waits(it: Scheduler) -> tuple[int, float]:
    return it.queue.waiting_clients, it.queue.longest_wait


def test_the_queue_says_how_many_clients_wait_and_for_how_long(clock: SimpleNamespace) -> None:
    it = scheduler(2000, max_running_requests=1)
    send(it, "a", "a runs", max_tokens=50)
    assert waits(it) == (1, 0.0)
    cycle(it)
    assert waits(it) == (0, 0.0)
    for clock.now, client in ((10.0, "a"), (11.0, "b"), (12.0, "a")):
        send(it, client, f"{client} from {clock.now:g}", max_tokens=5)
    clock.now = 15.0
    assert waits(it) == (2, 5.0)
    it.abort("a from 10")
    assert waits(it) == (2, 4.0)
    it.abort("a runs")
    cycle(it)
    assert names(it)[0] == ["b from 11"]
    assert waits(it) == (1, 3.0)
    it.abort("a from 12")
    assert waits(it) == (0, 0.0)


def test_a_preempted_request_waits_from_its_preemption_on(clock: SimpleNamespace) -> None:
    it = scheduler(40, reserve=False)
    for client in "ab":
        send(it, client, client, max_tokens=30)
    while not it.totals.preemptions:
        clock.now += 1.0
        cycle(it)
    assert names(it) == (["a"], ["b"])
    assert waits(it) == (1, 0.0)
    clock.now += 2.5
    assert waits(it) == (1, 2.5)


def leave(queue: deque[str], victim: str, passed: dict[str, Counter[str]]) -> None:
    queue.remove(victim)
    if passed.pop(victim, None) is not None and queue:
        passed[queue[0]] = Counter()


@given(data=st.data())
@settings(max_examples=150)
def test_a_clients_next_request_waits_for_two_of_each_other_client_at_most(data: st.DataObject) -> None:
    """Clients that send and abort whatever they like; one slot, so that requests start one after the other."""
    it = scheduler(2000, max_running_requests=1)
    owners: dict[str, str] = {}
    waiting: dict[str, deque[str]] = {client: deque() for client in "abcd"}
    passed: dict[str, Counter[str]] = {}
    for step in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["send", "send", "flood", "abort", "run", "run", "run"]))
        client = data.draw(st.sampled_from("abcd"))
        for number in range({"send": 1, "flood": 12}.get(action, 0)):
            name = f"{step}-{number}"
            owners[name] = client
            send(it, client, name, max_tokens=data.draw(st.integers(1, 3)))
            waiting[client].append(name)
            if waiting[client][0] == name:
                passed[name] = Counter()
        if action == "abort" and waiting[client]:
            victim = data.draw(st.sampled_from(waiting[client]))
            it.abort(victim)
            leave(waiting[client], victim, passed)
        if action == "run":
            before = set(names(it)[1])
            cycle(it)
            for name in before - set(names(it)[1]):
                own = owners[name]
                assert waiting[own].popleft() == name, "in order of arrival"
                passed.pop(name)
                for other, queue in waiting.items():
                    if other != own and queue:
                        passed[queue[0]][own] += 1
                        aged = (passed[queue[0]].total() + 8) // 8  # starts of whoever has waited longest
                        assert passed[queue[0]][own] <= 2 + aged
                if waiting[own]:
                    passed[waiting[own][0]] = Counter()
        assert it.queue.waiting_clients == sum(map(bool, waiting.values()))
    it.kv.check()
