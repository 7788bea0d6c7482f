"""Allocation of KV pages. Invariant: every page is either free or used by exactly one owner."""

from __future__ import annotations

from collections.abc import Iterable

PADDING_PAGE = 0  # never allocated: padded rows and columns read and write here


class OutOfPages(Exception):
    """Fewer pages are free than were requested."""


class PageAllocator:
    """Allocates pages 1..num_pages. A page is `page_size` consecutive slots in every KV pool."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages, 0, -1))
        self._is_free = bytearray(b"\1" * (num_pages + 1))
        self._is_free[PADDING_PAGE] = False

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages.

        Raises:
            OutOfPages: too few pages are free. Nothing was allocated.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Free pages.

        Raises:
            ValueError: a page is already free or does not exist, which is a bug of the caller.
        """
        for page in pages:
            if not 0 < page <= self.num_pages or self._is_free[page]:
                raise ValueError(f"page {page} is not in use")
            self._is_free[page] = True
            self._free.append(page)

    def check(self, used: Iterable[int]) -> None:
        """Assert that the free pages and `used`, the pages of all owners, make up all pages, each once."""
        everything = sorted([*used, *self._free])
        if everything != list(range(1, self.num_pages + 1)):
            raise AssertionError(
                f"page leak: {len(self._free)} free and {len(everything) - len(self._free)} used of {self.num_pages}"
            )
