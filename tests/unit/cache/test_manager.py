"""Leases: every page is free, cached, or in exactly one allocation, through any admission, growth and end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.manager import KVAllocation, KVCacheManager
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.radix import RadixCache

ROWS, WIDTH = 4, 64


def allocations(pages: int, page_size: int = 1, *, radix: bool = True) -> KVCacheManager:
    table = PageTable(ROWS, WIDTH, page_size)
    return KVCacheManager(PageAllocator(pages, page_size), table, RadixCache(page_size) if radix else None)


def admit(kv: KVCacheManager, tokens: list[int], positions: int) -> KVAllocation:
    allocation = kv.admit(tokens, positions, share=True)
    assert allocation is not None
    return allocation


class LeasesUnderRandomUse(RuleBasedStateMachine):
    """Tokens of two kinds, so that prompts share; every slot carries who wrote which token where, which must hold."""

    held = Bundle("held")

    @initialize(page_size=st.sampled_from([1, 3]), radix=st.booleans(), pages=st.integers(4, 30))
    def start(self, page_size: int, pages: int, *, radix: bool) -> None:
        self.kv = allocations(pages, page_size, radix=radix)
        self.kv._on_free = self.forget
        self.content: dict[int, tuple[int, ...]] = {}  # slot -> the text up to and with the token it is paired with
        self.count = 0

    def forget(self, pages: list[int]) -> None:
        for page in pages:
            for slot in range(page * self.kv.page_size, (page + 1) * self.kv.page_size):
                self.content.pop(slot, None)

    @rule(target=held, tokens=st.lists(st.integers(1, 2), min_size=1, max_size=12), extra=st.integers(0, 6))
    def admit(self, tokens: list[int], extra: int) -> object:
        free, rows = self.kv.available_pages, self.kv.table.free_rows
        allocation = self.kv.admit(tokens, len(tokens) + extra, share=True)
        if allocation is None:
            assert rows == 0 or self.kv.pages_for(len(tokens) + extra) > free
            assert (free, rows) == (self.kv.available_pages, self.kv.table.free_rows)
            return None
        shared = allocation.shared * self.kv.page_size
        assert shared < len(tokens)
        slots = self.kv.table.slots[allocation.row]
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
    def end(self, entry: tuple[KVAllocation, list[int]] | None, written: int) -> None:
        if entry is None:
            return
        allocation, tokens = entry
        self.kv.end(allocation, tokens, min(max(written, allocation.shared * self.kv.page_size), len(tokens) - 1))

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
            assert self.kv.table.slots[allocation.row, : len(expected)].tolist() == expected


TestLeasesUnderRandomUse = LeasesUnderRandomUse.TestCase
TestLeasesUnderRandomUse.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_prompt_shares_what_another_wrote_but_never_its_last_token() -> None:
    kv = allocations(40)
    kv.end(admit(kv, [1, 2, 3, 4], 8), [1, 2, 3, 4, 5], written=4)
    assert admit(kv, [1, 2, 3, 4, 5, 6], 10).shared == 4
    assert admit(kv, [1, 2, 3, 4, 5], 10).shared == 4
    assert admit(kv, [1, 2, 3, 4], 10).shared == 3
    assert admit(kv, [1, 9], 3).shared == 0


def test_only_written_slots_go_to_the_cache() -> None:
    kv = allocations(20)
    kv.end(admit(kv, [1, 2, 3, 4], 8), [1, 2, 3, 4], written=2)
    assert kv.radix is not None
    assert kv.radix.cached_pages == 2
    assert kv.allocator.free_pages == 18


def test_a_request_that_does_not_share_still_leaves_its_pages_to_others() -> None:
    kv = allocations(20)
    kv.end(admit(kv, [1, 2, 3], 3), [1, 2, 3], written=2)
    alone = kv.admit([1, 2, 3], 3, share=False)
    assert alone is not None
    assert alone.shared == 0
    kv.end(alone, [1, 2, 3], written=2)
    kv.check()
    assert admit(kv, [1, 2, 3], 3).shared == 2


def test_cached_pages_in_use_are_not_evicted_to_admit_another() -> None:
    kv = allocations(10)
    kv.end(admit(kv, [1] * 6, 6), [1] * 6, written=5)
    reader = admit(kv, [1] * 6, 6)
    assert reader.shared == 5
    assert kv.available_pages == 4
    assert kv.admit([2] * 5, 5, share=True) is None
    kv.end(reader, [1] * 6, written=5)
    assert kv.admit([2] * 10, 10, share=True) is not None
    kv.check()


def test_freed_pages_are_reported_once() -> None:
    freed: list[int] = []
    kv = KVCacheManager(PageAllocator(8, 1), PageTable(2, 16, 1), RadixCache(1), freed.extend)
    kv.end(admit(kv, [1, 2, 3], 5), [1, 2, 3], written=2)
    assert len(freed) == 3
    kv.clear()
    assert sorted(freed) == [1, 2, 3, 4, 5]
