"""KV allocations: a request's hold on pages, some shared through the prefix cache, some its own.

The one owner of allocator, page table and radix tree, and so the one place where pages change hands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.radix import Node, RadixCache, bigrams


@dataclass(eq=False)
class KVAllocation:
    """Pages of one request in position order; the first `shared` belong to the prefix cache, root to `node`."""

    row: int
    pages: list[int]
    shared: int
    node: Node | None


EVICTED_AT_ONCE = 32  # finding what to evict walks the tree, so it is not done for every page


class KVCacheManager:
    """Admits, grows and ends allocations. With `radix` None nothing is shared or kept."""

    def __init__(
        self,
        allocator: PageAllocator,
        table: PageTable,
        radix: RadixCache | None,
        on_free: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.allocator, self.table, self.radix = allocator, table, radix
        self.page_size = allocator.page_size
        self.allocations: list[KVAllocation] = []
        self._on_free = on_free

    @property
    def available_pages(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody uses."""
        return self.allocator.free_pages + (self.radix.evictable_pages if self.radix else 0)

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def admit(self, tokens: Sequence[int], positions: int, *, share: bool) -> KVAllocation | None:
        """A allocation of `positions` slots for a request with these tokens; None if there is no room for it now.

        Whole pages of the longest cached prefix are shared, never including the last token's slot.
        """
        if not self.table.free_rows:
            return None
        node, pages = None, list[int]()
        if self.radix is not None and share:
            match = self.radix.match(bigrams(tokens))
            node, pages = match.node, match.pages
            self.radix.lock(node)
        missing = self.pages_for(positions) - len(pages)
        if missing > self.available_pages:
            if self.radix is not None and node is not None:
                self.radix.unlock(node)
            return None
        allocation = KVAllocation(self.table.take_row(), pages + self._take(missing), len(pages), node)
        self.table.assign(allocation.row, 0, allocation.pages)
        self.allocations.append(allocation)
        return allocation

    def grow(self, allocation: KVAllocation, positions: int) -> bool:
        """Make the allocation hold `positions` slots; False, with nothing changed, if there is no room."""
        missing = self.pages_for(positions) - len(allocation.pages)
        if missing <= 0:
            return True
        if missing > self.available_pages:
            return False
        pages = self._take(missing)
        self.table.assign(allocation.row, len(allocation.pages), pages)
        allocation.pages.extend(pages)
        return True

    def end(self, allocation: KVAllocation, tokens: Sequence[int], written: int) -> None:
        """End an allocation. Slots 0..written-1, which hold the KV of `tokens` in both pools, go to the cache."""
        self.allocations.remove(allocation)
        self.table.release_row(allocation.row)
        if written < allocation.shared * self.page_size:
            raise ValueError(f"{written} written slots are fewer than {allocation.shared} shared pages")
        mine = allocation.pages[allocation.shared :]
        if self.radix is not None:
            keys = bigrams(tokens[: written + 1]) if written else np.empty(0, dtype=np.int64)
            whole = len(keys) // self.page_size
            duplicates = self.radix.insert(keys, allocation.pages)
            mine = duplicates + allocation.pages[whole:]
            if allocation.node is not None:
                self.radix.unlock(allocation.node)
        self._free(mine)

    def clear(self) -> None:
        """Drop everything cached that nobody uses."""
        if self.radix is not None:
            self._free(self.radix.evict(self.radix.evictable_pages))

    def check(self) -> None:
        """Assert that every page is free, cached, or in exactly one allocation."""
        used = [page for allocation in self.allocations for page in allocation.pages[allocation.shared :]]
        if self.radix is not None:
            self.radix.check()
            used.extend(self.radix.pages())
        self.allocator.check(used)

    def _take(self, count: int) -> list[int]:
        if count > self.allocator.free_pages and self.radix is not None:
            self._free(self.radix.evict(max(count - self.allocator.free_pages, EVICTED_AT_ONCE)))
        return self.allocator.allocate(count)

    def _free(self, pages: list[int]) -> None:
        self.allocator.free(pages)
        if self._on_free is not None and pages:
            self._on_free(pages)
