"""The rows of one forward over the states of their requests: what recurrent layers ask of a `BoundAttention`.

forward         rows per request      states
prompt chunks   the chunk             move at once to the end of the chunk
verify          the tree's nodes      stay; the nodes are stored, and `StatePool.keep` moves the states
mixed           nodes, then chunks    as in both
dense           a whole text          none before, none after: for training, and as reference in tests
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.cache.states import StatePool
from eagle_server.ops.native.recurrent import NativeSequences, NativeStates
from eagle_server.ops.recurrent.kernels import Trees, computed, delta_trees
from eagle_server.ops.recurrent.nodes import RecurrentLayer, after_path, recurrent_nodes, tree_taps
from eagle_server.speculation.tree import Tree

NativeStatesOfRows = tuple[NativeStates, Sequence[NativeSequences]]  # the rows in order, in groups


class RecurrentRows(ABC):
    """The rows of one forward."""

    @property
    def native(self) -> NativeStatesOfRows | None:
        """For the native kernels; None: torch computes these rows."""
        return None

    @abstractmethod
    def run(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        """x [T, channels], gates [T, gates] -> [T, value_heads, value_dim]. See `ops.recurrent`."""


@dataclass(frozen=True)
class TreeRows(RecurrentRows):
    """The nodes of a tree per request. Padding is computed too, and means nothing."""

    pool: StatePool
    tree: Tree
    requests: Tensor  # int64 [bs], rows of the pool

    @cached_property
    def _taps(self) -> Tensor:
        return tree_taps(self.tree.parents, self.pool.shape.kernel)

    @cached_property
    def _trees(self) -> Trees:
        return Trees.of(self.tree.parents, self.tree.mask, self.tree.counts, self.tree.steps)

    @cached_property
    def _sequences(self) -> NativeSequences:
        tree, device = self.tree, self.requests.device
        size = torch.tensor([tree.size], device=device).expand(len(self.requests))
        ends = (size if tree.counts is None else tree.counts).cumsum(0)
        return NativeSequences(ends, self.requests, parents=tree.parents)

    @property
    def native(self) -> NativeStatesOfRows | None:
        """See `RecurrentRows`."""
        return None if self.pool.native is None else (self.pool.native, [self._sequences])

    def run(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        if self.native is not None:
            states, groups = self.native
            return states.run(x, gates, layer, groups)
        tree, pool = self.tree, self.pool
        if computed(pool.states, pool.shape, tree.size):
            return delta_trees(x, gates, layer, self._trees, self.requests, pool.parts)
        rows = tree.rows
        if rows is not None:
            x, gates = (
                each.new_zeros(tree.parents.numel(), each.shape[1]).index_copy_(0, rows, each) for each in (x, gates)
            )
        x, gates = (each.unflatten(0, tree.parents.shape) for each in (x, gates))
        state, ring = self.pool.read(layer.index, self.requests)
        x = x.to(ring.dtype)
        out, nodes = recurrent_nodes(x, gates, layer, state, ring, tree.mask, self._taps)
        self.pool.store(layer.index, self.requests, nodes)
        out = out.flatten(0, 1)
        return out if rows is None else out.index_select(0, rows)


class _Piece(NamedTuple):
    """Consecutive tokens of one prompt, and where the state after them is copied to."""

    row: int
    start: int
    size: int
    checkpoint: int | None


def _saved(group: Sequence[_Piece]) -> list[tuple[int, int]]:
    """(row of the pool, checkpoint) of each piece that has one."""
    return [(piece.row, piece.checkpoint) for piece in group if piece.checkpoint is not None]


@dataclass(frozen=True)
class PromptRows(RecurrentRows):
    """Chunks of prompts, each (row of the pool, first position, number of tokens). A text begins without a state.

    saves: (row of the pool, length, checkpoint). While a chunk is computed, the state of its text at this length is
    copied to that row of the pool.
    """

    pool: StatePool
    chunks: Sequence[tuple[int, int, int]]
    saves: Sequence[tuple[int, int, int]] = ()

    @cached_property
    def _groups(self) -> list[list[_Piece]]:
        """The chunks, cut where states are saved. The next part of a text begins a new group."""
        groups: list[list[_Piece]] = [[]]
        for row, first, count in self.chunks:
            end, start = first + count, first
            cuts: list[tuple[int, int | None]] = [
                (length, checkpoint) for saved_row, length, checkpoint in self.saves if saved_row == row
            ]
            if not any(length == end for length, _ in cuts):
                cuts.append((end, None))
            for length, checkpoint in sorted(cuts):
                if start > first:
                    groups.append([])
                groups[-1].append(_Piece(row, start, length - start, checkpoint))
                start = length
        return groups

    @cached_property
    def _sequences(self) -> list[NativeSequences]:
        sequences = []
        for group in self._groups:
            requests, starts, counts = torch.tensor([piece[:3] for piece in group]).unbind(1)
            sequences.append(NativeSequences(counts.cumsum(0), requests, starts=starts, saved=_saved(group)))
        return sequences

    @property
    def native(self) -> NativeStatesOfRows | None:
        """See `RecurrentRows`."""
        return None if self.pool.native is None else (self.pool.native, self._sequences)

    def run(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        if self.native is not None:
            states, groups = self.native
            return states.run(x, gates, layer, groups)
        outputs, first = list[Tensor](), 0
        for group in self._groups:
            rows = slice(first, first + sum(piece.size for piece in group))
            outputs.append(self._run(x[rows], gates[rows], layer, group))
            if saved := _saved(group):
                self.pool.copy(saved, layer.index)
            first = rows.stop
        return torch.cat(outputs)

    def _run(self, x: Tensor, gates: Tensor, layer: RecurrentLayer, group: Sequence[_Piece]) -> Tensor:
        pool, index, outputs, first = self.pool, layer.index, list[Tensor](), 0
        for row, start, size, _ in group:
            state, ring = (part[index, row : row + 1] for part in (pool.states, pool.rings))
            if start == 0:
                state, ring = torch.zeros_like(state), torch.zeros_like(ring)
            request_rows = slice(first, first + size)
            out, state, ring = _chain(x[request_rows].to(ring.dtype), gates[request_rows], layer, state, ring)
            pool.states[index, row], pool.rings[index, row] = state[0], ring[0]
            outputs.append(out)
            first += size
        return torch.cat(outputs)


@dataclass(frozen=True)
class MixedRows(RecurrentRows):
    """The nodes of trees, then the rows of prompt chunks. `nodes`: how many rows are nodes."""

    trees: TreeRows
    prompts: PromptRows
    nodes: int

    @property
    def native(self) -> NativeStatesOfRows | None:
        """See `RecurrentRows`."""
        trees, prompts = self.trees.native, self.prompts.native
        return None if trees is None or prompts is None else (trees[0], [*trees[1], *prompts[1]])

    def run(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        nodes = self.trees.run(x[: self.nodes], gates[: self.nodes], layer)
        return torch.cat([nodes, self.prompts.run(x[self.nodes :], gates[self.nodes :], layer)])


@dataclass(frozen=True)
class DenseRows(RecurrentRows):
    """`batch` concatenated texts of equal length, from their beginnings."""

    batch: int

    def run(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        shape, wide = layer.shape, torch.promote_types(x.dtype, torch.float32)
        state = x.new_zeros(1, shape.value_heads, shape.key_dim, shape.value_dim, dtype=wide)
        ring = x.new_zeros(1, shape.kernel - 1, shape.channels)
        sequences = zip(x.chunk(self.batch), gates.chunk(self.batch), strict=True)
        return torch.cat([_chain(*sequence, layer, state, ring)[0] for sequence in sequences])


def _chain(
    x: Tensor, gates: Tensor, layer: RecurrentLayer, state: Tensor, ring: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of one text's rows [n, value_heads, V], and state and ring after them."""
    outputs, chunk = list[Tensor](), layer.shape.chunk
    for some, their_gates in zip(x.split(chunk), gates.split(chunk), strict=True):
        out, nodes = recurrent_nodes(some[None], their_gates[None], layer, state, ring)
        state, ring = after_path(state, ring, nodes)
        outputs.append(out[0])
    return torch.cat(outputs), state, ring
