"""Accepted tokens that wait for draft-extend, also of requests that do not draft for a while."""

from __future__ import annotations

import pytest
import torch

from eagle_server.plan import Decode, RequestSampling
from eagle_server.request import SamplingParams
from eagle_server.worker.batch import accepted_tokens
from eagle_server.worker.batch.accepted_tokens import AcceptedTokens

SAMPLING = RequestSampling(SamplingParams(max_tokens=9, seed=0), key=0)
WIDTH, FEATURE = 4, 3


def decode(index: int, seq_len: int) -> Decode:
    return Decode(index, seq_len, 0, SAMPLING)


def record(it: AcceptedTokens, starts: dict[int, int]) -> None:
    """The feature of position p of request r is 100 r + p in all places."""
    positions = torch.tensor(list(starts.values()))[:, None] + torch.arange(WIDTH)
    values = 100.0 * torch.tensor(list(starts))[:, None] + positions
    features = values[:, :, None].expand(-1, -1, FEATURE).clone()
    it.record(starts.items(), torch.tensor(list(starts)), positions + 1, features)


def test_requests_that_draft_in_every_cycle_have_no_backlog() -> None:
    it = AcceptedTokens(3, WIDTH, torch.device("cpu"))
    record(it, {0: 5, 1: 8})
    assert it.counts([decode(0, 8), decode(1, 9)]) == (3, 1)
    assert it.start(decode(0, 8)) == 5
    it.taken(0)
    record(it, {0: 8})
    assert it.counts([decode(0, 10)]) == (2,)
    assert it.backlog(0) == []


def test_what_is_stored_later_is_what_is_stored_at_once() -> None:
    eager, lazy = (AcceptedTokens(4, WIDTH, torch.device("cpu"), lazy=lazy) for lazy in (False, True))
    for cycle, rows in enumerate([(0, 1), (0, 1), (1, 2), (1, 2), (0,), (3, 0), (0, 3)]):
        for each in (eager, lazy):
            record(each, {row: 10 * cycle + row for row in rows})
        if cycle in (1, 3, 6):
            assert all(map(torch.equal, eager.take(torch.arange(4), WIDTH), lazy.take(torch.arange(4), WIDTH)))


@pytest.mark.parametrize("cycles", [1, 3, 70])
def test_a_backlog_has_every_feature_since_the_request_drafted_last(cycles: int) -> None:
    it = AcceptedTokens(3, WIDTH, torch.device("cpu"))
    position = 5
    for cycle in range(cycles + 1):
        record(it, {1: position, 2: 7})
        it.taken(2)
        last, position = position, position + 1 + cycle % WIDTH
    ((start, features),) = it.backlog(1)
    assert start == 5 == it.start(decode(1, position))
    assert features.shape == (last - 5, FEATURE)
    assert features[:, 0].tolist() == [100.0 + p for p in range(5, last)]
    assert it.counts([decode(1, position)]) == (position - last,)
    assert it.backlog_bytes == features.numel() * 4
    it.taken(1)
    assert it.backlog(1) == []
    assert it.backlog_bytes == 0


def test_the_longest_backlog_is_lost_if_all_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepted_tokens, "_BACKLOG_BYTES", 20 * FEATURE * 4)
    it = AcceptedTokens(3, WIDTH, torch.device("cpu"))
    for cycle in range(12):
        record(it, {0: 3 + 2 * cycle, 1: 50 + cycle})
    assert it.is_lost(0)
    assert not it.is_lost(1)
    assert it.start(decode(0, 40)) == 3, "the drafter has computed no more"
    assert it.counts([decode(0, 40)]) == (1,)
    assert it.backlog_bytes <= 20 * FEATURE * 4
    it.forget(0)
    assert not it.is_lost(0)
