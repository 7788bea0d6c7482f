"""A rank above 0: it computes the target's forwards that rank 0 asks for, with its slices of the weights and the KV.

It has no requests, no drafter and no clock: what to compute comes with each message, so ranks cannot diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eagle_server.attention.batches import verify_layout
from eagle_server.attention.interface import PagedRequests
from eagle_server.models.ranks import RankGroup
from eagle_server.ops.upload import upload
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import Piece, prompt_batch
from eagle_server.worker.batch.req_to_token import write_changes
from eagle_server.worker.rank_messages import RankMessage
from eagle_server.worker.verifier import Verifier


class Follower:
    """Follows rank 0. `req_to_token` is this rank's copy of the page table, all zeros at first."""

    def __init__(self, ranks: RankGroup, verifier: Verifier, req_to_token: Tensor) -> None:
        self._ranks, self._verifier, self._req_to_token = ranks, verifier, req_to_token
        self._verified: tuple[Tensor, Tensor] | None = None  # lengths and req_pool_indices of the newest trees

    @torch.inference_mode()
    def run(self) -> None:
        """Compute what rank 0 asks for, until it sends STOP."""
        while True:
            kind, numbers, tensors = self._ranks.receive()
            match kind:
                case RankMessage.STOP:
                    return
                case RankMessage.CHANGES:
                    write_changes(self._req_to_token, np.array(numbers, dtype=np.int64).reshape(3, -1))
                case RankMessage.PREFILL:
                    self._prefill(numbers)
                case RankMessage.VERIFY:
                    self._verify(numbers, tensors)
                case RankMessage.KEEP:
                    assert self._verified is not None, "trees are kept after they were verified"
                    path = tensors.view(numbers[0], -1)
                    self._verifier.pool.keep(path, *self._verified, self._req_to_token)
                case _:
                    raise AssertionError(f"a message of an unknown kind, {kind}")

    def _prefill(self, numbers: Sequence[int]) -> None:
        chunks, logit_rows, *rest = numbers
        rows, rest = rest[:logit_rows], rest[logit_rows:]
        heads, tokens = rest[: 3 * chunks], rest[3 * chunks :]
        pieces: list[Piece] = []
        for request, start, length in zip(heads[::3], heads[1::3], heads[2::3], strict=True):
            pieces.append((request, start, tokens[:length]))
            tokens = tokens[length:]
        self._verifier.run_prefill(prompt_batch(pieces, self._req_to_token), rows)

    def _verify(self, numbers: Sequence[int], tensors: Tensor) -> None:
        requests, size, topk, steps, *lens = numbers
        seq_lens_host, counts = tuple(lens[:requests]), lens[requests:] or None
        req_pool_indices, tokens, parents = tensors.split([requests, requests * size, requests * size])
        seq_lens = upload(seq_lens_host, tensors.device)
        tree = Tree.linked(tokens.view(requests, size), parents.view(requests, size), seq_lens, steps, topk)
        if counts is not None:
            tree = replace(tree, counts=upload(counts, tensors.device))
        self._verified = seq_lens, req_pool_indices
        layout = verify_layout(seq_lens_host, size, topk, counts)
        self._verifier.run(layout, tree, PagedRequests(req_pool_indices, seq_lens, self._req_to_token))
