"""What rank 0 sends to the other ranks in a cycle, so that their slices of the target compute the same forwards.

kind      numbers                                                         tensors
CHANGES   rows, positions and slots that the page table got               -
PREFILL   chunks, logit rows; request, start, length per chunk; tokens    -
VERIFY    requests, nodes, topk, depth; lengths; nodes per tree, or none  requests, tokens, parents
KEEP      requests                                                        accepted path
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.models.ranks import RankGroup
from eagle_server.plan import Chunk
from eagle_server.speculation.tree import Tree


class RankMessage(IntEnum):
    """The kinds of messages."""

    STOP = 0
    SETUP = 1  # the numbers that the pool and the page table are made from, see `engine/build/assemble.py`
    CHANGES = 2
    PREFILL = 3
    VERIFY = 4
    KEEP = 5


def send_changes(ranks: RankGroup, changes: NDArray[np.int64]) -> None:
    """The changes of `PageTable.take_changes`, int64 [3, n]."""
    ranks.send(RankMessage.CHANGES, changes.reshape(-1))


def send_prefill(ranks: RankGroup, chunks: Sequence[Chunk], rows: Sequence[int]) -> None:
    """Prompt chunks, and the rows of which logits are computed."""
    pieces = [number for chunk in chunks for number in (chunk.req_pool_index, chunk.start, len(chunk.tokens))]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    ranks.send(RankMessage.PREFILL, [len(chunks), len(rows), *rows, *pieces, *tokens])


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


def send_keep(ranks: RankGroup, path: Tensor) -> None:
    """The accepted path of the trees that were sent last, int64 [bs, S + 1]."""
    ranks.send(RankMessage.KEEP, [len(path)], path)
