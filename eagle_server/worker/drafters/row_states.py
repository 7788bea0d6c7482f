"""What the layers of a head with several MTP layers gave at the rows before: layer k + 1 reads layer k's there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from eagle_server.models.drafts.interface import DraftHead
from eagle_server.ops.device import upload
from eagle_server.worker.batch.batch import PromptBatch

RowBefore = Callable[[int, Tensor], Tensor]  # (layer, z [rows, H] of it) -> z at the row before each
_NEVER = -(1 << 40)  # no position, so that nothing is known of the row before


class RowStates:
    """Per row of req_to_token: z of the newest rows that the draft has computed, for all layers but the last.

    Entry j stands for position start + j - 1. Draft-extend keeps in entry 0 what it began with, because it may run
    again from the same position: one that ran ahead may not be used. Where the row before is not known (the start of a
    text, the end of a prefix hit) z is zero. Drafts alone depend on it.
    """

    def __init__(self, head: DraftHead, requests: int, width: int, device: torch.device) -> None:
        """requests: rows of req_to_token. width: the most rows of a request in draft-extend."""
        config = head.config
        shape = (requests, width + 1, head.num_layers - 1, config.hidden_size)
        self._z = torch.zeros(shape, dtype=config.dtype, device=device)
        self._start = torch.full((requests,), _NEVER, dtype=torch.int64, device=device)

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        self._start[req_pool_index] = _NEVER

    def extending(self, req_pool_indices: Tensor, first: Tensor, width: int) -> RowBefore:
        """For a draft-extend of `width` rows per request, from position first int64 [bs] on."""
        before = self._before(req_pool_indices, first)
        self._start[req_pool_indices] = first

        def row_before(layer: int, z: Tensor) -> Tensor:
            rows = torch.cat([before[:, None, layer], z.unflatten(0, (-1, width))], dim=1)  # [bs, width + 1, H]
            self._z[req_pool_indices, : width + 1, layer] = rows
            return rows[:, :-1].flatten(0, 1)

        return row_before

    def reading(self, prompts: PromptBatch) -> RowBefore:
        """For pieces of prompt."""
        ends, device = list(accumulate(prompts.counts)), prompts.positions.device
        first_rows = [end - count for end, count in zip(ends, prompts.counts, strict=True)]
        requests, first, last = upload([prompts.req_pool_indices, first_rows, [end - 1 for end in ends]], device)
        before = self._before(requests, prompts.positions.index_select(0, first))
        self._start[requests] = prompts.positions.index_select(0, last) + 1

        def row_before(layer: int, z: Tensor) -> Tensor:
            self._z[requests, 0, layer] = z.index_select(0, last)
            return z.roll(1, dims=0).index_copy(0, first, before[:, layer])

        return row_before

    def _before(self, req_pool_indices: Tensor, first: Tensor) -> Tensor:
        """z at the row before position `first` int64 [bs] of each request: [bs, layers - 1, H]."""
        entry = first - self._start.index_select(0, req_pool_indices)
        is_known = (entry >= 0) & (entry < self._z.shape[1])
        z = self._z[req_pool_indices, entry.clamp(0, self._z.shape[1] - 1)]
        return z.masked_fill(~is_known[:, None, None], 0.0)
