"""Tokens that wait for the drafter, with the target's features: accepted ones for draft-extend, and whole prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.attention.interface import PagedRequests
from eagle_server.ops.tree.accepted import ExtendRows, extend_rows, store_accepted
from eagle_server.plan import Chunk, Decode
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Tree
from eagle_server.speculation.tree_config import extend_widths

_BACKLOG_BYTES = 256 << 20  # features kept for requests that do not draft
UNREAD_BYTES = 256 << 20  # features kept of prompts that the drafter has not read
_MERGE = 32  # segments that become one, so that a segment does not keep the rows of other requests in memory long


class _Segment(NamedTuple):
    """What one cycle accepted of one request: row `row` of features [n, w, F], the first for position `start`."""

    start: int
    features: Tensor
    row: int

    def until(self, position: int) -> Tensor:
        """The features of positions start .. position - 1."""
        return self.features[self.row, : position - self.start]


class AcceptedTokens:
    """Per row of req_to_token: the tokens that the last cycle accepted, each with the target's feature before it.

    Entry j of a request pairs the token at position start + j + 1 with the feature of position start + j. How many
    entries count follows from its sequence length: seq_len - start. The others hold some valid token and finite
    features.

    A request that does not draft keeps older features too, its backlog. It is computed by the drafter's prefill when
    the request drafts again. All backlogs together are bounded: the longest one is lost, and its request drafts no
    more.
    """

    def __init__(self, requests: int, width: int, device: torch.device, *, lazy: bool = False) -> None:
        """`width`: the most tokens that one cycle accepts, the bonus included. `lazy`: store when somebody reads.

        A captured graph reads the storage without asking, so it needs everything stored.
        """
        self._lazy = lazy
        self.width = width
        self.backlog_bytes = 0
        self._newest: tuple[Tensor, Tensor, Tensor] | None = None  # what is not stored yet: nobody may need it
        self._newest_rows: tuple[int, ...] = ()
        self._tokens = torch.zeros(requests, width, dtype=torch.int64, device=device)
        self._features: Tensor | None = None
        self._row_bytes = 0  # of the features of one position
        self._segments: dict[int, list[_Segment]] = {}
        self._lost: dict[int, int] = {}  # the first position that the drafter has not computed

    def record(
        self, starts: Iterable[tuple[int, int]], req_pool_indices: Tensor, tokens: Tensor, features: Tensor
    ) -> None:
        """Keep tokens int64 [n, w] and features [n, w, F] of the requests req_pool_indices int64 [n].

        `starts` has (req_pool_index, position of the first feature) of each; padding rows have none.
        """
        self._allocate(features)
        starts = tuple(starts)
        rows = tuple(index for index, _ in starts)
        if rows != self._newest_rows:
            self._store()
        self._newest, self._newest_rows = (req_pool_indices, tokens, features), rows
        if not self._lazy:
            self._store()
        self._remember(starts, features)

    def record_paths(
        self,
        starts: Sequence[tuple[int, int]],
        req_pool_indices: Tensor,
        tree: Tree,
        accepted: Accepted,
        features: Tensor,
    ) -> None:
        """`record` for the accepted paths of trees. features [n, F] are those of the computed nodes."""
        if not self._lazy and tree.counts is None:
            stored = self._allocate(features)
            chosen = store_accepted(features, accepted.path, accepted.tokens, req_pool_indices, self._tokens, stored)
            self._remember(starts, chosen)
            return
        if tree.size == 1:
            features = features[:, None].clone()  # a replayed graph overwrites its outputs
        else:
            rows = tree.retrive_index.gather(1, accepted.path.clamp(min=0))
            features = features.index_select(0, rows.view(-1)).unflatten(0, rows.shape)
        self.record(starts, req_pool_indices, accepted.tokens.clamp(min=0), features)

    def _allocate(self, features: Tensor) -> Tensor:
        """The storage of features, made for the first ones [.., F]."""
        if self._features is None:
            shape = (*self._tokens.shape, features.shape[-1])
            self._features = torch.zeros(shape, dtype=features.dtype, device=features.device)
            self._row_bytes = features.shape[-1] * features.element_size()
        return self._features

    def _remember(self, starts: Iterable[tuple[int, int]], features: Tensor) -> None:
        """Keep features [n, w, F] as the newest segments of the requests."""
        for row, (index, start) in enumerate(starts):
            if index in self._lost:
                continue
            segments = self._segments.setdefault(index, [])
            if segments and segments[-1].start >= start:  # warm-up has several requests in one row
                self.taken(index)
                segments = self._segments.setdefault(index, [])
            segments.append(_Segment(start, features, row))
            if len(segments) > 1:
                self._grow_backlog(index, segments)

    def counts(self, decodes: Sequence[Decode]) -> tuple[int, ...]:
        """How many entries each request has for draft-extend, at least the bonus. Without the backlog."""
        lengths = []
        for decode in decodes:
            segments = self._segments.get(decode.req_pool_index)
            lengths.append(1 if segments is None else decode.seq_len - segments[-1].start)
        return tuple(lengths)

    def extend_width(self, count: int) -> int:
        """The rows of every request in a captured draft-extend, if none has more than `count` entries."""
        return next(width for width in extend_widths(self.width - 1) if width >= count)

    def start(self, decode: Decode) -> int:
        """The first position whose pair the drafter has not computed: at most seq_len - 1."""
        segments = self._segments.get(decode.req_pool_index)
        if segments is not None:
            return segments[0].start
        return self._lost.get(decode.req_pool_index, decode.seq_len - 1)

    def is_lost(self, req_pool_index: int) -> bool:
        """Whether the request can draft no more, because its backlog was dropped."""
        return req_pool_index in self._lost

    def give_up(self, decode: Decode) -> None:
        """The request drafts no more, so nothing is kept for it."""
        index = decode.req_pool_index
        if index not in self._lost:
            self._lost[index] = self.start(decode)
            self.taken(index)

    def backlog_length(self, req_pool_index: int) -> int:
        """How many tokens the backlog has."""
        segments = self._segments.get(req_pool_index)
        return 0 if segments is None else segments[-1].start - segments[0].start

    def backlog(self, req_pool_index: int) -> list[tuple[int, Tensor]]:
        """First position and features [n, F] of the entries that draft-extend does not reach. []: there are none."""
        segments = self._segments.get(req_pool_index, [])
        if len(segments) < 2:  # noqa: PLR2004  the newest one is for draft-extend
            return []
        return [(segments[0].start, _joined(segments))]

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """Tokens [rows of req_to_token, width] and features [.., width, F] of all requests."""
        self._store()
        assert self._features is not None, "nothing was recorded yet"
        return self._tokens, self._features

    def take(self, req_pool_indices: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` entries of requests: tokens [n * width], features [n * width, F]."""
        tokens, features = (each[:, :width].index_select(0, req_pool_indices) for each in self.storage)
        return tokens.view(-1), features.flatten(0, 1)

    def extend_rows(self, requests: PagedRequests, extend_lens: Tensor, width: int) -> ExtendRows:
        """The first `width` entries of requests, with their positions."""
        return extend_rows(*self.storage, requests.req_pool_indices, requests.seq_lens, extend_lens, width)

    def taken(self, req_pool_index: int) -> None:
        """The drafter has computed all entries of the request."""
        segments = self._segments.pop(req_pool_index, None)
        if segments is not None and len(segments) > 1:
            self.backlog_bytes -= (segments[-1].start - segments[0].start) * self._row_bytes

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        self.taken(req_pool_index)
        self._lost.pop(req_pool_index, None)

    def _store(self) -> None:
        if self._newest is not None:
            assert self._features is not None
            req_pool_indices, tokens, features = self._newest
            width, self._newest = tokens.shape[1], None
            self._tokens[:, :width].index_copy_(0, req_pool_indices, tokens)
            self._features[:, :width].index_copy_(0, req_pool_indices, features)

    def _grow_backlog(self, index: int, segments: list[_Segment]) -> None:
        """The newest segment but one has become backlog."""
        before, end = segments[-2], segments[-1].start
        self.backlog_bytes += (end - before.start) * self._row_bytes
        if before.features.shape[1] > 1:  # not the columns of nodes that were not accepted
            segments[-2] = _Segment(before.start, before.until(end)[None].clone(), 0)
        # Merged ones have at least as many positions. They are not merged again: a text of any length is copied once.
        if len(segments) > _MERGE and segments[-_MERGE].start - segments[-_MERGE - 1].start < _MERGE:
            newest = segments[-_MERGE - 1 :]
            segments[-_MERGE - 1 : -1] = [_Segment(newest[0].start, _joined(newest)[None], 0)]
        if self.backlog_bytes > _BACKLOG_BYTES:
            longest = max(self._segments, key=self.backlog_length)
            self._lost[longest] = self._segments[longest][0].start
            self.taken(longest)


def _joined(segments: Sequence[_Segment]) -> Tensor:
    """The features of all positions before the last segment, [n, F]."""
    return torch.cat([segment.until(later.start) for segment, later in pairwise(segments)])


class UnreadPrompts:
    """Features of prompts that the drafter reads only when a request that needs them drafts.

    They are kept by slot, because the prompt's slots may go to the prefix cache, where other requests find them.
    """

    def __init__(self, slots: int, page_size: int, most_bytes: int = 0) -> None:
        """slots: of the KV pools. most_bytes: with more, prompts are read at once; 0: all are."""
        self.most_bytes, self._bytes, self._added = most_bytes, 0, 0
        self._page_size = page_size
        self._features: dict[int, Tensor] = {}  # of one forward each, [rows, F]
        self._left = Counter[int]()  # slots of each forward
        self._forward = np.full(slots, -1, dtype=np.int64)  # of each slot; -1: its draft KV is written
        self._row = np.zeros(slots, dtype=np.int64)  # among the forward's features
        self._known: dict[int, int] = {}  # what `rows` has found

    @property
    def has_room(self) -> bool:
        return self._bytes < self.most_bytes

    @property
    def is_empty(self) -> bool:
        return not self._features

    def add(self, chunks: Sequence[Chunk], table: NDArray[np.int32], features: Tensor) -> None:
        """The target has computed these chunks, with one feature per row. table: the slots of all requests."""
        first = 0
        for chunk in chunks:
            known = len(chunk.following)
            slots = table[chunk.req_pool_index, chunk.start : chunk.start + known]
            self._forward[slots], self._row[slots] = self._added, np.arange(first, first + known)
            self._left[self._added] += known
            first += len(chunk.tokens)
        if self._left[self._added]:
            self._features[self._added] = features
            self._bytes += features.untyped_storage().nbytes()
            self._added += 1

    def rows(self, decode: Decode, table: NDArray[np.int32]) -> int:
        """About how many rows the request must read before it drafts."""
        index = decode.req_pool_index
        if index not in self._known:
            self._known[index] = int((self._forward[table[index, : decode.seq_len]] >= 0).sum())
        return self._known[index]

    def take(self, decode: Decode, table: NDArray[np.int32]) -> list[tuple[int, Tensor]]:
        """First position and features [n, F] of each piece that the request must read. The drafter reads them now."""
        if not self.rows(decode, table):
            return []
        self._known[decode.req_pool_index] = 0
        slots = table[decode.req_pool_index, : decode.seq_len]
        forward, row = self._forward[slots], self._row[slots]
        unread = np.flatnonzero(forward >= 0)
        ends = np.flatnonzero((np.diff(unread) != 1) | (np.diff(forward[unread]) != 0) | (np.diff(row[unread]) != 1))
        pieces = [each for each in np.split(unread, ends + 1) if len(each)]
        taken = [(int(at[0]), self._features[int(forward[at[0]])][row[at[0]] : row[at[-1]] + 1]) for at in pieces]
        self._forget_slots(slots[unread])
        return taken

    def freed(self, pages: Sequence[int]) -> None:
        """These pages hold nothing any more."""
        if not self.is_empty:
            self._forget_slots((np.array(pages)[:, None] * self._page_size + np.arange(self._page_size)).ravel())

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        self._known.pop(req_pool_index, None)

    def _forget_slots(self, slots: NDArray[Any]) -> None:
        forwards, counts = np.unique(self._forward[slots], return_counts=True)
        self._forward[slots] = -1
        for number, count in zip(map(int, forwards), map(int, counts), strict=True):
            self._left[number] -= count
            if number >= 0 and not self._left[number]:
                self._bytes -= self._features.pop(number).untyped_storage().nbytes()
                del self._left[number]
