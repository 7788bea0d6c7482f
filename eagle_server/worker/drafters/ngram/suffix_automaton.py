"""What followed the end of a text wherever it occurred before: an online suffix automaton that proposes a trie.

Plain Python on the host. The automaton is Blumer et al.'s (1985): a state is a set of substrings that end at the same
places of the text, so a state's count is the number of occurrences of each of them, and the count of a successor is
that of a continuation. The estimates blend contexts of all lengths as PPM does, the longer the weightier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest

SHORTEST = 1  # token of a context that is worth a guess
LONGEST = 16  # tokens of context that are told apart; a longer match is taken as one of this length
_FAN_OUT = 8  # continuations per context that are looked at
_CERTAIN = 0.999  # no estimate is higher
_DOUBT = 2.0  # occurrences that an estimate from one token of context is worth
_NEGLIGIBLE = 0.05  # weight of a context that is not worth looking at


@dataclass(frozen=True)
class Trie:
    """Nodes 1, 2, ... by falling estimate of their path, parents first; the root is 0 and not listed.

    `estimates` are chances of acceptance given that the parent was accepted. `context`: tokens at the end of the text
    that occurred before.
    """

    tokens: list[int]
    parents: list[int]
    estimates: list[float]
    context: int = 0

    @property
    def expected(self) -> float:
        """How many nodes are accepted, if the estimates are right."""
        chances = [1.0]
        for parent, estimate in zip(self.parents, self.estimates, strict=True):
            chances.append(chances[parent] * estimate)
        return sum(chances) - 1


class SuffixAutomaton:
    """All substrings of a growing text. Adding a token costs O(1) amortised, whatever the text.

    Counts are exact for states with a substring of up to LONGEST + `depth` tokens; no others are asked for.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self._reach = depth, LONGEST + depth
        self.length = 0
        # By state: its successors, its suffix link, the length of its longest substring, its occurrences.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._longest, self._count = [-1], [0], [0]
        self._whole = 0  # the state of the whole text
        self._near = 0  # the state of its last `_reach` tokens

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._grow(token)
            self._recount(token)
            self.length += 1

    def count(self, substring: Iterable[int]) -> int:
        """Occurrences of a substring of 1 to LONGEST + depth tokens."""
        state = 0
        for token in substring:
            state = self._next[state].get(token, 0)  # no transition leads back to the empty string
            if not state:
                return 0
        return self._count[state]

    def match(self) -> tuple[int, int]:
        """The state and length of the longest suffix that occurred before, of LONGEST tokens at most; 0: none."""
        state, limit = self._ending_in(self._near, LONGEST)
        if self._count[state] > 1:
            return state, min(limit, self.length)
        link = max(self._link[state], 0)
        return link, self._longest[link]

    def continuations(self, budget: int) -> Trie:
        """The `budget` continuations of the text of the highest estimates, up to `depth` tokens deep."""
        heap: list[tuple[float, int, int, int, float, int, int, int]] = []
        state, length = self.match()
        trie = Trie([], [], [], length)
        node = depth = pushed = 0
        chance = 1.0
        while len(trie.tokens) < budget:
            if depth < self.depth and length >= SHORTEST:
                for token, (estimate, successor, reached) in self._following(state, length).items():
                    pushed += 1
                    likely = min(estimate, _CERTAIN)
                    entry = (-chance * likely, pushed, token, node, likely, successor, reached, depth + 1)
                    heappush(heap, entry)
            if not heap:
                break
            negative, _, token, parent, estimate, state, length, depth = heappop(heap)
            chance = -negative
            trie.tokens.append(token)
            trie.parents.append(parent)
            trie.estimates.append(estimate)
            node = len(trie.tokens)
        return trie

    def _following(self, state: int, length: int) -> dict[int, tuple[float, int, int]]:
        """By token that followed a suffix of the context: its estimate, and the longest context that it makes."""
        count, found = self._count, dict[int, tuple[float, int, int]]()
        weight = 1.0  # of this context's counts; what they leave undecided goes to the next shorter one
        while length >= SHORTEST and weight > _NEGLIGIBLE:
            successors, total = self._next[state], 0
            for to in successors.values():
                total += count[to]
            doubt = _DOUBT / length
            share = weight / (total + doubt)
            for token in successors if len(successors) <= _FAN_OUT else self._commonest(successors):
                to = successors[token]
                if token in found:
                    estimate, longest, reached = found[token]
                    found[token] = (estimate + share * count[to], longest, reached)
                else:
                    found[token] = (share * count[to], to, length + 1)
            weight = share * doubt
            state = self._link[state]
            length = self._longest[state]
        return found

    def _commonest(self, successors: dict[int, int]) -> list[int]:
        return nlargest(_FAN_OUT, successors, key=lambda token: (self._count[successors[token]], token))

    def _ending_in(self, state: int, limit: int) -> tuple[int, int]:
        """From a suffix's state to that of the suffix of `limit` tokens, and its length; the state if it is shorter."""
        while self._link[state] >= 0 and self._longest[self._link[state]] >= limit:
            state = self._link[state]
        return state, limit

    def _grow(self, token: int) -> None:
        """The textbook step: a state for the longer text, and a clone where a state's substrings part ways."""
        new = self._add({}, self._longest[self._whole] + 1)
        state, self._whole = self._whole, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
            return
        to = self._next[state][token]
        if self._longest[to] == self._longest[state] + 1:
            self._link[new] = to
            return
        clone = self._add(dict(self._next[to]), self._longest[state] + 1)
        self._link[clone], self._count[clone] = self._link[to], self._count[to]
        self._link[to] = self._link[new] = clone
        while state >= 0 and self._next[state].get(token) == to:
            self._next[state][token] = clone
            state = self._link[state]

    def _add(self, successors: dict[int, int], longest: int) -> int:
        self._next.append(successors)
        self._longest.append(longest)
        self._link.append(0)
        self._count.append(0)
        return len(self._link) - 1

    def _recount(self, token: int) -> None:
        """One more occurrence of every suffix within reach. At most `_reach` states hold them."""
        # Growing may have cloned the short substrings out of the state that was kept.
        before, _ = self._ending_in(self._near, min(self._reach, self.length)) if self.length else (0, 0)
        self._near, _ = self._ending_in(self._next[before][token], min(self._reach, self.length + 1))
        state = self._near
        while state > 0:
            self._count[state] += 1
            state = self._link[state]
