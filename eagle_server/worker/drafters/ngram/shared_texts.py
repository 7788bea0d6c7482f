"""Continuations from other requests' texts: the newest tokens of all requests, searched for a text's last tokens.

Plain Python on the host. The tokens are in a ring buffer. Its places are chained, newest first, by the hash of the
CONTEXT tokens that end there, as in LZ77 compressors. A new token overwrites the oldest one; nothing is rebuilt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from eagle_server.worker.drafters.ngram.coupled_estimates import CoupledEstimates
from eagle_server.worker.drafters.ngram.suffix_automaton import LONGEST, Trie

CONTEXT = 2  # tokens of context that a proposal needs
_BOUNDARY = -1  # between pieces of text
_CANDIDATES = 24  # newest places with the same context that are considered
_DOUBT = 2.0  # prior pseudo-count, in matching tokens
_MIX = 0x9E3779B97F4A7C15  # odd, of random bits


@dataclass
class _Node:
    """Continuations with a common beginning. `weight` sums the lengths of their matches, in tokens."""

    weight: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)


class SharedTexts:
    """The newest `capacity` tokens of all requests.

    Takes 20 bytes of host memory for each from the start, 28 if `capacity` is not a power of two.
    """

    def __init__(self, capacity: int, steps: int) -> None:
        self.capacity, self.steps = capacity, steps
        self.length = 0  # places written so far; place p is in slot p % capacity
        self._tokens = array("i", [_BOUNDARY]) * capacity
        self._before = array("q", [-1]) * capacity  # the place before this one in its chain
        self._mask = (1 << max(capacity - 1, 1).bit_length()) - 1
        self._newest = array("q", [-1]) * (self._mask + 1)  # of each chain

    def add(self, piece: Sequence[int], known: int = 0) -> None:
        """Add a piece of text. Its first `known` tokens were added before; they are context only."""
        self._write(_BOUNDARY)
        previous = list(piece[:known])[-LONGEST:]
        for token in previous:
            self._write(token)
        if len(previous) >= CONTEXT:  # its continuation was not known before
            self._index(*previous[-CONTEXT:])
        last = previous[-1] if previous else _BOUNDARY
        for token in piece[known:]:
            self._write(token)
            if last != _BOUNDARY:
                self._index(last, token)
            last = token

    def continuations(self, tokens: Sequence[int], count: int, coupled: CoupledEstimates | None = None) -> Trie:
        """The `count` continuations of a text with the highest estimates, up to `steps` tokens deep.

        `coupled`: estimate, given the noise of the target's draws.
        """
        tail = tokens[-LONGEST:]
        matches = [(self._agreement(tail, place), place) for place in self._places(tail)]
        longest = max((length for length, _ in matches), default=0)
        if longest < CONTEXT:
            return Trie([], [], [])
        root = _Node()
        for length, place in matches:
            if 2 * length >= longest:  # ignore much shorter contexts
                self._insert(root, length, place + 1)
        return _best(root, count, longest, coupled)

    def _write(self, token: int) -> None:
        self._tokens[self.length % self.capacity] = token
        self.length += 1

    def _index(self, last: int, token: int) -> None:
        """Put the newest place first in its context's chain."""
        chain, place = self._chain(last, token), self.length - 1
        self._before[place % self.capacity] = self._newest[chain]
        self._newest[chain] = place

    def _chain(self, last: int, token: int) -> int:
        mixed = (last * _MIX + token) * _MIX
        return (mixed >> 32) & self._mask

    def _places(self, tail: Sequence[int]) -> Iterator[int]:
        """Places where the last tokens of `tail` may end, newest first."""
        if len(tail) < CONTEXT:
            return
        place, oldest = self._newest[self._chain(tail[-2], tail[-1])], self.length - self.capacity
        for _ in range(_CANDIDATES):
            if place < max(oldest, 0):
                return
            yield place
            place = self._before[place % self.capacity]

    def _agreement(self, tail: Sequence[int], place: int) -> int:
        """How many tokens that end at `place` equal the last tokens of `tail`."""
        tokens, capacity, length = self._tokens, self.capacity, 0
        for token in reversed(tail):
            if tokens[(place - length) % capacity] != token:
                break
            length += 1
        return length

    def _insert(self, node: _Node, length: int, place: int) -> None:
        """Add the tokens from `place` to the end of its piece. Each further token has a match longer by one."""
        for at in range(place, min(place + self.steps, self.length)):
            token = self._tokens[at % self.capacity]
            if token == _BOUNDARY:
                return
            node = node.children.setdefault(token, _Node())
            node.weight += length
            length += 1


def _best(root: _Node, count: int, context: int, coupled: CoupledEstimates | None) -> Trie:
    """The most probable nodes. A child's chance is its weight over the sum of all children's weights and _DOUBT."""
    trie = Trie([], [], [], context)
    heap: list[tuple[float, int, int, int, float, _Node, int]] = []
    node, number, chance, pushed, depth = root, 0, 1.0, 0, 0
    while len(trie.tokens) < count:
        total = sum(child.weight for child in node.children.values()) + _DOUBT
        estimates = {token: child.weight / total for token, child in node.children.items()}
        for token, estimate in (coupled.given_noise(depth, estimates) if coupled else estimates).items():
            pushed += 1
            entry = (-chance * estimate, pushed, token, number, estimate, node.children[token], depth + 1)
            heappush(heap, entry)
        if not heap:
            break
        negative, _, token, parent, estimate, node, depth = heappop(heap)
        trie.tokens.append(token)
        trie.parents.append(parent)
        trie.estimates.append(estimate)
        number, chance = len(trie.tokens), -negative
    return trie


def blended(private: Trie, shared: Trie, count: int) -> Trie:
    """The `count` most probable nodes of both tries.

    The trie with the longer context has priority; at equal length it is the request's own. The probability that its
    estimates leave over goes to the other trie.
    """
    if not shared.tokens or not private.tokens:
        return private if private.tokens else shared
    first, second = (private, shared) if private.context >= shared.context else (shared, private)
    number: dict[tuple[int, int], int] = {}  # of a node, by its parent's and its token
    estimates, undecided = [1.0], [1.0]

    def add(trie: Trie, shares: Sequence[float]) -> None:
        numbers = [0]
        for token, above, estimate in zip(trie.tokens, trie.parents, trie.estimates, strict=True):
            parent = numbers[above]
            key = (parent, token)
            if key not in number:
                number[key] = len(estimates)
                estimates.append(0.0)
                undecided.append(1.0)
            part = estimate * (max(shares[parent], 0.0) if parent < len(shares) else 1.0)
            estimates[number[key]] += part
            undecided[parent] -= part
            numbers.append(number[key])

    add(first, ())
    add(second, tuple(undecided))
    chances = [1.0]
    for (parent, _), estimate in zip(number, estimates[1:], strict=True):
        chances.append(chances[parent] * estimate)
    order = sorted(range(1, len(chances)), key=lambda node: -chances[node])[:count]
    place = {0: 0, **{node: i + 1 for i, node in enumerate(order)}}
    keys = list(number)
    return Trie(
        tokens=[keys[node - 1][1] for node in order],
        parents=[place[keys[node - 1][0]] for node in order],
        estimates=[estimates[node] for node in order],
        context=first.context,
    )
