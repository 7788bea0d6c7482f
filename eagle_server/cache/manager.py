"""The KV cache manager: allocates pages to requests, and shares cached prefixes between them.

It owns the page allocator, the page table and the radix tree. Pages change their owner only here.
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
    """The pages of one request, in position order.

    req_pool_index: the request's row of req_to_token.
    shared: the number of leading pages that belong to the prefix cache.
    node: the locked end of the cached prefix; None if the prefix cache was not used.
    """

    req_pool_index: int
    pages: list[int]
    shared: int
    node: Node | None


EVICTED_AT_ONCE = 32  # pages; each eviction walks the whole tree, so it must not run for single pages


class KVCacheManager:
    """Allocates, grows and releases the KV of requests. Without `radix` nothing is shared or cached.

    `on_free` is called with the pages that become free.
    """

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
        """Free pages, and cached pages that no request uses."""
        return self.allocator.free_pages + (self.radix.evictable_pages if self.radix else 0)

    def pages_for(self, positions: int) -> int:
        """The number of pages that hold `positions` slots."""
        return -(-positions // self.page_size)

    def allocate(self, tokens: Sequence[int], positions: int, *, share: bool) -> KVAllocation | None:
        """Allocate `positions` slots for a request with these tokens; None if rows or pages are lacking now.

        With `share`, whole pages of the longest cached prefix are reused. The last token's slot is never reused.
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
        self.table.assign(allocation.req_pool_index, 0, allocation.pages)
        self.allocations.append(allocation)
        return allocation

    def grow(self, allocation: KVAllocation, positions: int) -> bool:
        """Extend the allocation to `positions` slots. False if pages are lacking; nothing has changed then."""
        missing = self.pages_for(positions) - len(allocation.pages)
        if missing <= 0:
            return True
        if missing > self.available_pages:
            return False
        pages = self._take(missing)
        self.table.assign(allocation.req_pool_index, len(allocation.pages), pages)
        allocation.pages.extend(pages)
        return True

    def release(self, allocation: KVAllocation, tokens: Sequence[int], written: int) -> None:
        """Release an allocation. Its slots 0..written-1 hold the KV of `tokens`, and go to the prefix cache."""
        self.allocations.remove(allocation)
        self.table.release_row(allocation.req_pool_index)
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
        """Evict every cached page that no request uses."""
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
