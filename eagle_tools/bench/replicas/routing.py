"""How a router chooses a replica. Loads are requests that the router has sent and that have not ended."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eagle_tools.bench.replicas.replica import TurnRequest

Loads = NDArray[np.int64]
RINGS = 64  # points of every replica on the hash ring


class Routing(Protocol):
    """A policy. `loads` belongs to the simulation, which keeps it up to date."""

    def choose(self, request: TurnRequest, loads: Loads) -> int:
        """The number of the replica that gets the request."""
        ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, replicas: int) -> None:
        self._next, self._replicas = -1, replicas

    def choose(self, request: TurnRequest, loads: Loads) -> int:
        self._next = (self._next + 1) % self._replicas
        return self._next


class LeastLoad:
    """A random one of the replicas with the fewest requests."""

    def __init__(self, replicas: int) -> None:
        self._chance = np.random.default_rng(0)

    def choose(self, request: TurnRequest, loads: Loads) -> int:
        least = np.flatnonzero(loads == loads.min())
        return int(least[int(self._chance.random() * len(least))])


class CacheAware:
    """As cache_aware of sglang-router and vllm-router, with the defaults of both.

    The replica whose past requests share the longest prefix, if that is above 0.3 of the prompt; else the one with the
    least text sent to it. While the highest load is more than 64 above and 1.5 times the lowest: the least load. Of
    several replicas with the same prefix it takes the one that got it last.
    """

    THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5

    def __init__(self, replicas: int, absolute: int = ABSOLUTE) -> None:
        self._absolute = absolute
        self._sent = np.zeros(replicas)  # tokens
        self._least = LeastLoad(replicas)
        self._histories: dict[int, tuple[int, int]] = {}  # conversation: replica, tokens
        self._beginnings: dict[int, int] = {}

    def choose(self, request: TurnRequest, loads: Loads) -> int:
        beginning = request.conversation.beginning
        if request.turn:
            near, shared = self._histories[request.number]
        else:
            near = self._beginnings.get(beginning, -1)
            shared = request.conversation.beginning_tokens if near >= 0 else 0
        lowest, highest = int(loads.min()), int(loads.max())
        if highest - lowest > self._absolute and highest > self.RELATIVE * lowest:
            chosen = self._least.choose(request, loads)
        elif shared > self.THRESHOLD * request.prompt_tokens:
            chosen = near
        else:
            chosen = int(self._sent.argmin())
        self._sent[chosen] += request.prompt_tokens - (shared if chosen == near else 0)
        self._histories[request.number] = chosen, request.prompt_tokens
        self._beginnings[beginning] = chosen
        return chosen


class TightCacheAware(CacheAware):
    """`CacheAware` that already yields when the highest load is 4 above the lowest."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas, absolute=4)


class BoundedHashing:
    """Consistent hashing of the conversation; a replica with more than 1.25 times the mean load is passed over.

    Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, arXiv 1608.01350.
    """

    BOUND = 1.25

    def __init__(self, replicas: int) -> None:
        points = np.random.default_rng(0).random(replicas * RINGS)
        order = np.argsort(points)
        self._points = points[order].tolist()
        self._owners = (order // RINGS).tolist()
        self._replicas, self._requests = replicas, 0

    def choose(self, request: TurnRequest, loads: Loads) -> int:
        bound = math.ceil(self.BOUND * (int(loads.sum()) + 1) / self._replicas)
        place = bisect_left(self._points, _hash(request.number))
        while loads[self._owners[place % len(self._owners)]] >= bound:
            place += 1
        owner: int = self._owners[place % len(self._owners)]
        return owner


def _hash(number: int) -> float:
    """A number in [0, 1) that looks random: multiples of the golden ratio's inverse, twice mixed."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return (mixed ^ mixed >> 31) / 2**64


POLICIES: dict[str, Callable[[int], Routing]] = {  # by name, made for a number of replicas
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "cache-aware": CacheAware,
    "cache-aware-tight": TightCacheAware,
    "bounded-hashing": BoundedHashing,
}
