"""req_to_token: the slot of every token position of every running request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.device import mirrors, upload

_CPU = torch.device("cpu")
Change = tuple[int, int, NDArray[np.int32]]  # req_pool_index, first position, slots


class PageTable:
    """`slots` int32 [rows + 1, width]: the row is a request's req_pool_index, the column a position.

    `tensor` is the table as forwards read it: on a CPU the same memory, elsewhere a copy, which `refresh` keeps up to
    date. `shared`: other ranks keep copies, too. The last row, `pad_row`, is for padding: all its positions are slot 0.
    """

    def __init__(
        self, rows: int, width: int, page_size: int, device: torch.device = _CPU, *, shared: bool = False
    ) -> None:
        self.page_size = page_size
        self.width = -(-width // page_size) * page_size
        self.slots = np.zeros((rows + 1, self.width), dtype=np.int32)
        self.rows = self.pad_row = rows
        self._free_rows = list(range(rows - 1, -1, -1))
        self._within_page = np.arange(page_size, dtype=np.int32)
        host = torch.from_numpy(self.slots)
        self._is_copy = mirrors(device)
        self.tensor = host.to(device) if self._is_copy else host
        self._changes: list[Change] | None = [] if self._is_copy or shared else None

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self) -> int:
        return self._free_rows.pop()

    def release_row(self, req_pool_index: int) -> None:
        self.slots[req_pool_index] = 0
        self._free_rows.append(req_pool_index)
        if self._changes is not None:
            self._changes = [change for change in self._changes if change[0] != req_pool_index]

    def assign(self, req_pool_index: int, first_page: int, pages: Sequence[int]) -> None:
        """Map the request's pages first_page, first_page + 1, ... to `pages`."""
        size = self.page_size
        slots = (np.asarray(pages, dtype=np.int32)[:, None] * size + self._within_page).reshape(-1)
        self.slots[req_pool_index, first_page * size : first_page * size + len(slots)] = slots
        if self._changes is not None:
            self._changes.append((req_pool_index, first_page * size, slots))

    def refresh(self) -> NDArray[np.int64] | None:
        """Bring `tensor` up to date. Returns what has changed for other ranks; None: nothing.

        The assignments since the last call, int64 [3, n]: req_pool_index, position, slot. No place occurs twice.
        """
        changes = self._take_changes()
        if changes is not None and self._is_copy:
            write_changes(self.tensor, changes)
        return changes

    def _take_changes(self) -> NDArray[np.int64] | None:
        if not self._changes:
            return None
        taken, self._changes = self._changes, []
        rows, firsts, slots = zip(*taken, strict=True)
        counts = np.array([len(each) for each in slots])
        shift = np.array(firsts) - (counts.cumsum() - counts)  # from the place in the result to the position
        positions = np.arange(counts.sum()) + np.repeat(shift, counts)
        return np.stack([np.repeat(rows, counts), positions, np.concatenate(slots, dtype=np.int64)])


def write_changes(req_to_token: Tensor, changes: NDArray[np.int64]) -> None:
    """Make the assignments of `PageTable.refresh` in a copy of the page table."""
    row, position, slot = upload(changes, req_to_token.device)
    req_to_token.index_put_((row, position), slot.to(torch.int32))
