"""The page table as forwards read it, on the device and on other ranks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.cache.page_table import PageTable
from eagle_server.models.ranks import RankGroup
from eagle_server.ops.upload import upload
from eagle_server.worker.rank_messages import send_changes


class ReqToToken:
    """The page table on the device. On a CPU it is the same memory; elsewhere it is a copy that is kept up to date.

    `ranks`: those above 0 have copies, too.
    """

    def __init__(self, table: PageTable, device: torch.device, ranks: RankGroup | None = None) -> None:
        self._table, self._ranks = table, ranks
        host = torch.from_numpy(table.slots)
        self._mirrored = device.type != "cpu"
        self.tensor = host.to(device) if self._mirrored else host

    def refresh(self) -> None:
        """Copy what was assigned since the last call."""
        if self._mirrored or self._ranks is not None:
            changes = self._table.take_changes()
            if self._ranks is not None and changes.shape[1]:
                send_changes(self._ranks, changes)
            if self._mirrored and changes.shape[1]:
                write_changes(self.tensor, changes)


def write_changes(req_to_token: Tensor, changes: NDArray[np.int64]) -> None:
    """Make the assignments of `PageTable.take_changes` in a copy of the page table."""
    row, position, slot = upload(changes, req_to_token.device)
    req_to_token.index_put_((row, position), slot.to(torch.int32))
