"""The prefix cache against a brute-force model: a dictionary from prefixes of whole pages to page ids."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from eagle_server.cache.radix import Match, RadixCache, bigrams

Prefix = tuple[str | int | None, ...]  # the salt, then keys
KEYS = st.lists(st.integers(0, 1), max_size=14)
SALTS = st.sampled_from([None, "a", "b", "\0" * 8])  # the last one looks like a page


def array(keys: list[int]) -> np.ndarray:
    return np.asarray(keys, dtype=np.int64)


class RadixAgainstModel(RuleBasedStateMachine):
    """Only two keys, so that prefixes are shared, split and inserted again; and salts, which share nothing."""

    matches = Bundle("matches")

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.model: dict[Prefix, int] = {}
        self.locks: list[Prefix] = []
        self.proven: set[int] = set()  # pages
        self.fresh = itertools.count(1)

    def prefixes(self, keys: list[int], before: Prefix) -> list[Prefix]:
        size = self.cache.page_size
        return [(*before, *keys[: n * size]) for n in range(1, len(keys) // size + 1)]

    @rule(keys=KEYS, salt=SALTS)
    def insert(self, keys: list[int], salt: str | None) -> None:
        """A request has fresh pages for all keys. The cache refuses those whose prefix it already holds."""
        prefixes = self.prefixes(keys, (salt,))
        mine = [next(self.fresh) for _ in prefixes]
        end = self.cache.insert(array(keys), mine, salt=salt)
        assert end.pages == [self.model[prefix] for prefix in prefixes if prefix in self.model]
        for page, prefix in zip(mine, prefixes, strict=True):
            self.model.setdefault(prefix, page)

    @rule(target=matches, locked=consumes(matches), keys=KEYS)
    def continue_a_locked_prefix(self, locked: tuple[Match, Prefix], keys: list[int]) -> tuple[Match, Prefix]:
        """A running request inserts what follows its prefix, and locks it."""
        found, before = locked
        prefixes = self.prefixes(keys, before)
        mine = [next(self.fresh) for _ in prefixes]
        end = self.cache.insert(array(keys), mine, found.node, before[0])
        assert end.pages == [self.model[prefix] for prefix in prefixes if prefix in self.model]
        self.cache.lock(end.node, above=found.node)
        for page, prefix in zip(mine, prefixes, strict=True):
            self.model.setdefault(prefix, page)
        after = prefixes[-1] if prefixes else before
        self.locks.remove(before)
        self.locks.append(after)
        return end, after

    @rule(locked=consumes(matches))
    def discard(self, locked: tuple[Match, Prefix]) -> None:
        """A failed request takes the end of its prefix away that no other lock or page needs."""
        found, prefix = locked
        self.locks.remove(prefix)
        self.cache.unlock(found.node)
        proven = {p for p, page in self.model.items() if page in self.proven}
        freed = self.cache.discard(found.node)
        gone = {p for p, page in self.model.items() if page in freed}
        assert len(gone) == len(freed)
        assert all(prefix[: len(p)] == p for p in gone)
        assert not gone & proven
        assert not any(lock[: len(p)] == p for lock in self.locks for p in gone)
        self.model = {p: page for p, page in self.model.items() if p not in gone}

    @rule(locked=matches)
    def prove(self, locked: tuple[Match, Prefix]) -> None:
        found, prefix = locked
        self.cache.prove(found.node)
        self.proven.update(page for p, page in self.model.items() if prefix[: len(p)] == p)

    @rule(keys=KEYS, salt=SALTS)
    def match(self, keys: list[int], salt: str | None) -> None:
        found = self.cache.match(array(keys), salt)
        assert found.pages == [self.model[prefix] for prefix in self.prefixes(keys, (salt,)) if prefix in self.model]

    @rule(target=matches, keys=KEYS, salt=SALTS)
    def lock(self, keys: list[int], salt: str | None) -> tuple[Match, Prefix]:
        found = self.cache.match(array(keys), salt)
        self.cache.lock(found.node)
        prefix = (salt, *keys[: len(found.pages) * self.cache.page_size])
        self.locks.append(prefix)
        return found, prefix

    @rule(locked=consumes(matches))
    def unlock(self, locked: tuple[Match, Prefix]) -> None:
        found, prefix = locked
        self.locks.remove(prefix)
        self.cache.unlock(found.node)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        free = [p for p in self.model if not any(lock[: len(p)] == p for lock in self.locks)]
        freed = self.cache.evict(count)
        gone = {prefix for prefix, page in self.model.items() if page in freed}
        assert len(gone) == len(freed) == len(set(freed))
        assert len(freed) == min(count, len(free))
        assert gone <= set(free), "a locked page was evicted"
        self.model = {prefix: page for prefix, page in self.model.items() if prefix not in gone}
        size = self.cache.page_size
        assert all(p[:-size] in self.model for p in self.model if len(p) > size + 1), "a page lacks its prefix"

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert sorted(self.cache.pages()) == sorted(self.model.values())
        assert self.cache.cached_pages == len(self.model)
        locked = {p for p in self.model if any(lock[: len(p)] == p for lock in self.locks)}
        assert self.cache.evictable_pages == len(self.model) - len(locked)
        for lock in self.locks:
            users = [sum(other[: len(p)] == p for other in self.locks) for p in self.model if lock[: len(p)] == p]
            assert self.cache.sole_pages(self.cache.match(array([*lock[1:]]), lock[0]).node) == users.count(1)


TestRadixAgainstModel = RadixAgainstModel.TestCase
TestRadixAgainstModel.settings = settings(max_examples=150, stateful_step_count=30)


def test_keys_are_bigrams_so_that_a_draft_slot_is_keyed_by_the_token_it_is_paired_with() -> None:
    """Two prompts with m common tokens share m - 1 slots. The last token of a prompt is never cached."""
    cache = RadixCache(1)
    cache.insert(bigrams([5, 6, 7, 8]), [1, 2, 3])
    assert cache.match(bigrams([5, 6, 7, 8])).pages == [1, 2, 3]
    assert cache.match(bigrams([5, 6, 7, 9])).pages == [1, 2]
    assert cache.match(bigrams([5, 6, 7])).pages == [1, 2]
    assert cache.match(bigrams([5])).pages == []
    assert cache.match(bigrams([6, 7, 8])).pages == []


def test_bigrams_of_large_ids_are_distinct() -> None:
    tokens = [0, 1, 2**20, 2**31 - 1]
    pairs = [(a, b) for a in tokens for b in tokens]
    assert len({int(bigrams(pair)[0]) for pair in pairs}) == len(pairs)


def test_the_least_recently_used_leaf_goes_first_and_from_its_tail() -> None:
    cache = RadixCache(1)
    for name, keys in enumerate([[1, 1], [1, 2], [3, 4, 5]]):
        cache.insert(array(keys), [10 * name + i for i in range(len(keys))])
    cache.match(array([1, 1]))  # so [1, 2] and [3, 4, 5] are older
    assert cache.evict(1) == [11]
    assert cache.evict(2) == [21, 22]
    assert cache.match(array([3, 4, 5])).pages == [20]
    assert cache.evict(2) == [1, 0]
    assert cache.evict(9) == [20]


def test_eviction_looks_at_what_it_evicts_and_at_what_was_used_again_not_at_the_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = RadixCache(1)
    for first in range(2000):
        cache.insert(array([first, 1, 2]), [3 * first, 3 * first + 1, 3 * first + 2])
    for first in range(10):
        cache.match(array([first, 1, 2]))
    looked, pop = [], heapq.heappop
    monkeypatch.setattr(heapq, "heappop", lambda heap: looked.append(1) or pop(heap))
    monkeypatch.setattr(cache, "_nodes", lambda: pytest.fail("a walk over the tree"))
    freed = [page for _ in range(50) for page in cache.evict(1)]
    assert freed[:4] == [32, 31, 30, 35]
    assert len(freed) == 50
    assert len(looked) == 60, "one for each page, and one for each leaf that was used again"


def test_a_partial_page_is_not_matched() -> None:
    cache = RadixCache(16)
    cache.insert(array(range(48)), [1, 2, 3])
    assert cache.match(array(range(47))).pages == [1, 2]
    assert cache.match(array([*range(40), 0, 0, 0, 0, 0, 0, 0, 0])).pages == [1, 2]
