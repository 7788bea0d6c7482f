"""req_to_token: for every running request the slot of each of its token positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PageTable:
    """`slots` int32 [rows, width], slot ids; on a CPU the worker's tensor is a view of this very memory."""

    def __init__(self, rows: int, width: int, page_size: int) -> None:
        self.page_size = page_size
        self.width = -(-width // page_size) * page_size
        self.slots = np.zeros((rows, self.width), dtype=np.int32)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self) -> int:
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        self.slots[row] = 0
        self._free_rows.append(row)

    def assign(self, row: int, first_page: int, pages: Sequence[int]) -> None:
        """Map the request's pages first_page, first_page + 1, ... to `pages`."""
        size = self.page_size
        slots = (np.asarray(pages, dtype=np.int32)[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
        self.slots[row, first_page * size : first_page * size + len(slots)] = slots
