"""The states of requests between forwards: accepted paths move them, and the prefix cache has checkpoints of them.

The path that a cycle accepted is kept at the beginning of the next one. Only then it is known where its text ends, and
which lengths the prefix cache can use: a state can be had at any length that the path passes, and at no shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.cache.states import StatePool
from eagle_server.ops.device import upload
from eagle_server.plan import NO_MOVES, StateMoves


@dataclass(frozen=True)
class _Paths:
    """What the last cycle accepted: path int64 [bs, w] of the rows int64 [bs]. lengths: of their texts before it."""

    path: Tensor
    rows: Tensor
    lengths: Mapping[int, int]  # by row, without padding


class RequestStates:
    """A pool of states, and the accepted paths that they have not moved along yet."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self._paths: _Paths | None = None

    @property
    def settled(self) -> bool:
        """Whether all states are at the ends of their texts."""
        return self._paths is None

    def accept(self, path: Tensor, rows: Tensor, lengths: Mapping[int, int]) -> None:
        """The next `settle` moves the states of these rows along `path`, int64 [bs, w], -1 after its end.

        lengths: of their texts before the path, by row, in the order of `rows`, which may have padding after them.
        """
        self._paths = _Paths(path, rows, lengths)

    def settle(self, moves: StateMoves = NO_MOVES) -> None:
        """Move the states along the accepted paths, and save those of `moves` on the way. Then restore.

        A row that is restored belongs to another request than before.
        """
        paths, self._paths = self._paths, None
        if moves.saves:
            self._save(moves, paths)
        elif paths is not None:
            self.pool.keep(paths.path, paths.rows)
        if moves.restores:
            self.pool.copy(moves.restores)

    def _save(self, moves: StateMoves, paths: _Paths | None) -> None:
        """Copy states to checkpoints, the shorter lengths of a text first."""
        saves = sorted(moves.saves, key=lambda save: save.length)
        lengths = {} if paths is None else dict(paths.lengths)
        latest = {save.checkpoint: save for save in moves.saves}  # what an earlier save left there was evicted
        while saves:
            first = {save.req_pool_index: save for save in reversed(saves)}  # of each row
            saves = [save for save in saves if save is not first[save.req_pool_index]]
            assert all(save.length >= lengths.get(row, 0) for row, save in first.items()), "no state can go back"
            self._advance(paths, lengths, {row: save.length for row, save in first.items()})
            ready = [save for save in first.values() if latest[save.checkpoint] is save]
            if ready:
                self.pool.copy([(save.req_pool_index, save.checkpoint) for save in ready])
        if paths is not None:
            self._advance(paths, lengths, {row: length + paths.path.shape[1] for row, length in paths.lengths.items()})

    def _advance(self, paths: _Paths | None, lengths: dict[int, int], to: dict[int, int]) -> None:
        """Move the states of some rows along their paths, up to the given lengths of their texts."""
        if paths is None:
            return
        moved = [(i, row) for i, row in enumerate(paths.lengths) if to.get(row, 0) > lengths[row]]
        if not moved:
            return
        path, device = paths.path, paths.path.device
        begins = [lengths[row] - paths.lengths[row] for _, row in moved]
        counts = [to[row] - lengths[row] for _, row in moved]
        numbers = upload([[i for i, _ in moved], begins, counts], device)
        steps = torch.arange(path.shape[1], device=device)
        ends = torch.full_like(path[:, :1], -1)
        places = (numbers[1][:, None] + steps).clamp(max=path.shape[1])
        part = torch.cat([path, ends], dim=1).index_select(0, numbers[0]).gather(1, places)
        part = part.masked_fill(steps >= numbers[2][:, None], -1)
        self.pool.keep(part, paths.rows.index_select(0, numbers[0]))
        lengths.update({row: to[row] for _, row in moved})
