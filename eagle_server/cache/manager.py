"""The KV cache manager: allocates pages to requests, and shares cached prefixes between them.

It owns the page allocator, the page table and the radix tree. Pages change their owner only here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.block_events import BlockEvent
from eagle_server.cache.node import Keys, Node
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.radix import Match, RadixCache, bigrams
from eagle_server.plan import NO_MOVES, StateMoves, StateSave

SPARE_SHARE = 10  # requests get spare slots while a tenth of the pool is available beside them
LEAST_BETWEEN = 16  # tokens between two checkpoints of a text: each takes the memory of more than a hundred tokens' KV


@dataclass(eq=False)
class KVAllocation:
    """The pages of one request, in position order.

    req_pool_index: the request's row of req_to_token.
    needed: the number of pages that were asked for. The rest are spare: they are given back when others need them.
    shared: the number of leading pages that belong to the prefix cache.
    node: the locked end of these pages in the prefix cache; None if the request does not share.
    salt: it shares with requests of the same salt only.
    checkpoints: rows that were taken for states at some lengths of its text, until the prefix cache has the pages.
    """

    req_pool_index: int
    pages: list[int]
    needed: int
    shared: int
    node: Node | None
    salt: str | None = None
    checkpoints: dict[int, int] = field(default_factory=dict)

    @property
    def spare(self) -> int:
        return len(self.pages) - self.needed


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
        self.allocations: set[KVAllocation] = set()
        self.owned_pages = 0  # pages in allocations that do not belong to the prefix cache
        self.spare_pages = 0  # of these, pages that no request needs yet
        self._on_free = on_free
        self._saves: list[StateSave] = []
        self._restores: list[tuple[int, int]] = []

    @property
    def available_pages(self) -> int:
        """Free pages, spare pages, and cached pages that no request uses."""
        return self._unowned_pages + self.spare_pages

    @property
    def _unowned_pages(self) -> int:
        return self.allocator.free_pages + (self.radix.evictable_pages if self.radix else 0)

    def pages_for(self, positions: int) -> int:
        """The number of pages that hold `positions` slots."""
        return -(-positions // self.page_size)

    def match(self, keys: Keys, salt: str | None = None) -> Match | None:
        """The longest cached prefix of a request that shares; None without a prefix cache."""
        return None if self.radix is None else self.radix.match(keys, salt)

    def allocate(
        self, match: Match | None, positions: int, reserve: int = 0, salt: str | None = None
    ) -> KVAllocation | None:
        """Allocate `positions` slots for a request. With `match`, as found just now, it reads these pages.

        What it computes is cached for requests with the same `salt`, which is that of the match.
        None if rows or pages are lacking now. `reserve` pages must stay available.
        """
        node, pages = (None, list[int]()) if match is None else (match.node, match.pages)
        missing = self.pages_for(positions) - len(pages)
        if not self.table.free_rows or missing + reserve > self.available_pages:
            return None
        if self.radix is not None and node is not None:
            self.radix.lock(node)
            if missing + reserve > self.available_pages:  # the matched pages cannot be evicted now
                self.radix.unlock(node)
                return None
        pages = pages + self._take(missing)
        allocation = KVAllocation(self.table.take_row(), pages, len(pages), len(pages) - missing, node, salt)
        self.table.assign(allocation.req_pool_index, 0, allocation.pages)
        self.allocations.add(allocation)
        if node is not None and node.checkpoint is not None and self.radix is not None and self.radix.checkpoints:
            self.radix.checkpoints.use(node)
            self._restores.append((node.checkpoint, allocation.req_pool_index))
        return allocation

    def use(self, allocation: KVAllocation, positions: int) -> bool:
        """Extend the allocation to `positions` slots if its spare pages suffice: then the page table does not change.

        False if they do not; nothing has changed then.
        """
        needed = -(-positions // self.page_size)
        if needed > len(allocation.pages):
            return False
        if needed > allocation.needed:
            self.spare_pages -= needed - allocation.needed
            allocation.needed = needed
        return True

    def grow(self, allocation: KVAllocation, positions: int, spare: int = 0) -> bool:
        """Extend the allocation to `positions` slots. False if pages are lacking; nothing has changed then.

        It gets up to `spare` slots more, so that the page table changes less often. They count as available.
        """
        grown = max(0, self.pages_for(positions) - allocation.needed)
        if grown > self.available_pages:
            return False
        self.spare_pages -= allocation.spare
        allocation.needed += grown
        missing = max(0, allocation.needed - len(allocation.pages))
        room = self._unowned_pages - missing - self.allocator.num_pages // SPARE_SHARE
        more = self.pages_for(positions + spare) - max(allocation.needed, len(allocation.pages))
        pages = self._take(missing + max(0, min(more, room)))
        if pages:
            self.table.assign(allocation.req_pool_index, len(allocation.pages), pages)
            allocation.pages.extend(pages)
        self.spare_pages += allocation.spare
        return True

    def publish(self, allocation: KVAllocation, tokens: Sequence[int], written: int, *, proven: bool = False) -> None:
        """Give the whole pages of slots 0..written-1 to the prefix cache. The request goes on and reads them there.

        They must not be written again. `proven`: the target's logits after them were finite.
        """
        if self.radix is None or allocation.node is None:
            return
        first, row = allocation.shared, allocation.req_pool_index
        above, doubles = allocation.node, self._insert(allocation, tokens, written)
        self.radix.lock(allocation.node, above)
        if doubles:
            self.table.assign(row, first, allocation.pages[first : first + len(doubles)])
            self._free(doubles)
        if proven:
            self.radix.prove(allocation.node)

    def release(
        self,
        allocation: KVAllocation,
        tokens: Sequence[int],
        written: int,
        *,
        suspect: bool = False,
        state_from: int | None = None,
    ) -> None:
        """Release an allocation. Its slots 0..written-1 hold the KV of `tokens`, and go to the prefix cache.

        `suspect`: they do not, and leave it if they were not proven. `state_from`: the shortest length whose state can
        still be saved. None: there is none.
        """
        self.allocations.remove(allocation)
        self.table.release_row(allocation.req_pool_index)
        if written < allocation.shared * self.page_size:
            raise ValueError(f"{written} written slots are fewer than {allocation.shared} shared pages")
        locked, unwanted = allocation.node, list[int]()
        if self.radix is not None and not suspect:
            unwanted = self._insert(allocation, tokens, written)
            self._save_at_end(allocation, state_from)
        for length in list(allocation.checkpoints):
            self.give_up_state(allocation, length)
        private = allocation.pages[allocation.shared :]
        self.owned_pages -= len(private)
        self.spare_pages -= allocation.spare
        if self.radix is not None and locked is not None:
            self.radix.unlock(locked)
            if suspect:
                unwanted = self.radix.discard(locked)
        self._free(unwanted + private)

    def save_state(self, allocation: KVAllocation, length: int) -> StateSave | None:
        """Take a checkpoint for the state at this length, whole pages, which is about to be computed.

        The prefix cache holds it once it has the pages. None: there are no checkpoints, or all are taken.
        """
        if self.radix is None or self.radix.checkpoints is None or length in allocation.checkpoints:
            return None
        row = self.radix.take_checkpoint()
        if row is None:
            return None
        allocation.checkpoints[length] = row
        return StateSave(allocation.req_pool_index, length, row)

    @property
    def checkpoints_are_short(self) -> bool:
        """Whether half of the checkpoints are taken by running requests, so that the prefix cache has few."""
        checkpoints = None if self.radix is None else self.radix.checkpoints
        return checkpoints is None or 2 * checkpoints.taken >= len(checkpoints.rows)

    def save_state_now(self, allocation: KVAllocation, length: int) -> None:
        """`save_state` of a length at which the state is, or that it has just passed. The next cycle saves it."""
        save = self.save_state(allocation, length)
        if save is not None:
            self._saves.append(save)

    def give_up_state(self, allocation: KVAllocation, length: int) -> None:
        """The checkpoint that was taken for this length is not needed."""
        assert self.radix is not None
        assert self.radix.checkpoints is not None
        self.radix.checkpoints.give_back(allocation.checkpoints.pop(length))

    def take_moves(self) -> StateMoves:
        """The states to save and to restore before the next forwards."""
        if not self._saves and not self._restores:
            return NO_MOVES
        moves = StateMoves(tuple(self._saves), tuple(self._restores))
        self._saves.clear()
        self._restores.clear()
        return moves

    def sole_pages(self, allocation: KVAllocation) -> int:
        """How many pages become available when this request ends: those that no other request uses."""
        cached = 0 if self.radix is None or allocation.node is None else self.radix.sole_pages(allocation.node)
        return allocation.needed - allocation.shared + cached

    def clear(self) -> None:
        """Evict every cached page that no request uses."""
        if self.radix is not None:
            self._free(self.radix.clear())

    def take_events(self) -> list[BlockEvent]:
        """What entered and left the prefix cache since the last call; nothing unless it records that."""
        return self.radix.events.take() if self.radix is not None and self.radix.events is not None else []

    def check_counts(self) -> None:
        """Assert by counters that no page is lost, and that no lock or row outlives its request. Constant time."""
        cached, evictable = (self.radix.cached_pages, self.radix.evictable_pages) if self.radix else (0, 0)
        free, total = self.allocator.free_pages, self.allocator.num_pages
        if free + cached + self.owned_pages != total:
            raise AssertionError(f"page leak: {free} free, {cached} cached, {self.owned_pages} in use of {total}")
        if not 0 <= self.spare_pages <= self.owned_pages:
            raise AssertionError(f"{self.spare_pages} of {self.owned_pages} pages in use are spare")
        if not self.allocations and (self.owned_pages or evictable < cached or self.table.free_rows < self.table.rows):
            raise AssertionError(f"no request is left, but {self.owned_pages} pages or a lock or a row")
        checkpoints = None if self.radix is None else self.radix.checkpoints
        taken = sum(len(allocation.checkpoints) for allocation in self.allocations)
        if checkpoints is not None and checkpoints.taken != taken:
            raise AssertionError(f"{checkpoints.taken} checkpoints are taken, and requests have {taken}")

    def check(self) -> None:
        """Assert that every page is free, cached, or in exactly one allocation. Walks all pages: for tests."""
        self.check_counts()
        used = [page for allocation in self.allocations for page in allocation.pages[allocation.shared :]]
        assert len(used) == self.owned_pages
        assert all(allocation.spare >= 0 for allocation in self.allocations)
        assert self.spare_pages == sum(allocation.spare for allocation in self.allocations)
        if self.radix is not None:
            self.radix.check()
            used.extend(self.radix.pages())
        self.allocator.check(used)

    def _insert(self, allocation: KVAllocation, tokens: Sequence[int], written: int) -> list[int]:
        """Move whole pages of slots 0..written-1 to the prefix cache. Returns doubles: own pages of a cached prefix.

        The allocation has the cached pages in their places.
        """
        assert self.radix is not None
        first, size = allocation.shared, self.page_size
        keys = bigrams(tokens[first * size : written + 1])
        count = len(keys) // size
        end = self.radix.insert(keys, allocation.pages[first : first + count], allocation.node, allocation.salt)
        doubles = allocation.pages[first : first + len(end.pages)]
        allocation.pages[first : first + len(end.pages)] = end.pages
        allocation.node, allocation.shared = end.node, first + count
        self.owned_pages -= count
        for length in [length for length in allocation.checkpoints if length <= allocation.shared * size]:
            self.radix.hold_checkpoint(end.node, length, allocation.checkpoints.pop(length), allocation.salt)
        return doubles

    def _save_at_end(self, allocation: KVAllocation, state_from: int | None) -> None:
        """Save the state at the end of the cached text, unless that is about where the last checkpoint is."""
        end, node = allocation.shared * self.page_size, allocation.node
        if self.radix is None or self.radix.checkpoints is None or node is None or state_from is None:
            return
        if end >= state_from and end - self.radix.checkpointed(node) >= LEAST_BETWEEN:
            row = self.radix.take_checkpoint()
            if row is not None:
                self._saves.append(StateSave(allocation.req_pool_index, end, row))
                self.radix.hold_checkpoint(node, end, row, allocation.salt)

    def _take(self, count: int) -> list[int]:
        """Pages for an allocation; `available_pages` must be enough. Spare pages are taken back last."""
        if count > self._unowned_pages:
            self._take_back()
        if count > self.allocator.free_pages and self.radix is not None:
            self._free(self.radix.evict(count - self.allocator.free_pages))
        self.owned_pages += count
        return self.allocator.allocate(count)

    def _take_back(self) -> None:
        """Free all spare pages. Requests do not read their slots, so the page table may keep them."""
        spare = list[int]()
        for allocation in self.allocations:
            spare += allocation.pages[allocation.needed :]
            del allocation.pages[allocation.needed :]
        self.owned_pages -= len(spare)
        self.spare_pages = 0
        self._free(sorted(spare))

    def _free(self, pages: list[int]) -> None:
        self.allocator.free(pages)
        if self._on_free is not None and pages:
            self._on_free(pages)
