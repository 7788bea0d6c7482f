"""Admission: which waiting requests start now.

Clients take turns: after one request of a client those of all others that wait come before its next one. The requests
of one client start in order of arrival. There are four exceptions, all of them bounded:

- Age: after every eighth start the request that has waited longest is next, however many new clients come.
- Reserve: a request starts only if the running ones are expected to find KV for the rest of their outputs too.
- Hold: a request whose prompt begins as one that an older request is computing right now waits for that KV.
- Passing: while the oldest request lacks KV, younger ones may start, with as many tokens in sum as it has itself.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence as Seq
from operator import attrgetter

import numpy as np

from eagle_server.cache.manager import KVAllocation, KVCacheManager
from eagle_server.cache.radix import Match, bigrams, common_pages
from eagle_server.scheduling.growth import OutputGrowth, peak_growth
from eagle_server.scheduling.limits import SchedulerLimits
from eagle_server.scheduling.sequence import Sequence

ARRIVAL = attrgetter("arrival")
TURN = attrgetter("turn", "arrival")
_AGE_EVERY = 8  # starts
_MOST_TURNS = 1024  # clients whose last turns are kept although they wait for nothing
_LOOKED_AT = 16  # requests that lack KV, in one round of admission: each costs a lookup of its prefix


def insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Insert in order of arrival."""
    insort(queue, sequence, key=ARRIVAL)


def remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove from a list in order of arrival."""
    del queue[bisect_left(queue, sequence.arrival, key=ARRIVAL)]


class RequestQueue:
    """Owns `waiting`, in the order in which they start, and decides which of them do.

    Every request has a turn: that of the newest one that has started, or the one after its client's last turn if that
    is later. So a client's next request waits for two of each other client at most, however many those send
    (start-time fair queueing, Goyal et al. 1996, with every request as large as the others).

    A request that was not admitted is looked at again only when something has `changed`: a request came or left, or KV
    was published that others wait for.
    """

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager) -> None:
        self.limits, self.kv = limits, kv
        self.waiting: list[Sequence] = []
        self._since: dict[Sequence, float] = {}  # since when each waits, by time.monotonic(); the longest wait first
        self._counts = Counter[str]()  # of waiting requests, by client
        self._turn = 0  # of the newest request that has started
        self._turns: dict[str, int] = {}  # by client, the last one that was given
        self._starts = 0
        self.changed = False
        self.growth = OutputGrowth()

    @property
    def waiting_clients(self) -> int:
        """How many clients have requests that wait."""
        return len(self._counts)

    @property
    def longest_wait(self) -> float:
        """Seconds for which the first of those that wait has waited by now, since its preemption if it had one."""
        since = next(iter(self._since.values()), None)
        return 0.0 if since is None else time.monotonic() - since

    def add(self, sequence: Sequence) -> None:
        """Queue a new or preempted request."""
        sequence.leader, client = None, sequence.request.client
        if self.kv.radix is not None and not sequence.request.prompt_logprobs:
            sequence.keys = bigrams(sequence.tokens)
        if sequence.turn is None:  # a preempted one keeps its own
            sequence.turn = self._turns[client] = max(self._turn, self._turns.get(client, -1) + 1)
        insort(self.waiting, sequence, key=TURN)
        self._since[sequence] = time.monotonic()
        self._counts[client] += 1
        self.changed = True

    def remove(self, sequence: Sequence) -> None:
        """Drop a request that was aborted."""
        client = sequence.request.client
        assert sequence.turn is not None
        self._take(sequence)
        for each in self.waiting:  # what did not start costs its client no turn
            if each.request.client == client and each.turn is not None and each.turn > sequence.turn:
                each.turn -= 1
        self.waiting.sort(key=TURN)
        if self._turns.get(client, -1) >= sequence.turn:
            self._turns[client] -= 1
        self.changed = True

    def _take(self, sequence: Sequence) -> None:
        del self.waiting[bisect_left(self.waiting, TURN(sequence), key=TURN)]
        del self._since[sequence]
        client = sequence.request.client
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]
        if not self.waiting:
            self._turns.clear()  # nobody waits for anybody
        elif len(self._turns) > len(self._counts) + _MOST_TURNS:
            self._turns = {name: turn for name, turn in self._turns.items() if name in self._counts}

    def admit(self, running: list[Sequence]) -> None:
        """Move requests from `waiting` to `running`, which is in order of arrival."""
        if not self.changed or not self.waiting or len(running) >= self.limits.max_running_requests:
            self.changed = False
            return
        self.changed = False
        growth, lacking = [self._growth(each) for each in running], list[Sequence]()
        for sequence in self.waiting.copy():
            if len(running) >= self.limits.max_running_requests or len(lacking) >= _LOOKED_AT:
                break
            passed = lacking[0] if lacking else None
            if sequence.is_held:
                continue
            if passed is not None and passed.passed_tokens + sequence.most_tokens > passed.most_tokens:
                lacking.append(sequence)
                continue
            salt = sequence.request.cache_salt
            match = self.kv.match(sequence.keys, salt) if sequence.keys is not None else None
            if self._hold(sequence, match, running):
                continue
            allocation = self._allocate(sequence, match, growth)
            if allocation is None:
                lacking.append(sequence)
                continue
            if passed is not None:
                passed.passed_tokens += sequence.most_tokens
            sequence.start(allocation, self.kv.page_size)
            self._take(sequence)
            assert sequence.turn is not None
            self._turn = max(self._turn, sequence.turn)
            insert(running, sequence)
            growth.append(self._growth(sequence))
            self._starts += 1
            if self._starts % _AGE_EVERY == 0:
                self._prefer_the_oldest()

    def _prefer_the_oldest(self) -> None:
        """Let the request that has waited longest be looked at first from the next round on."""
        oldest = next(iter(self._since), None)
        if oldest is None or oldest is self.waiting[0]:
            return
        del self.waiting[bisect_left(self.waiting, TURN(oldest), key=TURN)]
        first = self.waiting[0].turn
        assert first is not None
        oldest.turn = first - 1
        self.waiting.insert(0, oldest)
        self.changed = True

    def _hold(self, sequence: Sequence, match: Match | None, running: Seq[Sequence]) -> bool:
        """Whether to wait for the KV of an older request, because it saves half of the tokens or half of a cycle.

        It ends at the latest with that request's prefill. Only older requests are waited for, so it cannot go on.
        """
        if match is None or sequence.keys is None:
            return False
        size, matched = self.kv.page_size, len(match.pages)
        uncached = len(sequence.tokens) - matched * size
        saved = min(uncached, self.limits.chunked_prefill_size) / 2
        next_page = sequence.keys[matched * size : (matched + 1) * size]
        for other in running:
            if other.arrival > sequence.arrival:
                break
            if other.keys is None or other.request.cache_salt != sequence.request.cache_salt:
                continue
            if not np.array_equal(other.keys[matched * size : (matched + 1) * size], next_page):
                continue
            common = common_pages(other.keys, sequence.keys, size)
            if common > matched and (common - matched) * size >= saved:
                sequence.leader, sequence.awaited, other.followed = other, common, True
                return True
        return False

    def _allocate(self, sequence: Sequence, match: Match | None, growth: Seq[tuple[int, int]]) -> KVAllocation | None:
        """KV for its tokens and its window, unless the rest is too little for what the running requests will add."""
        positions, reserve = len(sequence.tokens) + self.limits.num_lookahead_slots, 0
        if growth:
            pages = self.kv.pages_for(positions) - (0 if match is None else len(match.pages))
            reserve = peak_growth([*growth, (self._reserve(sequence), pages)])
        return self.kv.allocate(match, positions, reserve, sequence.request.cache_salt)

    def _growth(self, sequence: Sequence) -> tuple[int, int]:
        """Pages that a running request is expected to add, and pages that it frees at its end."""
        assert sequence.allocation is not None
        return self._reserve(sequence), self.kv.sole_pages(sequence.allocation)

    def _reserve(self, sequence: Sequence) -> int:
        """Pages to keep for the rest of an output."""
        tokens = self.growth.reserve(sequence.output_length, sequence.request.sampling.max_tokens)
        return self.kv.pages_for(tokens)
