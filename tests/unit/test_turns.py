"""Turns of clients, and threads on which they take turns."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from concurrent.futures import Future
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_server.turns import Lane, Turns

PATIENCE = 60


def drained(turns: Turns[str]) -> list[str]:
    taken = []
    while turns:
        taken.append(turns.next())
    return taken


def test_clients_take_turns_in_order_of_arrival() -> None:
    turns = Turns[str]()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2", "a1"):
        turns.add(item[0], item)
    assert len(turns) == 3
    assert [turns.next() for _ in range(3)] == ["a1", "b1", "c1"]
    turns.add("b", "b2")
    assert drained(turns) == ["a2", "c2", "b2", "a3"]


def test_a_client_that_comes_waits_for_no_further_item_of_the_only_other_one() -> None:
    turns = Turns[str]()
    for number in range(4):
        turns.add("a", f"a{number}")
    assert [turns.next() for _ in range(2)] == ["a0", "a1"]
    turns.add("b", "b0")
    turns.add("b", "b1")
    assert drained(turns) == ["b0", "a2", "b1", "a3"]


def test_a_client_without_a_turn_keeps_its_place() -> None:
    turns = Turns[str]()
    for item in ("a1", "b1", "a2"):
        turns.add(item[0], item)
    assert turns.next({"a"}) == "b1"
    with pytest.raises(KeyError):
        turns.next({"a"})
    assert drained(turns) == ["a1", "a2"]


def test_a_removed_item_costs_no_turn() -> None:
    turns = Turns[str]()
    for item in ("a1", "b1", "a2", "b2"):
        turns.add(item[0], item)
    for item in ("b1", "b1", "c1"):
        turns.remove(item[0], item)
    assert drained(turns) == ["a1", "b2", "a2"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_before_the_kth_item_of_a_client_come_at_most_k_of_each_other(steps: list[tuple[str, bool]]) -> None:
    """However arrivals and turns alternate. `ahead` counts what was taken since an item's client began to wait."""
    turns, waiting, ahead = Turns[int](), dict[str, list[int]](), dict[str, dict[str, int]]()
    for number, (client, take) in enumerate(steps):
        waiting.setdefault(client, []).append(number)
        ahead.setdefault(client, dict.fromkeys("abcd", 0))
        turns.add(client, number)
        if take:
            item = turns.next()
            taker = next(name for name, items in waiting.items() if item in items)
            assert waiting[taker].pop(0) == item
            ahead[taker] = dict.fromkeys("abcd", 0)
            if not waiting[taker]:
                del waiting[taker], ahead[taker]
            for name, counts in ahead.items():
                counts[taker] += name != taker
                assert counts[taker] <= 1


class Gate:
    """Holds the thread of a lane."""

    def __init__(self, lane: Lane) -> None:
        self._is_open, began = threading.Event(), threading.Event()
        lane.submit("gate", lambda: (began.set(), self._is_open.wait(PATIENCE)))
        assert began.wait(PATIENCE)

    def open(self) -> None:
        self._is_open.set()


def test_a_lane_runs_functions_in_turns_of_clients_and_drops_cancelled_ones() -> None:
    lane, ran = Lane(1, "test"), list[str]()
    gate = Gate(lane)
    futures = {name: lane.submit(name[0], lambda name=name: ran.append(name)) for name in ("a1", "a2", "a3", "b1")}
    assert futures["a2"].cancel()
    gate.open()
    for name, future in futures.items():
        if name != "a2":
            future.result(PATIENCE)
    assert ran == ["a1", "b1", "a3"]
    assert not lane._functions and not lane._turns


def test_one_client_never_has_the_last_thread() -> None:
    lane, ran = Lane(3, "test"), list[str]()
    gates = [Gate(lane), Gate(lane)]
    waiting = lane.submit("gate", lambda: ran.append("gate's third"))
    for name in ("a", "b"):
        lane.submit(name, partial(ran.append, name)).result(PATIENCE)
    assert ran == ["a", "b"]
    gates[1].open()
    waiting.result(PATIENCE)
    gates[0].open()
    assert ran == ["a", "b", "gate's third"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_the_threads_of_a_lane_that_yields_have_a_lower_priority_than_all_others() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    found = [Lane(2, "test", yields=yields).submit("a", priority).result() for yields in (False, True)]
    assert found == [before, min(before + 10, 19)]
    assert priority() == before


def test_a_lane_keeps_nothing_of_a_function_that_failed() -> None:
    class Large:
        def fail(self) -> None:
            raise ValueError("as it should")

    lane, large = Lane(1, "test"), Large()
    found = weakref.ref(large)
    gc.disable()
    try:
        future: Future[None] = lane.submit("a", large.fail)
        del large
        with pytest.raises(ValueError, match="as it should"):
            future.result(PATIENCE)
        del future
        lane.submit("a", lambda: None).result(PATIENCE)
        assert found() is None
    finally:
        gc.enable()
