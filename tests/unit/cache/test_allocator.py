"""Every page is either free or used by one owner."""

from __future__ import annotations

import pytest

from eagle_server.cache.allocator import PADDING_PAGE, OutOfPages, PageAllocator


def test_pages_are_allocated_once_and_never_the_padding_page() -> None:
    allocator = PageAllocator(10, 4)
    pages = allocator.allocate(4) + allocator.allocate(6)
    assert sorted(pages) == list(range(1, 11))
    assert PADDING_PAGE not in pages
    assert allocator.free_pages == 0
    allocator.check(pages)


def test_too_many_pages_change_nothing() -> None:
    allocator = PageAllocator(3, 1)
    used = allocator.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 free"):
        allocator.allocate(2)
    allocator.check(used)
    assert allocator.allocate(0) == []


@pytest.mark.parametrize("page", [PADDING_PAGE, 4, -1, 2])
def test_freeing_what_is_not_used_raises(page: int) -> None:
    allocator = PageAllocator(3, 1)
    allocator.free([each for each in allocator.allocate(3) if each == 2])
    with pytest.raises(ValueError, match=f"page {page} is not in use"):
        allocator.free([page])


@pytest.mark.parametrize("claimed", [[], [1], [1, 2, 2], [1, 2, 3]])
def test_check_sees_lost_and_doubled_pages(claimed: list[int]) -> None:
    allocator = PageAllocator(3, 1)
    assert sorted(allocator.allocate(2)) == [1, 2]
    allocator.check([2, 1])
    with pytest.raises(AssertionError, match="page leak"):
        allocator.check(claimed)
