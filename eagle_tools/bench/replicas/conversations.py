"""Conversations that arrive at random: shared beginnings, several turns, histories that grow, time to think."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

POISSON, BURSTY = "poisson", "bursty"
BURST = 3.0  # times the mean rate within a burst; the other requests come between bursts
BURST_SECONDS = 10.0  # mean length of a burst
BURST_SHARE = 0.25  # of the time


class Turn(NamedTuple):
    """What a user adds, how long the answer is, and how long the user waited before it (seconds)."""

    new_tokens: int
    answer_tokens: int
    think: float


class Dialogue(NamedTuple):
    """`start` in seconds. All conversations with the same `beginning` share its `beginning_tokens` tokens."""

    start: float
    beginning: int
    beginning_tokens: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Habits:
    """What conversations are like; lengths are means of exponential distributions, `turns` of a geometric one.

    The k-th most popular of the `beginnings` opens conversations in proportion to 1 / k.
    """

    beginnings: int = 200
    beginning_tokens: int = 200
    turns: float = 5.0
    new_tokens: float = 30.0
    answer_tokens: float = 60.0
    think: float = 5.0
    arrivals: str = POISSON

    def mean_prompt(self) -> float:
        """Tokens of the prompt of a turn, without the bound on contexts. The mean is over turns, not conversations."""
        # of all turns of geometric conversations, a turn has turns - 1 others before it on average
        before = self.turns - 1
        return self.beginning_tokens + self.new_tokens + before * (self.new_tokens + self.answer_tokens)


def converse(habits: Habits, rate: float, seconds: float, context_length: int, seed: int) -> list[Dialogue]:
    """Conversations that start within `seconds`, `rate` per second on average, in order of their starts.

    A conversation ends before it would exceed the context.
    """
    chance = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, habits.beginnings + 1)
    shares = np.cumsum(popularity / popularity.sum())
    conversations = []
    for start in _starts(habits.arrivals, rate, seconds, chance):
        count = int(chance.geometric(1 / habits.turns))
        new = 1 + chance.exponential(habits.new_tokens - 1, count).astype(int)
        answers = 1 + chance.exponential(habits.answer_tokens - 1, count).astype(int)
        thinks = chance.exponential(habits.think, count)
        fits = habits.beginning_tokens + np.cumsum(new + answers) <= context_length
        turns = [Turn(*turn) for turn in zip(new.tolist(), answers.tolist(), thinks.tolist(), strict=True)]
        beginning = min(int(np.searchsorted(shares, chance.random())), habits.beginnings - 1)
        if kept := tuple(turns[: int(fits.sum())]):
            conversations.append(Dialogue(start, beginning, habits.beginning_tokens, kept))
    return conversations


def _starts(arrivals: str, rate: float, seconds: float, chance: np.random.Generator) -> Iterator[float]:
    """Times of a Poisson process; with bursts its rate alternates between two values."""
    calm = (1 - BURST * BURST_SHARE) / (1 - BURST_SHARE)
    now, bursting = 0.0, False
    while now < seconds:
        if arrivals == POISSON:
            until, factor = seconds, 1.0
        else:
            mean = BURST_SECONDS if bursting else BURST_SECONDS * (1 - BURST_SHARE) / BURST_SHARE
            until, factor = min(seconds, now + chance.exponential(mean)), BURST if bursting else calm
        count = int(chance.poisson(rate * factor * (until - now)))
        yield from np.sort(chance.uniform(now, until, count)).tolist()
        now, bursting = until, not bursting
