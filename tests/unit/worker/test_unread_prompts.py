"""A drafter on a CPU reads a prompt when a request that needs it drafts, and not before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eagle_server.engine.engine import Engine
from eagle_server.plan import Chunk, Decode, RequestSampling
from eagle_server.request import SamplingParams
from eagle_server.worker.batch.accepted_tokens import UnreadPrompts
from eagle_server.worker.batch.batch import Prompts
from eagle_server.worker.budget.budget import NOTHING
from tests.support.engines import random_head, random_target, request, run, speculative

SAMPLING = RequestSampling(SamplingParams(max_tokens=9, seed=0), key=0)
SLOTS, WIDTH, ROOM = 64, 20, 1000


def table(*rows: Iterable[int]) -> NDArray[np.int32]:
    """Each request's slots by position."""
    slots = np.zeros((len(rows), WIDTH), dtype=np.int32)
    for row, given in zip(slots, map(list, rows), strict=True):
        row[: len(given)] = given
    return slots


def add(it: UnreadPrompts, slots: NDArray[np.int32], *chunks: tuple[int, int, int], is_last: bool = True) -> None:
    """The target has computed chunks (request, start, end) in one forward. The feature of position p is p."""
    given = [
        Chunk(request, start, tuple(range(start, end)), next_token=None if is_last else end, sampling=SAMPLING)
        for request, start, end in chunks
    ]
    features = torch.cat([torch.arange(start, end, dtype=torch.float32) for _, start, end in chunks])
    it.add(given, slots, features[:, None])


def decode(request: int, seq_len: int) -> Decode:
    return Decode(request, seq_len, 0, SAMPLING)


def taken(it: UnreadPrompts, slots: NDArray[np.int32], request: int, seq_len: int) -> list[tuple[int, list[float]]]:
    return [(start, features[:, 0].tolist()) for start, features in it.take(decode(request, seq_len), slots)]


def test_a_request_reads_the_chunks_of_its_prompt_once() -> None:
    it, slots = UnreadPrompts(SLOTS, 1, ROOM), table(range(10, 20), range(30, 40))
    add(it, slots, (0, 0, 3), is_last=False)
    add(it, slots, (1, 0, 4), (0, 3, 6))
    assert it.rows(decode(0, 6), slots) == 5, "the token after the last row is not known"
    assert taken(it, slots, 0, 6) == [(0, [0, 1, 2]), (3, [3, 4])]
    assert taken(it, slots, 0, 7) == []
    assert taken(it, slots, 1, 5) == [(0, [0, 1, 2])]
    assert it.is_empty


def test_a_request_reads_what_another_one_left_in_the_prefix_cache() -> None:
    it, slots = UnreadPrompts(SLOTS, 1, ROOM), table(range(10, 20), [10, 11, 12, *range(30, 40)])
    add(it, slots, (0, 0, 6))
    it.forget(0)
    add(it, slots, (1, 3, 5))
    assert taken(it, slots, 1, 5) == [(0, [0, 1, 2]), (3, [3])]
    assert taken(it, slots, 0, 6) == [(3, [3, 4])], "a new request in its row"


@pytest.mark.parametrize("page", [1, 2])
def test_slots_that_were_freed_are_not_written(page: int) -> None:
    it, slots = UnreadPrompts(SLOTS, page, ROOM), table(range(10, 20))
    add(it, slots, (0, 0, 8))
    it.freed([10 // page, 16 // page])
    first = page
    assert taken(it, slots, 0, 6) == [(first, [*range(first, 6)])]
    it.freed(list(range(10 // page, 20 // page)))
    assert it.is_empty
    assert it.has_room


def test_features_have_bounded_room() -> None:
    it, slots = UnreadPrompts(SLOTS, 1, 6 * 4), table(range(10, 20), range(30, 40))
    add(it, slots, (0, 0, 5))
    assert it.has_room
    add(it, slots, (1, 0, 5))
    assert not it.has_room
    it.freed(list(range(10, 20)))
    assert it.has_room


def test_a_last_token_alone_leaves_nothing_to_read() -> None:
    it, slots = UnreadPrompts(SLOTS, 1, ROOM), table(range(10, 20))
    add(it, slots, (0, 5, 6))
    assert it.is_empty


def rows_read(engine: Engine) -> list[int]:
    """A list that receives the number of rows of each call that reads prompts."""
    rows, drafter = list[int](), engine.worker.drafter
    original = drafter.prefill

    def prefill(prompts: Prompts) -> None:
        assert prompts.features is not None
        rows.append(len(prompts.features))
        original(prompts)

    drafter.prefill = prefill  # type: ignore[method-assign]
    return rows


def test_a_prompt_is_read_once_a_request_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target()
    engine = speculative(target, random_head(target, "EAGLE3"), 3, 4, adaptive=True)
    rows, prompt = rows_read(engine), list(range(1, 31))
    with monkeypatch.context() as patched:
        patched.setattr(engine.worker.drafting.budget, "choose", lambda decodes, able: NOTHING)
        run(engine, [request("short", prompt, max_tokens=4)])
        run(engine, [request("shorter", [*prompt, 33], max_tokens=1)])
        engine.catch_up()
    assert rows == []
    (finished,) = run(engine, [request("drafts", [*prompt, 34, 35], max_tokens=4)]).values()
    assert finished.cached_tokens >= len(prompt) - 1
    assert sum(rows) == len(prompt) + 1
