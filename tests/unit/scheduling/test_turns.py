"""Clients take turns: no flood of one makes another wait for more than two requests of each."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from eagle_server.scheduling import admission
from eagle_server.scheduling.scheduler import Scheduler
from eagle_server.scheduling.sequence import LEAST_PROGRESS, Sequence
from tests.support.engines import request
from tests.unit.scheduling.test_scheduler import GREEDY, cycle, names, scheduler


def send(it: Scheduler, client: str, name: str, **sampling: Any) -> None:
    it.add(replace(request(name, range(4), **sampling), client=client), GREEDY, frozenset())


def test_one_request_beside_a_flood_starts_at_once_in_the_place_of_the_newest() -> None:
    it = scheduler(5000, max_running_requests=4, context_length=1000)
    for number in range(60):
        send(it, "flood", f"flood {number}", max_tokens=20 + 10 * number)
    cycle(it)
    send(it, "other", "other", max_tokens=5)
    cycle(it)
    assert names(it)[0] == ["flood 0", "flood 1", "flood 2", "other"]
    assert names(it)[1][0] == "flood 3", "what was preempted is next"
    while "other" in names(it)[0]:
        cycle(it)
    cycle(it)
    assert names(it)[0] == ["flood 0", "flood 1", "flood 2", "flood 3"]


def texts(it: Scheduler, deltas: dict[str, list[int]]) -> None:
    for delta in cycle(it)[1]:
        deltas.setdefault(delta.request_id, []).extend(delta.token_ids)


def test_clients_that_wait_get_an_equal_share_of_what_runs_and_leave_the_others_theirs() -> None:
    it = scheduler(9000, max_running_requests=9, context_length=1000)
    for number in range(20):
        send(it, "a", f"a{number}", max_tokens=100)
    seen: dict[str, list[int]] = {}
    texts(it, seen)
    for number in range(12):
        send(it, "b", f"b{number}", max_tokens=3)
        send(it, "c", f"c{number}", max_tokens=100)
    for step in range(40):
        texts(it, seen)
        running = Counter(name[0] for name in names(it)[0])
        assert running["a"] >= 3
        assert running["c"] == 3 or step < 5 or not any(name[0] == "b" for name in sum(names(it), []))
    assert len([name for name in seen if name[0] == "b"]) == 12
    while it.has_work():
        texts(it, seen)
    assert all(len(text) == (3 if name[0] == "b" else 100) for name, text in seen.items())


def test_more_clients_than_slots_get_one_each() -> None:
    it = scheduler(9000, max_running_requests=3, context_length=1000)
    for number in range(5):
        send(it, "a", f"a{number}", max_tokens=500)
    cycle(it)
    for client in "bcde":
        send(it, client, client, max_tokens=500)
    for _ in range(4):
        cycle(it)
    assert names(it)[0] == ["a0", "b", "c"]


@pytest.mark.parametrize("clients", ["a", "ab"])
def test_nobody_is_preempted_for_a_client_that_has_its_share(clients: str) -> None:
    it = scheduler(9000, max_running_requests=4, context_length=1000)
    for number in range(20):
        send(it, clients[number % len(clients)], str(number), max_tokens=10 + number)
    while it.has_work():
        cycle(it)
    assert it.totals.preemptions == 0


def test_a_request_makes_progress_between_two_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests come one after the other, each of which takes the place of a long one."""
    it, lengths = scheduler(9000, max_running_requests=4, context_length=1000, radix=True), dict[str, list[int]]()
    preempt = it._preempt

    def noted(sequence: Sequence) -> None:
        lengths.setdefault(sequence.request.request_id, []).append(sequence.output_length)
        preempt(sequence)

    monkeypatch.setattr(it, "_preempt", noted)
    for number in range(6):
        send(it, "flood", f"flood {number}", max_tokens=300)
    seen: dict[str, list[int]] = {}
    for number in range(2000):
        if number % 5 == 0:
            send(it, "other", f"short {number}", max_tokens=2)
        texts(it, seen)
        if all(len(seen.get(f"flood {flood}", ())) == 300 for flood in range(6)):
            break
    else:
        pytest.fail("a long request does not come to its end")
    assert max(map(len, lengths.values())) > 2
    for found in lengths.values():
        assert all(after - before >= LEAST_PROGRESS for before, after in itertools.pairwise(found))


def test_kv_that_one_client_holds_is_taken_for_a_client_that_waits() -> None:
    """All slots of the pool are in use or reserved, and there are rows for more requests."""
    it = scheduler(400, max_running_requests=8, context_length=1000, radix=True, reserve=False)
    for number in range(4):
        send(it, "flood", f"flood {number}", max_tokens=300)
    seen: dict[str, list[int]] = {}
    while not it.totals.preemptions:
        texts(it, seen)
    it.add(replace(request("other", range(500, 560), max_tokens=20), client="other"), GREEDY, frozenset())
    for _ in range(3):
        texts(it, seen)
    assert "other" in names(it)[0]
    assert len(names(it)[0]) > 1, "the flood keeps its share"
    while it.has_work():
        texts(it, seen)
    assert {len(text) for name, text in seen.items() if name != "other"} == {300}


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


def test_the_time_in_the_queue_begins_with_the_header() -> None:
    it, began = scheduler(2000), time.monotonic() - 100
    it.add(replace(request("a", range(4), max_tokens=1), began=began), GREEDY, frozenset())
    (delta,) = cycle(it)[1]
    assert delta.timing is not None
    assert delta.timing.queue >= 100


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
