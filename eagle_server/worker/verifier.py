"""The target's forwards: verify windows and prompt chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBackend
from eagle_server.cache.pool import KVPool
from eagle_server.models.target import TargetModel, TargetOutput
from eagle_server.plan import Chunk
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import EagleVerifyInput
from eagle_server.worker.batch import DecodeBatch, PrefillBatch


@dataclass(frozen=True)
class Verified:
    """Every node's logits, float32 [bs * D, vocab], and features [bs * D, F] for the drafter."""

    logits: Tensor
    features: Tensor


@dataclass(frozen=True)
class Prefilled:
    """features [rows, F] of all chunk rows; logits float32 [n, vocab], of which each chunk has `logit_rows`."""

    features: Tensor
    logits: Tensor
    logit_rows: tuple[int, ...]


class Verifier:
    """Runs the target over its KV pool."""

    def __init__(self, target: TargetModel, attention: AttentionBackend, pool: KVPool) -> None:
        self.target, self.attention, self.pool = target, attention, pool

    def verify(self, batch: DecodeBatch, tree: EagleVerifyInput) -> Verified:
        """All nodes of all trees in one forward, under the tree mask."""
        plan = self.attention.plan(tree.attention_batch(batch.rows, batch.seq_lens_host, batch.req_to_token))
        out = self.target(tree.draft_token, tree.positions, plan)
        return Verified(self.target.logits(out.hidden), self._features(out))

    def prefill(self, batch: PrefillBatch, chunks: tuple[Chunk, ...]) -> Prefilled:
        """Prompt chunks, causally. Logits only where a token is drawn or prompt log-probabilities are wanted."""
        out = self.target(batch.tokens, batch.positions, self.attention.plan(batch.attention))
        rows: list[int] = []
        counts: list[int] = []
        start = 0
        for chunk, length in zip(chunks, batch.counts, strict=True):
            first = start if chunk.prompt_logprobs else start + length - 1
            wanted = range(first, start + length) if chunk.prompt_logprobs or chunk.next_token is None else range(0)
            rows.extend(wanted)
            counts.append(len(wanted))
            start += length
        hidden = out.hidden.index_select(0, torch.tensor(rows, dtype=torch.int64, device=out.hidden.device))
        return Prefilled(self._features(out), self.target.logits(hidden), tuple(counts))

    def keep(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        """Move the accepted nodes' KV to the front of each window; the rest of it is scratch again.

        The draft pool needs no move: draft-extend rewrites those slots.
        """
        if tree.topk == 1:
            return  # a chain's path is already in place
        places = batch.seq_lens[:, None] + torch.arange(1, accepted.path.shape[1], device=batch.rows.device)
        nodes = accepted.path[:, 1:]
        sources = torch.where(nodes < 0, places, batch.seq_lens[:, None] + nodes)
        table = batch.req_to_token.index_select(0, batch.rows)
        self.pool.move(table.gather(1, sources).view(-1).long(), table.gather(1, places).view(-1).long())

    def _features(self, out: TargetOutput) -> Tensor:
        return out.hidden if out.aux is None else out.aux
