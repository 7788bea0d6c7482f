"""What rank 0 sends to the other ranks in a cycle, so that their slices of the target compute the same forwards.

kind      numbers                                                         tensors
CHANGES   rows, positions and slots that the page table got               -
SETTLE    saves; request, length, checkpoint per save; checkpoint and     -
          request per restore
PREFILL   chunks, logit rows, saves; row per logit row; request, length,  -
          checkpoint per save; request, start, length per chunk; tokens
VERIFY    requests, nodes, topk, steps; lengths; nodes per tree, or none  requests, tokens, parents
KEEP      requests, whether trees branch; request and length per text     requests, lengths, accepted path
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.attention.interface import PagedRequests
from eagle_server.models.ranks import RankGroup
from eagle_server.plan import Chunk, StateMoves
from eagle_server.speculation.tree import Tree


class RankMessage(IntEnum):
    """The kinds of messages."""

    STOP = 0
    SETUP = 1  # the numbers that the pool and the page table are made from, see `engine/assembly/assemble.py`
    CHANGES = 2
    PREFILL = 3
    VERIFY = 4
    KEEP = 5
    SETTLE = 6


def send_changes(ranks: RankGroup, changes: NDArray[np.int64]) -> None:
    """The changes of `PageTable.refresh`, int64 [3, n]."""
    ranks.send(RankMessage.CHANGES, changes.reshape(-1))


def send_settle(ranks: RankGroup, moves: StateMoves) -> None:
    """The states of recurrent layers move along the accepted paths that were sent last, and some are copied."""
    saves = [number for save in moves.saves for number in save]
    ranks.send(RankMessage.SETTLE, [len(moves.saves), *saves, *(row for pair in moves.restores for row in pair)])


def send_prefill(ranks: RankGroup, chunks: Sequence[Chunk], rows: Sequence[int]) -> None:
    """Prompt chunks, the rows of which logits are computed, and the states that are saved on the way."""
    saves = [number for chunk in chunks for save in chunk.saves for number in save]
    pieces = [number for chunk in chunks for number in (chunk.req_pool_index, chunk.start, len(chunk.tokens))]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    counts = [len(chunks), len(rows), len(saves) // 3]
    ranks.send(RankMessage.PREFILL, [*counts, *rows, *saves, *pieces, *tokens])


def send_verify(
    ranks: RankGroup,
    seq_lens: Sequence[int],
    req_pool_indices: Tensor,
    tree: Tree,
    counts: Sequence[int] | None,
) -> None:
    """Trees without their masks and positions, which follow from parents and lengths."""
    numbers = [len(seq_lens), tree.size, tree.topk, tree.steps, *seq_lens, *(counts or ())]
    ranks.send(RankMessage.VERIFY, numbers, req_pool_indices, tree.tokens, tree.parents)


def send_keep(
    ranks: RankGroup, path: Tensor, requests: PagedRequests, lengths: Mapping[int, int], *, branched: bool
) -> None:
    """What trees kept: their accepted paths, int64 [bs, S + 1]. The rest as `Verifier.run_keep` has it."""
    numbers = [len(path), int(branched), *(number for pair in lengths.items() for number in pair)]
    ranks.send(RankMessage.KEEP, numbers, requests.req_pool_indices, requests.seq_lens, path)
