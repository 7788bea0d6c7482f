"""Every page is free, cached, or in exactly one allocation, after any sequence of allocate, grow and release."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.manager import KVAllocation, KVCacheManager
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.radix import RadixCache, bigrams

ROWS, WIDTH = 4, 64


def manager(pages: int, page_size: int = 1, *, radix: bool = True) -> KVCacheManager:
    table = PageTable(ROWS, WIDTH, page_size)
    return KVCacheManager(PageAllocator(pages, page_size), table, RadixCache(page_size) if radix else None)


def allocate(kv: KVCacheManager, tokens: list[int], positions: int) -> KVAllocation:
    allocation = kv.allocate(kv.match(bigrams(tokens)), positions)
    assert allocation is not None
    return allocation


class AllocationsUnderRandomUse(RuleBasedStateMachine):
    """Only two tokens, so that prompts share prefixes. The model records the text that every slot was written for."""

    held = Bundle("held")

    @initialize(page_size=st.sampled_from([1, 3]), radix=st.booleans(), pages=st.integers(4, 30))
    def start(self, page_size: int, pages: int, *, radix: bool) -> None:
        self.start_with(manager(pages, page_size, radix=radix))

    def start_with(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.kv._on_free = self.forget
        # slot -> the salt and its text, including the token it is paired with
        self.content: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.count = 0

    def forget(self, pages: list[int]) -> None:
        for page in pages:
            for slot in range(page * self.kv.page_size, (page + 1) * self.kv.page_size):
                self.content.pop(slot, None)

    @rule(
        target=held,
        tokens=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        extra=st.integers(0, 6),
        reserve=st.sampled_from([0, 0, 0, 3]),
        salt=st.sampled_from([None, None, "a"]),
    )
    def allocate(self, tokens: list[int], extra: int, reserve: int, salt: str | None) -> object:
        free, rows = self.kv.available_pages, self.kv.table.free_rows
        match = self.kv.match(bigrams(tokens), salt)
        allocation = self.kv.allocate(match, len(tokens) + extra, reserve, salt)
        if allocation is None:
            assert rows == 0 or self.kv.pages_for(len(tokens) + extra) + reserve > free
            assert (free, rows) == (self.kv.available_pages, self.kv.table.free_rows)
            return None
        assert self.kv.available_pages >= reserve
        shared = allocation.shared * self.kv.page_size
        assert shared < len(tokens)
        slots = self.kv.table.slots[allocation.req_pool_index]
        assert all(self.content[slots[p]] == (salt, tuple(tokens[: p + 2])) for p in range(shared)), "a wrong hit"
        for p in range(shared, len(tokens) - 1):
            self.content[int(slots[p])] = (salt, tuple(tokens[: p + 2]))
        return allocation, list(tokens)

    @rule(entry=held, positions=st.integers(1, 40), spare=st.sampled_from([0, 1, 6]))
    def grow(self, entry: tuple[KVAllocation, list[int]] | None, positions: int, spare: int) -> None:
        if entry is None or entry[0] not in self.kv.allocations:
            return
        allocation, before, had = entry[0], entry[0].needed, len(entry[0].pages)
        free, wanted = self.kv.available_pages, self.kv.pages_for(positions)
        grown = self.kv.grow(allocation, positions, spare)
        assert grown == (wanted - before <= free)
        assert allocation.needed == (max(before, wanted) if grown else before)
        assert self.kv.available_pages == free - (allocation.needed - before), "spare pages are available"
        assert had <= len(allocation.pages) <= max(had, wanted, self.kv.pages_for(positions + spare))
        assert grown or wanted > had

    @rule(entry=held, positions=st.integers(1, 40))
    def use(self, entry: tuple[KVAllocation, list[int]] | None, positions: int) -> None:
        """It does what `grow` does, if the spare pages suffice."""
        if entry is None or entry[0] not in self.kv.allocations:
            return
        allocation, before, pages = entry[0], entry[0].needed, list(entry[0].pages)
        free, wanted = self.kv.available_pages, self.kv.pages_for(positions)
        used = self.kv.use(allocation, positions)
        assert used == (wanted <= len(pages))
        assert allocation.needed == (max(before, wanted) if used else before)
        assert allocation.pages == pages
        assert self.kv.available_pages == free - (allocation.needed - before)

    @rule(entry=held, written=st.integers(0, 11), proven=st.booleans())
    def publish(self, entry: tuple[KVAllocation, list[int]] | None, written: int, *, proven: bool) -> None:
        """What the request has written becomes shared. Its row shows pages with the same content."""
        if entry is None or entry[0] not in self.kv.allocations or self.kv.radix is None:
            return
        allocation, tokens = entry
        before = allocation.shared
        self.kv.publish(allocation, tokens, min(written, len(tokens) - 1), proven=proven)
        assert allocation.shared == max(before, min(written, len(tokens) - 1) // self.kv.page_size)
        slots = self.kv.table.slots[allocation.req_pool_index]
        assert all(self.content[slots[p]] == (allocation.salt, tuple(tokens[: p + 2])) for p in range(len(tokens) - 1))

    @rule(entry=consumes(held), written=st.integers(0, 11), suspect=st.booleans())
    def release(self, entry: tuple[KVAllocation, list[int]] | None, written: int, *, suspect: bool) -> None:
        if entry is None:
            return
        allocation, tokens = entry
        written = min(max(written, allocation.shared * self.kv.page_size), len(tokens) - 1)
        self.kv.release(allocation, tokens, written, suspect=suspect)

    @rule()
    def clear(self) -> None:
        self.kv.clear()
        if not self.kv.allocations:
            assert self.kv.allocator.free_pages == self.kv.allocator.num_pages

    @invariant()
    def nothing_is_lost(self) -> None:
        self.kv.check()
        assert self.kv.table.free_rows == ROWS - len(self.kv.allocations)
        for allocation in self.kv.allocations:
            expected = [page * self.kv.page_size + i for page in allocation.pages for i in range(self.kv.page_size)]
            assert self.kv.table.slots[allocation.req_pool_index, : len(expected)].tolist() == expected


TestAllocationsUnderRandomUse = AllocationsUnderRandomUse.TestCase
TestAllocationsUnderRandomUse.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_prompt_shares_what_another_wrote_but_never_its_last_token() -> None:
    kv = manager(40)
    kv.release(allocate(kv, [1, 2, 3, 4], 8), [1, 2, 3, 4, 5], written=4)
    assert allocate(kv, [1, 2, 3, 4, 5, 6], 10).shared == 4
    assert allocate(kv, [1, 2, 3, 4, 5], 10).shared == 4
    assert allocate(kv, [1, 2, 3, 4], 10).shared == 3
    assert allocate(kv, [1, 9], 3).shared == 0


def test_only_written_slots_go_to_the_cache() -> None:
    kv = manager(20)
    kv.release(allocate(kv, [1, 2, 3, 4], 8), [1, 2, 3, 4], written=2)
    assert kv.radix is not None
    assert kv.radix.cached_pages == 2
    assert kv.allocator.free_pages == 18


def test_a_request_that_does_not_share_still_caches_its_pages_for_others() -> None:
    kv = manager(20)
    kv.release(allocate(kv, [1, 2, 3], 3), [1, 2, 3], written=2)
    alone = kv.allocate(None, 3)
    assert alone is not None
    assert alone.shared == 0
    kv.release(alone, [1, 2, 3], written=2)
    kv.check()
    assert allocate(kv, [1, 2, 3], 3).shared == 2


@pytest.mark.parametrize("shares", [True, False])
def test_what_a_request_with_a_salt_computes_is_cached_under_its_salt(shares: bool) -> None:
    kv = manager(20)
    match = kv.match(bigrams([1, 2, 3]), "a") if shares else None
    kv.release(kv.allocate(match, 3, salt="a"), [1, 2, 3], written=2)
    found = {salt: len(kv.match(bigrams([1, 2, 3]), salt).pages) for salt in (None, "a", "b")}
    assert found == {None: 0, "a": 2, "b": 0}


def test_cached_pages_in_use_are_not_evicted_for_another_request() -> None:
    kv = manager(10)
    kv.release(allocate(kv, [1] * 6, 6), [1] * 6, written=5)
    reader = allocate(kv, [1] * 6, 6)
    assert reader.shared == 5
    assert kv.available_pages == 4
    assert kv.allocate(kv.match(bigrams([2] * 5)), 5) is None
    kv.release(reader, [1] * 6, written=5)
    assert kv.allocate(kv.match(bigrams([2] * 10)), 10) is not None
    kv.check()


def test_freed_pages_are_reported_once() -> None:
    freed: list[int] = []
    kv = KVCacheManager(PageAllocator(8, 1), PageTable(2, 16, 1), RadixCache(1), freed.extend)
    kv.release(allocate(kv, [1, 2, 3], 5), [1, 2, 3], written=2)
    assert len(freed) == 3
    kv.clear()
    assert sorted(freed) == [1, 2, 3, 4, 5]


def test_running_requests_share_what_one_of_them_has_published() -> None:
    kv = manager(40, 4)
    first = allocate(kv, [1] * 14, 20)
    assert allocate(kv, [1] * 14, 20).shared == 0
    kv.publish(first, [1] * 14, written=9)
    second = allocate(kv, [1] * 14, 20)
    assert (first.shared, second.shared) == (2, 2)
    assert second.pages[:2] == first.pages[:2]
    kv.release(first, [1] * 14, written=9)
    assert kv.radix is not None
    assert kv.radix.evictable_pages == 0, "the second request still reads them"
    kv.check()


def test_a_page_that_two_requests_computed_is_kept_once_and_both_rows_show_it() -> None:
    freed: list[int] = []
    kv = KVCacheManager(PageAllocator(20, 2), PageTable(2, 16, 2), RadixCache(2), freed.extend)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    first, second = allocate(kv, tokens, 8), allocate(kv, tokens, 8)
    own = list(second.pages)
    kv.publish(first, tokens, written=4)
    kv.publish(second, tokens, written=6)
    assert second.pages == [*first.pages[:2], *own[2:]]
    assert freed == own[:2]
    slots = kv.table.slots[second.req_pool_index, :8].tolist()
    assert slots == [2 * page + i for page in second.pages for i in range(2)]
    kv.check()


def test_what_a_failed_request_published_leaves_the_cache_unless_it_was_proven() -> None:
    kv = manager(40)
    first = allocate(kv, [1, 2, 3, 4, 5, 6], 8)
    kv.publish(first, [1, 2, 3, 4, 5, 6], written=2, proven=True)
    kv.publish(first, [1, 2, 3, 4, 5, 6], written=5)
    second = allocate(kv, [1, 2, 3, 4, 5, 9], 8)
    assert second.shared == 4
    kv.release(first, [1, 2, 3, 4, 5, 6], written=5, suspect=True)
    assert kv.radix is not None
    assert kv.radix.cached_pages == 4, "the second request still reads two that are not proven"
    kv.release(second, [1, 2, 3, 4, 5, 9], written=4, suspect=True)
    assert kv.radix.cached_pages == 2
    kv.check()


def test_the_check_by_counters_sees_a_lost_page_a_lock_and_a_row() -> None:
    for loss in ("page", "lock", "row"):
        kv = manager(10)
        kv.release(allocate(kv, [1, 2, 3], 5), [1, 2, 3], written=2)
        kv.check_counts()
        assert kv.radix is not None
        if loss == "page":
            kv.allocator.allocate(1)
        elif loss == "lock":
            kv.radix.lock(kv.radix.match(bigrams([1, 2, 3])).node)
        else:
            kv.table.take_row()
        with pytest.raises(AssertionError):
            kv.check_counts()


def test_the_check_by_counters_walks_nothing() -> None:
    kv = manager(10)
    allocate(kv, [1, 2, 3], 5)
    assert kv.radix is not None
    kv.radix._nodes = lambda: pytest.fail("a walk over the tree")  # type: ignore[method-assign]
    kv.allocator.check = lambda used: pytest.fail("a walk over the pages")  # type: ignore[method-assign]
    kv.check_counts()
