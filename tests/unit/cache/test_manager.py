"""Every page is free, cached, or in exactly one allocation, after any sequence of allocate, grow and release."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.manager import KVAllocation, KVCacheManager
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.radix import RadixCache

ROWS, WIDTH = 4, 64


def manager(pages: int, page_size: int = 1, *, radix: bool = True) -> KVCacheManager:
    table = PageTable(ROWS, WIDTH, page_size)
    return KVCacheManager(PageAllocator(pages, page_size), table, RadixCache(page_size) if radix else None)


def allocate(kv: KVCacheManager, tokens: list[int], positions: int) -> KVAllocation:
    allocation = kv.allocate(tokens, positions, share=True)
    assert allocation is not None
    return allocation


class AllocationsUnderRandomUse(RuleBasedStateMachine):
    """Only two tokens, so that prompts share prefixes. The model records the text that every slot was written for."""

    held = Bundle("held")

    @initialize(page_size=st.sampled_from([1, 3]), radix=st.booleans(), pages=st.integers(4, 30))
    def start(self, page_size: int, pages: int, *, radix: bool) -> None:
        self.kv = manager(pages, page_size, radix=radix)
        self.kv._on_free = self.forget
        self.content: dict[int, tuple[int, ...]] = {}  # slot -> its text, including the token it is paired with
        self.count = 0

    def forget(self, pages: list[int]) -> None:
        for page in pages:
            for slot in range(page * self.kv.page_size, (page + 1) * self.kv.page_size):
                self.content.pop(slot, None)

    @rule(target=held, tokens=st.lists(st.integers(1, 2), min_size=1, max_size=12), extra=st.integers(0, 6))
    def allocate(self, tokens: list[int], extra: int) -> object:
        free, rows = self.kv.available_pages, self.kv.table.free_rows
        allocation = self.kv.allocate(tokens, len(tokens) + extra, share=True)
        if allocation is None:
            assert rows == 0 or self.kv.pages_for(len(tokens) + extra) > free
            assert (free, rows) == (self.kv.available_pages, self.kv.table.free_rows)
            return None
        shared = allocation.shared * self.kv.page_size
        assert shared < len(tokens)
        slots = self.kv.table.slots[allocation.req_pool_index]
        assert all(self.content[slots[p]] == tuple(tokens[: p + 2]) for p in range(shared)), "a hit on other content"
        for p in range(shared, len(tokens) - 1):
            self.content[int(slots[p])] = tuple(tokens[: p + 2])
        return allocation, list(tokens)

    @rule(entry=held, positions=st.integers(1, 40))
    def grow(self, entry: tuple[KVAllocation, list[int]] | None, positions: int) -> None:
        if entry is None or entry[0] not in self.kv.allocations:
            return
        allocation, before = entry[0], len(entry[0].pages)
        free = self.kv.available_pages
        grown = self.kv.grow(allocation, positions)
        wanted = self.kv.pages_for(positions)
        assert grown == (wanted - before <= free)
        assert len(allocation.pages) == (max(before, wanted) if grown else before)

    @rule(entry=consumes(held), written=st.integers(0, 11))
    def release(self, entry: tuple[KVAllocation, list[int]] | None, written: int) -> None:
        if entry is None:
            return
        allocation, tokens = entry
        self.kv.release(allocation, tokens, min(max(written, allocation.shared * self.kv.page_size), len(tokens) - 1))

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
    alone = kv.allocate([1, 2, 3], 3, share=False)
    assert alone is not None
    assert alone.shared == 0
    kv.release(alone, [1, 2, 3], written=2)
    kv.check()
    assert allocate(kv, [1, 2, 3], 3).shared == 2


def test_cached_pages_in_use_are_not_evicted_for_another_request() -> None:
    kv = manager(10)
    kv.release(allocate(kv, [1] * 6, 6), [1] * 6, written=5)
    reader = allocate(kv, [1] * 6, 6)
    assert reader.shared == 5
    assert kv.available_pages == 4
    assert kv.allocate([2] * 5, 5, share=True) is None
    kv.release(reader, [1] * 6, written=5)
    assert kv.allocate([2] * 10, 10, share=True) is not None
    kv.check()


def test_freed_pages_are_reported_once() -> None:
    freed: list[int] = []
    kv = KVCacheManager(PageAllocator(8, 1), PageTable(2, 16, 1), RadixCache(1), freed.extend)
    kv.release(allocate(kv, [1, 2, 3], 5), [1, 2, 3], written=2)
    assert len(freed) == 3
    kv.clear()
    assert sorted(freed) == [1, 2, 3, 4, 5]
