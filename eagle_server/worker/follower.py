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
from eagle_server.cache.page_table import write_changes
from eagle_server.models.ranks import RankGroup
from eagle_server.ops.device import upload
from eagle_server.plan import StateMoves, StateSave
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import Piece, prompt_batch
from eagle_server.worker.rank_messages import RankMessage
from eagle_server.worker.verifier import Verifier


class Follower:
    """Follows rank 0. `req_to_token` is this rank's copy of the page table, all zeros at first."""

    def __init__(self, ranks: RankGroup, verifier: Verifier, req_to_token: Tensor) -> None:
        self._ranks, self._verifier, self._req_to_token = ranks, verifier, req_to_token

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
                case RankMessage.SETTLE:
                    self._settle(numbers)
                case RankMessage.PREFILL:
                    self._prefill(numbers)
                case RankMessage.VERIFY:
                    self._verify(numbers, tensors)
                case RankMessage.KEEP:
                    self._keep(numbers, tensors)
                case _:
                    raise AssertionError(f"a message of an unknown kind, {kind}")

    def _settle(self, numbers: Sequence[int]) -> None:
        count, *rest = numbers
        restores = rest[3 * count :]
        pairs = zip(restores[::2], restores[1::2], strict=True)
        self._verifier.settle(StateMoves(tuple(_saves(rest[: 3 * count])), tuple(pairs)))

    def _prefill(self, numbers: Sequence[int]) -> None:
        count, logit_rows, saves, *rest = numbers
        rows, rest = rest[:logit_rows], rest[logit_rows:]
        saved, rest = rest[: 3 * saves], rest[3 * saves :]
        heads, tokens = rest[: 3 * count], rest[3 * count :]
        chunks = list(zip(heads[::3], heads[1::3], heads[2::3], strict=True))
        pieces: list[Piece] = []
        for request, start, length in chunks:
            pieces.append((request, start, tokens[:length]))
            tokens = tokens[length:]
        self._verifier.run_prefill(prompt_batch(pieces, self._req_to_token), rows, chunks, _saves(saved))

    def _verify(self, numbers: Sequence[int], tensors: Tensor) -> None:
        requests, size, topk, steps, *lens = numbers
        seq_lens_host, counts = tuple(lens[:requests]), lens[requests:] or None
        req_pool_indices, tokens, parents = tensors.split([requests, requests * size, requests * size])
        seq_lens = upload(seq_lens_host, tensors.device)
        tree = Tree.linked(tokens.view(requests, size), parents.view(requests, size), seq_lens, steps, topk)
        if counts is not None:
            tree = replace(tree, counts=upload(counts, tensors.device))
        layout = verify_layout(seq_lens_host, size, topk, counts)
        self._verifier.run_verify(layout, tree, PagedRequests(req_pool_indices, seq_lens, self._req_to_token))

    def _keep(self, numbers: Sequence[int], tensors: Tensor) -> None:
        count, branched, *pairs = numbers
        req_pool_indices, seq_lens, path = tensors.split([count, count, len(tensors) - 2 * count])
        requests = PagedRequests(req_pool_indices, seq_lens, self._req_to_token)
        lengths = dict(zip(pairs[::2], pairs[1::2], strict=True))
        self._verifier.run_keep(path.view(count, -1), requests, lengths, branched=bool(branched))


def _saves(numbers: Sequence[int]) -> list[StateSave]:
    return [StateSave(*save) for save in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)]
