"""An online suffix automaton: it finds earlier occurrences of a text's last tokens and proposes a trie of
continuations.

Plain Python on the host. The automaton is that of Blumer et al. (1985). A state is a set of substrings that end at the
same positions of the text. Its count is the number of their occurrences, and a successor's count is that of a
continuation. Estimates blend contexts of all lengths as PPM does; longer contexts weigh more.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import islice

from eagle_server.worker.drafters.ngram.coupled_estimates import CoupledEstimates

SHORTEST = 1  # tokens of context that a proposal needs
LONGEST = 16  # tokens of context that are compared; longer matches count as this length
_SUCCESSORS = 8  # continuations per context that are considered
_COMPARED = 1024  # successors of a state among which the commonest are looked for, those that came first in the text
_CERTAIN = 0.999  # upper bound of an estimate
_DOUBT = 2.0  # prior pseudo-count of a context of one token; longer ones divide it by their length
_NEGLIGIBLE = 0.05  # contexts below this weight are skipped


@dataclass(frozen=True)
class Trie:
    """Nodes 1, 2, ... in order of falling path estimate, parents first. The root is 0 and is not listed.

    `estimates`: chance of acceptance, given that the parent is accepted.
    """

    tokens: list[int]
    parents: list[int]
    estimates: list[float]

    @property
    def expected(self) -> float:
        """Expected number of accepted nodes, by the estimates."""
        chances = [1.0]
        for parent, estimate in zip(self.parents, self.estimates, strict=True):
            chances.append(chances[parent] * estimate)
        return sum(chances) - 1


class SuffixAutomaton:
    """All substrings of a growing text. Adding a token takes amortised O(1) time for any text.

    Counts are exact for states with a substring of up to LONGEST + `steps` tokens. No other counts are used. A token
    adds at most two states of 20 bytes. Only states with several successors take more.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self._reach = steps, LONGEST + steps
        self.length = 0
        # Per state: token and state of its only successor (-1: it has none, or branches), suffix link, length of the
        # longest substring, number of occurrences.
        self._token, self._to = array("i", [-1]), array("i", [-1])
        self._link, self._longest, self._count = array("i", [-1]), array("i", [0]), array("i", [0])
        self._branches: dict[int, dict[int, int]] = {0: {}}  # all successors of the other states, by token
        self._whole = 0  # the state of the whole text
        self._near = 0  # the state of its last `_reach` tokens

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._grow(token)
            self._recount(token)
            self.length += 1

    def count(self, substring: Iterable[int]) -> int:
        """Occurrences of a substring of 1 to LONGEST + `steps` tokens."""
        state = 0
        for token in substring:
            state = self._step(state, token)
            if not state:
                return 0
        return self._count[state]

    def match_of(self, tail: Iterable[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `tail`, at most LONGEST tokens, that occurs in the text."""
        state = length = 0
        for token in tail:
            while state and not self._step(state, token):
                state = self._link[state]
                length = self._longest[state]
            to = self._step(state, token)
            state, length = (to, length + 1) if to else (0, 0)
        return state, length

    def match(self) -> tuple[int, int]:
        """State and length of the longest suffix that occurred before, at most LONGEST tokens; length 0: none."""
        state, limit = self._ending_in(self._near, LONGEST)
        if self._count[state] > 1:
            return state, min(limit, self.length)
        link = max(self._link[state], 0)
        return link, self._longest[link]

    def continuations(
        self, nodes: int, tail: Sequence[int] | None = None, coupled: CoupledEstimates | None = None
    ) -> Trie:
        """The `nodes` continuations of the text with the highest estimates, up to `steps` tokens deep.

        `tail`: at most LONGEST tokens that are continued instead, the last ones of a text that was not added whole.
        `coupled`: estimate, given the noise of the target's draws.
        """
        heap: list[tuple[float, int, int, int, float, int, int, int]] = []
        state, length = self.match() if tail is None else self.match_of(tail)
        trie = Trie([], [], [])
        node = depth = pushed = 0
        chance = 1.0
        ends = self._suffixes()
        while len(trie.tokens) < nodes:
            if depth < self.steps and length >= SHORTEST:
                following = self._following(state, length, ends)
                estimates = {token: estimate for token, (estimate, _, _) in following.items()}
                for token, estimate in (coupled.given_noise(depth, estimates) if coupled else estimates).items():
                    _, successor, reached = following[token]
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

    def _suffixes(self) -> set[int]:
        """The states of the text's own suffixes of at most `_reach` tokens."""
        state, states = self._near, set[int]()
        while state > 0:
            states.add(state)
            state = self._link[state]
        return states

    def _following(self, state: int, length: int, ends: Container[int]) -> dict[int, tuple[float, int, int]]:
        """For each token that followed a suffix of the context: its estimate, and the state and length it leads to.

        `ends`: states of suffixes of the text, whose last occurrence nothing follows.
        """
        count, following = self._count, dict[int, tuple[float, int, int]]()
        weight = 1.0  # of this context; the rest goes to the next shorter one
        while length >= SHORTEST and weight > _NEGLIGIBLE:
            successors, total = self._successors(state), count[state] - (state in ends)
            doubt = _DOUBT / length
            share = weight / (total + doubt)
            for token in successors if len(successors) <= _SUCCESSORS else self._commonest(successors):
                to = successors[token]
                if token in following:
                    estimate, longest, reached = following[token]
                    following[token] = (estimate + share * count[to], longest, reached)
                else:
                    following[token] = (share * count[to], to, length + 1)
            weight = share * doubt
            state = self._link[state]
            length = self._longest[state]
        return following

    def _commonest(self, successors: dict[int, int]) -> list[int]:
        return nlargest(
            _SUCCESSORS, islice(successors, _COMPARED), key=lambda token: (self._count[successors[token]], token)
        )

    def _ending_in(self, state: int, limit: int) -> tuple[int, int]:
        """Shorten a suffix to `limit` tokens: its state and length. A shorter suffix keeps its state."""
        while self._link[state] >= 0 and self._longest[self._link[state]] >= limit:
            state = self._link[state]
        return state, limit

    def _grow(self, token: int) -> None:
        """The textbook step: add a state for the longer text, and clone a state whose substrings now differ."""
        new = self._add(self._longest[self._whole] + 1)
        state, self._whole = self._whole, new
        to = 0
        while state >= 0 and not (to := self._step(state, token)):
            self._connect(state, token, new)
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
            return
        if self._longest[to] == self._longest[state] + 1:
            self._link[new] = to
            return
        clone = self._add(self._longest[state] + 1)
        self._token[clone], self._to[clone] = self._token[to], self._to[to]
        if to in self._branches:
            self._branches[clone] = dict(self._branches[to])
        self._link[clone], self._count[clone] = self._link[to], self._count[to]
        self._link[to] = self._link[new] = clone
        while state >= 0 and self._step(state, token) == to:
            self._connect(state, token, clone)
            state = self._link[state]

    def _step(self, state: int, token: int) -> int:
        """The successor by a token; 0 if there is none, because no transition leads back to the empty string."""
        if self._token[state] == token:
            return self._to[state]
        branches = self._branches.get(state)
        return 0 if branches is None else branches.get(token, 0)

    def _successors(self, state: int) -> dict[int, int]:
        token = self._token[state]
        return self._branches.get(state, {}) if token < 0 else {token: self._to[state]}

    def _connect(self, state: int, token: int, to: int) -> None:
        """Set the successor by a token."""
        only = self._token[state]
        branches = self._branches.get(state)
        if branches is not None:
            branches[token] = to
        elif only in (-1, token):
            self._token[state], self._to[state] = token, to
        else:
            self._branches[state] = {only: self._to[state], token: to}
            self._token[state] = -1

    def _add(self, longest: int) -> int:
        self._token.append(-1)
        self._to.append(-1)
        self._longest.append(longest)
        self._link.append(0)
        self._count.append(0)
        return len(self._link) - 1

    def _recount(self, token: int) -> None:
        """Count one more occurrence of every suffix of at most `_reach` tokens; at most `_reach` states have them."""
        # `_grow` may have moved the short substrings to a clone.
        before, _ = self._ending_in(self._near, min(self._reach, self.length)) if self.length else (0, 0)
        self._near, _ = self._ending_in(self._step(before, token), min(self._reach, self.length + 1))
        state = self._near
        while state > 0:
            self._count[state] += 1
            state = self._link[state]
