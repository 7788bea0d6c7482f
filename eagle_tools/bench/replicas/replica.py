"""One simulated server: a prefix cache, a batch that grows and shrinks, and the measured cost of its cycles."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from eagle_tools.bench.replicas.conversations import Dialogue
from eagle_tools.bench.replicas.costs import ReplicaCosts

_ROUNDING = 1e-6  # tokens


@dataclass(slots=True)
class TurnRequest:
    """A turn on its way. `number` is the conversation's; times in seconds, NaN until they are known."""

    number: int
    conversation: Dialogue
    turn: int
    prompt_tokens: int
    arrived: float
    answer_tokens: int
    cached_tokens: int = 0
    first_token: float = math.nan
    ended: float = math.nan

    @property
    def own_tokens(self) -> int:
        """Tokens after the shared beginning, answer included."""
        return self.prompt_tokens + self.answer_tokens - self.conversation.beginning_tokens


@dataclass(slots=True)
class SharedBeginning:
    """A cached beginning: its tokens, and how many conversations continue it here: all, and the running ones."""

    tokens: int
    conversations: int = 0
    running: int = 0


class SimulatedCache:
    """The prefix cache, in tokens: the least recently used leaf is evicted, from its end, as in cache/radix.py.

    Leaves are the histories of conversations, and beginnings that no history continues any more. Running requests pin
    their tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.free, self.pinned = capacity, capacity, 0
        self._histories: OrderedDict[int, tuple[int, int]] = OrderedDict()  # conversation, or ~beginning
        self._beginnings: dict[int, SharedBeginning] = {}

    def admit(self, request: TurnRequest) -> int | None:
        """Pin KV for a whole request; returns its cached prompt tokens. None: it must wait."""
        place, size = request.conversation.beginning, request.conversation.beginning_tokens
        shared = self._beginnings.get(place)
        pinned = request.own_tokens + (0 if shared and shared.running else size)
        if self.pinned + pinned > self.capacity:
            return None
        history, _ = self._histories.pop(request.number, (0, 0))
        cached = history + (size if shared else 0)
        if shared is None:
            shared = self._beginnings[place] = SharedBeginning(size)
        self._histories.pop(~place, None)
        shared.conversations += not history
        shared.running += 1
        self.pinned += pinned
        self._evict(request.prompt_tokens + request.answer_tokens - cached)
        return cached

    def release(self, request: TurnRequest) -> None:
        """The request ended. Its KV stays in the cache, except that of the last token, which was never computed."""
        place = request.conversation.beginning
        shared = self._beginnings[place]
        shared.running -= 1
        self.pinned -= request.own_tokens + (0 if shared.running else shared.tokens)
        self.free += 1
        self._histories[request.number] = request.own_tokens - 1, place

    def check(self) -> None:
        """Assert that every token is free, pinned or evictable."""
        leaves = sum(tokens for tokens, _ in self._histories.values())
        idle = sum(b.tokens for b in self._beginnings.values() if b.conversations and not b.running)
        assert self.free >= 0 and self.free + self.pinned + leaves + idle == self.capacity

    def _evict(self, needed: int) -> None:
        self.free -= needed
        while self.free < 0:
            number, (tokens, place) = next(iter(self._histories.items()))
            taken = min(tokens, -self.free)
            self.free += taken
            if taken < tokens:
                self._histories[number] = tokens - taken, place
                return
            del self._histories[number]
            if number < 0:
                del self._beginnings[place]
                continue
            shared = self._beginnings[place]
            shared.conversations -= 1
            if not shared.conversations:  # it was used last when this history was, and is the oldest leaf now
                self._histories[~place] = shared.tokens, place
                self._histories.move_to_end(~place, last=False)


class Replica:
    """A server. Cycles of the same batch follow each other as one run, which ends with a request or for a new one.

    Every request that decodes gets the same tokens per cycle: `progress` counts them since the start, and a request
    ends when it has grown by the length of its answer. Prompts are computed in order of arrival.
    """

    def __init__(self, costs: ReplicaCosts) -> None:
        self.costs = costs
        self.cache = SimulatedCache(costs.kv_tokens)
        self.request_cycles = self.decoded_tokens = 0.0  # cycles of all requests, and their tokens
        self.end = math.inf  # of the run; infinite: nothing runs
        self._start, self._cycle, self._cycles = 0.0, 0.0, 0
        self._waiting: deque[TurnRequest] = deque()
        self._prefilling: deque[tuple[TurnRequest, int]] = deque()  # with the tokens to compute
        self._prefilled = 0  # tokens that the run computes
        self._decoding: list[tuple[float, int, TurnRequest]] = []  # a heap by the progress at which they end
        self._progress = 0.0
        self._context = 0.0  # tokens of all that decode
        self._order = 0

    def add(self, request: TurnRequest, now: float) -> None:
        """A request arrives. It starts with the next cycle if there is room; `end` may move."""
        self._waiting.append(request)
        if self.end == math.inf:
            self._admit()
            self._run(now)
        elif len(self._prefilling) + len(self._decoding) < self.costs.max_running_requests:
            self._cycles = min(self._cycles, int((now - self._start) / self._cycle) + 1)
            self.end = self._start + self._cycles * self._cycle

    def end_run(self) -> list[TurnRequest]:
        """Go on to the next run; returns the requests that ended with this one."""
        now, batch = self.end, len(self._decoding)
        tokens = self._cycles * self.costs.tokens_by_batch[batch]
        self._progress += tokens
        self._context += batch * tokens
        self.request_cycles += batch * self._cycles
        self.decoded_tokens += batch * tokens
        ended = []
        while self._decoding and self._decoding[0][0] <= self._progress + _ROUNDING:
            goal, _, request = heapq.heappop(self._decoding)
            self.decoded_tokens -= self._progress - goal  # the end of an answer cuts its last cycle
            self._context -= request.prompt_tokens + request.answer_tokens + self._progress - goal
            ended.append(request)
        ended += self._end_prefills(now)
        for request in ended:
            request.ended = now
            self.cache.release(request)
        self._admit()
        self._run(now)
        return ended

    def _end_prefills(self, now: float) -> list[TurnRequest]:
        """First tokens of the prompts that the run completed; returns the requests that want no second one."""
        ended = []
        while self._prefilling and self._prefilling[0][1] <= self._prefilled:
            request, uncomputed = self._prefilling.popleft()
            self._prefilled -= uncomputed
            request.first_token = now
            if request.answer_tokens == 1:
                ended.append(request)
                continue
            self._order += 1
            goal = self._progress + request.answer_tokens - 1
            heapq.heappush(self._decoding, (goal, self._order, request))
            self._context += request.prompt_tokens + 1
        if self._prefilled:
            request, uncomputed = self._prefilling.popleft()
            self._prefilling.appendleft((request, uncomputed - self._prefilled))
            self._prefilled = 0
        return ended

    def _admit(self) -> None:
        room = self.costs.max_running_requests - len(self._prefilling) - len(self._decoding)
        while self._waiting and room:
            cached = self.cache.admit(self._waiting[0])
            if cached is None:
                break
            request = self._waiting.popleft()
            request.cached_tokens = cached
            self._prefilling.append((request, request.prompt_tokens - cached))
            room -= 1

    def _run(self, now: float) -> None:
        """Start a run of cycles with the present batch. A cycle that computes prompts is a run of its own."""
        batch, costs = len(self._decoding), self.costs
        self._start, self._cycles, self.end = now, 0, math.inf
        if not batch and not self._prefilling:
            return
        self._cycle = costs.seconds_by_batch[batch] + costs.kv_token_seconds * self._context
        if self._prefilling:
            self._cycles = 1
            self._prefilled = min(costs.chunked_prefill_size, sum(tokens for _, tokens in self._prefilling))
            self._cycle += costs.prefill_cycle + costs.prefill_token * self._prefilled
        else:
            rest = self._decoding[0][0] - self._progress
            self._cycles = max(1, math.ceil((rest - _ROUNDING) / costs.tokens_by_batch[batch]))
        self.end = now + self._cycles * self._cycle
