"""Admission: which waiting requests start now, and which running ones make room for them.

Clients below an equal share of the running requests come first. Beyond that clients take turns: after a request of one
client, requests of all other waiting clients come before its next one. The requests of one client start in order of
arrival. There are four exceptions, all of them bounded:

- Age: after every eighth start the client of the request that has waited longest is next, however many clients come.
- Reserve: a request starts only if the running ones are expected to find KV for the rest of their outputs too.
- Hold: if an older request is computing the same prefix right now, a request waits for that KV.
- Passing: while the oldest request lacks KV, younger ones may start, up to its own number of tokens in sum.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain, islice
from operator import attrgetter

import numpy as np

from eagle_server.cache.manager import KVAllocation, KVCacheManager
from eagle_server.cache.radix import Match, bigrams, common_pages
from eagle_server.scheduling.checkpoints import checkpoint_to_await, prompt_checkpoints
from eagle_server.scheduling.sequence import Sequence

ARRIVAL, FIRST = attrgetter("arrival"), attrgetter("first")
_AGE_EVERY = 8  # starts
_MOST_TURNS = 1024  # clients without waiting requests whose last turns are kept
_LOOKED_AT = 16  # requests that lack KV, in one round of admission: each costs a lookup of its prefix
_LEAST_CAUTION = 0.5  # requests end at different times, so less than the sum of all outputs is needed at once
_RAISE = 0.2  # fraction of the distance to 1, per preemption
_RELAX = 1 / 64  # fraction of the distance back, per request that ended
_LEAST_WEIGHT = 1 / 16  # of the newest request in the mean


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a cycle, and facts about the drafter that planning needs.

    Every decoding request has `num_lookahead_slots` KV slots after its text. `steps` is the depth of the draft
    trees. `uses_features`: the drafter reads the target's features, one cycle later, and may write KV. `lossy` names
    the acceptance rule of sampled (not greedy) requests if it changes their distribution. `checkpoint_interval`: tokens
    between checkpoints of the states of long prompts; 0: no layer is recurrent, or nothing is cached.
    """

    context_length: int
    max_running_requests: int
    chunked_prefill_size: int  # prompt tokens per cycle
    num_lookahead_slots: int
    steps: int
    uses_features: bool
    lossy: str | None = None
    checkpoint_interval: int = 0


class OutputGrowth:
    """Estimates how many tokens will still be added to outputs.

    `share`: the mean part of max_tokens that requests use, so that a large default max_tokens reserves no KV that is
    hardly ever used. `caution`: the part of the expected tokens that is reserved. Each preemption raises it.
    """

    def __init__(self) -> None:
        self.share, self.caution = 0.5, 1.0
        self._ended = 1  # the first guess counts as one request

    def ended(self, tokens: int, max_tokens: int) -> None:
        """A request has ended with `tokens` output tokens."""
        if max_tokens:
            self._ended += 1
            self.share += (tokens / max_tokens - self.share) * max(1 / self._ended, _LEAST_WEIGHT)
            self.caution += (_LEAST_CAUTION - self.caution) * _RELAX

    def preempted(self) -> None:
        """KV ran out: reserve more."""
        self.caution += (1 - self.caution) * _RAISE

    def reserve(self, tokens: int, max_tokens: int) -> int:
        """How many more tokens to expect of a request with `tokens` output tokens."""
        rest = max_tokens - tokens
        # An output that is already longer than most will probably go on for a while.
        expected = max(self.share * max_tokens - tokens, self.share * rest / 2)
        return round(self.caution * expected)


def peak_growth(requests: Seq[tuple[int, int]]) -> int:
    """The most pages that requests need at once beyond those they have now, if all grow equally fast.

    Each request is (pages that it will add, pages that it frees at its end). The need is largest just before one ends:
    the running ones have grown as far as it has, and the earlier ones have freed their pages.
    """
    peak = freed = 0
    for ended, (added, pages) in enumerate(sorted(requests)):
        peak = max(peak, (len(requests) - ended) * added - freed)
        freed += pages
    return peak


def insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Insert in order of arrival."""
    insort(queue, sequence, key=ARRIVAL)


def remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove from a list in order of arrival."""
    del queue[bisect_left(queue, sequence.arrival, key=ARRIVAL)]


@dataclass
class ClientQueue:
    """The waiting requests of one client in order of arrival, and as many turns in order. The first takes the first.

    So an aborted request gives back the last turn, and the requests behind it move up.
    """

    requests: list[Sequence] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    @property
    def first(self) -> tuple[int, int]:
        """The order of clients: the turn of the first request, and its arrival."""
        return self.turns[0], self.requests[0].arrival


class RequestQueue:
    """Owns the waiting requests, the order in which they start, and decides which of them start now.

    Every request brings its client a turn: the turn of the newest request that has started, or the turn after its
    client's last one if that is later. So a client's next request waits for at most two requests of each other client,
    however many these send (start-time fair queueing, Goyal et al. 1996, with equal costs of all requests).

    A request that was not admitted is looked at again only when something has `changed`: a request came or left, or KV
    was published that others wait for.
    """

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager) -> None:
        self.limits, self.kv = limits, kv
        self._clients: dict[str, ClientQueue] = {}
        self.since: dict[Sequence, float] = {}  # since when each waits, by time.monotonic(); the longest wait first
        self._turn = 0  # of the newest request that has started
        self._turns: dict[str, int] = {}  # by client, the turn of its newest request
        self._starts = 0
        self.changed = False
        self.growth = OutputGrowth()

    def in_order(self, clients: Iterable[str] | None = None) -> Iterator[Sequence]:
        """The requests of these clients, or of all, that wait now, in the order of their turns."""
        queues = (self._clients[client] for client in (self._clients if clients is None else clients))
        pairs = (zip(queue.turns.copy(), queue.requests.copy(), strict=True) for queue in queues)
        return (sequence for _, sequence in merge(*pairs, key=lambda pair: (pair[0], pair[1].arrival)))

    @property
    def waiting_clients(self) -> int:
        """How many clients have requests that wait."""
        return len(self._clients)

    @property
    def longest_wait(self) -> float:
        """Seconds that the request that waits longest has waited, since it came or was preempted."""
        since = next(iter(self.since.values()), None)
        return 0.0 if since is None else time.monotonic() - since

    def add(self, sequence: Sequence) -> None:
        """Queue a new or preempted request."""
        sequence.leader, client = None, sequence.request.client
        if self.kv.radix is not None and not sequence.request.prompt_logprobs:
            sequence.keys = bigrams(sequence.tokens)
        if sequence.turn is None:  # a preempted one has the turn with which it started
            sequence.turn = self._turns[client] = max(self._turn, self._turns.get(client, -1) + 1)
        queue = self._clients.setdefault(client, ClientQueue())
        insert(queue.requests, sequence)
        insort(queue.turns, sequence.turn)
        self.since[sequence] = time.monotonic()
        self.changed = True

    def remove(self, sequence: Sequence) -> None:
        """Drop a request that was aborted. It costs its client no turn."""
        client = sequence.request.client
        turn = self._take(sequence, -1)
        if self._turns.get(client) == turn:
            self._turns[client] -= 1
        self.changed = True

    def _take(self, sequence: Sequence, turn: int) -> int:
        """Drop a request and the turn with this index, which is returned."""
        client = sequence.request.client
        queue = self._clients[client]
        remove(queue.requests, sequence)
        number = queue.turns.pop(turn)
        del self.since[sequence]
        if not queue.requests:
            del self._clients[client]
        if not self._clients:
            self._turns.clear()  # no client waits for another one
        elif len(self._turns) > len(self._clients) + _MOST_TURNS:
            self._turns = {name: last for name, last in self._turns.items() if name in self._clients}
        return number

    def admit(self, running: list[Sequence]) -> None:
        """Move requests from `waiting` to `running`, which is in order of arrival."""
        if not self.changed or not self._clients or len(running) >= self.limits.max_running_requests:
            self.changed = False
            return
        self.changed = False
        growth, lacking = [self._growth(sequence) for sequence in running], list[Sequence]()
        held, share = self._shares(running)
        below = {client: held[client] < share for client in self._clients}
        first, others = ([client for client in below if below[client] is wanted] for wanted in (True, False))
        for sequence in chain(self.in_order(first), self.in_order(others)):
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
            self._start(sequence, allocation, match)
            requests = self._clients[sequence.request.client].requests
            sequence.turn = self._take(sequence, bisect_left(requests, sequence.arrival, key=ARRIVAL))
            self._turn = max(self._turn, sequence.turn)
            insert(running, sequence)
            growth.append(self._growth(sequence))
            self._starts += 1
            if self._starts % _AGE_EVERY == 0:
                self._prefer_the_oldest()

    def _shares(self, running: Seq[Sequence]) -> tuple[Counter[str], int]:
        """How many requests of each client run, and an equal share of those that can run for each client."""
        held = Counter(sequence.request.client for sequence in running)
        places = min(len(running) + 1, self.limits.max_running_requests)
        return held, max(1, places // len(held.keys() | self._clients.keys()))

    def to_preempt(self, running: Seq[Sequence]) -> list[Sequence]:
        """Running requests to preempt, so that a client with less than an equal share of them can start one more.

        They are the newest of the client that runs most, which keeps its share. [] if they would not be enough, or if
        the request can start without. Each cycle makes room for one request. A request is preempted in this way once,
        and again whenever it has added LEAST_PROGRESS tokens since it started again.
        """
        if not self._clients or not running:
            return []
        held, share = self._shares(running)
        below = [client for client in self._clients if held[client] < share]
        waiting = next((sequence for sequence in self.in_order(below) if not sequence.is_held), None)
        owner, most = held.most_common(1)[0]
        if waiting is None or most <= share or self._fits(waiting, running, []):
            return []
        own = (sequence for sequence in reversed(running) if sequence.request.client == owner and sequence.may_give_way)
        preempted = list(islice(own, most - share))
        if not self._fits(waiting, running, preempted):
            return []
        enough = range(1, len(preempted))
        count = next((count for count in enough if self._fits(waiting, running, preempted[:count])), len(preempted))
        return preempted[:count]

    def _fits(self, waiting: Sequence, running: Seq[Sequence], preempted: Seq[Sequence]) -> bool:
        """Whether a request could start now if some of the running ones were preempted. Takes no cached prefix into
        account: it would be kept for the request."""
        if len(running) - len(preempted) >= self.limits.max_running_requests:
            return False
        growth = {sequence: self._growth(sequence) for sequence in running}
        freed = sum(growth.pop(sequence)[1] for sequence in preempted)
        pages = self.kv.pages_for(len(waiting.tokens) + self.limits.num_lookahead_slots)
        reserve = peak_growth([*growth.values(), (self._reserve(waiting), pages)]) if growth else 0
        return pages + reserve <= self.kv.available_pages + freed

    def _start(self, sequence: Sequence, allocation: KVAllocation, match: Match | None) -> None:
        size, interval = self.kv.page_size, self.limits.checkpoint_interval
        sequence.start(allocation, size)
        if interval:
            cached = 0 if match is None else match.cached_pages * size
            prompt = (sequence.num_computed_tokens, sequence.num_prefill_tokens)
            sequence.checkpoints = prompt_checkpoints(prompt, cached, interval, size)

    def _prefer_the_oldest(self) -> None:
        """The client of the request that has waited longest is next."""
        oldest = next(iter(self.since), None)
        if oldest is None:
            return
        queue, first = self._clients[oldest.request.client], min(self._clients.values(), key=FIRST)
        if queue is not first:
            queue.turns[0] = first.turns[0] - 1
            self.changed = True

    def _hold(self, sequence: Sequence, match: Match | None, running: Seq[Sequence]) -> bool:
        """Whether to wait for the KV of an older request, because it saves half of the tokens or half of a cycle.

        The wait ends at the latest with that request's prefill. Requests wait only for older ones, never in a circle.
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
            if self.limits.checkpoint_interval and (common - matched) * size >= saved:
                common = checkpoint_to_await(other, common * size, matched * size) // size
            if common > matched and (common - matched) * size >= saved:
                sequence.leader, sequence.awaited, other.followed = other, common, True
                return True
        return False

    def _allocate(self, sequence: Sequence, match: Match | None, growth: Seq[tuple[int, int]]) -> KVAllocation | None:
        """KV for its tokens and its window; None if too little would be left for the growth of running requests."""
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
