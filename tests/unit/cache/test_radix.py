"""The prefix cache against a brute-force model: a dictionary from prefixes of whole pages to page ids."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from eagle_server.cache.radix import Match, RadixCache, bigrams

Prefix = tuple[int, ...]
KEYS = st.lists(st.integers(0, 1), max_size=14)


def array(keys: list[int] | Prefix) -> np.ndarray:
    return np.asarray(keys, dtype=np.int64)


class RadixAgainstModel(RuleBasedStateMachine):
    """Only two keys, so that prefixes are shared, split and inserted again."""

    matches = Bundle("matches")

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.model: dict[Prefix, int] = {}
        self.locks: list[Prefix] = []
        self.fresh = itertools.count(1)

    def prefixes(self, keys: list[int]) -> list[Prefix]:
        size = self.cache.page_size
        return [tuple(keys[: n * size]) for n in range(1, len(keys) // size + 1)]

    @rule(keys=KEYS)
    def insert(self, keys: list[int]) -> None:
        """A request has fresh pages for all keys. The cache refuses those whose prefix it already holds."""
        prefixes = self.prefixes(keys)
        mine = [next(self.fresh) for _ in prefixes]
        rejected = self.cache.insert(array(keys[: len(mine) * self.cache.page_size]), mine)
        assert rejected == [page for page, prefix in zip(mine, prefixes, strict=True) if prefix in self.model]
        for page, prefix in zip(mine, prefixes, strict=True):
            self.model.setdefault(prefix, page)

    @rule(keys=KEYS)
    def insert_what_was_shared(self, keys: list[int]) -> None:
        """Inserting pages that are already in the tree returns none as duplicates."""
        pages = [self.model[prefix] for prefix in self.prefixes(keys) if prefix in self.model]
        size = self.cache.page_size
        assert self.cache.insert(array(keys[: len(pages) * size]), pages) == []

    @rule(keys=KEYS)
    def match(self, keys: list[int]) -> None:
        found = self.cache.match(array(keys))
        assert found.pages == [self.model[prefix] for prefix in self.prefixes(keys) if prefix in self.model]

    @rule(target=matches, keys=KEYS)
    def lock(self, keys: list[int]) -> tuple[Match, Prefix]:
        found = self.cache.match(array(keys))
        self.cache.lock(found.node)
        prefix = tuple(keys[: len(found.pages) * self.cache.page_size])
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
        assert all(p[:-size] in self.model for p in self.model if len(p) > size), "a page without its prefix was left"

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert sorted(self.cache.pages()) == sorted(self.model.values())
        assert self.cache.cached_pages == len(self.model)
        locked = {p for p in self.model if any(lock[: len(p)] == p for lock in self.locks)}
        assert self.cache.evictable_pages == len(self.model) - len(locked)


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


def test_a_partial_page_is_not_matched() -> None:
    cache = RadixCache(16)
    cache.insert(array(range(48)), [1, 2, 3])
    assert cache.match(array(range(47))).pages == [1, 2]
    assert cache.match(array([*range(40), 0, 0, 0, 0, 0, 0, 0, 0])).pages == [1, 2]
