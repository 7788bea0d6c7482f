"""From a plan's host values to the tensors of one cycle."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, Causal
from eagle_server.cache.page_table import PageTable
from eagle_server.plan import Chunk, CyclePlan, Decode, Sampling
from eagle_server.speculation.attention_args import batch_arguments
from eagle_server.speculation.sampling import SamplingBatch


class ReqToToken:
    """The page table as the device sees it: its very memory on a CPU, a mirror of the rows in use elsewhere."""

    def __init__(self, table: PageTable, device: torch.device) -> None:
        self._host = torch.from_numpy(table.slots)
        self.tensor = self._host if device.type == "cpu" else self._host.to(device)

    def refresh(self, rows: Sequence[int]) -> None:
        """Bring over the rows of this cycle."""
        if self.tensor is not self._host and rows:
            index = torch.tensor(rows)
            self.tensor[index.to(self.tensor.device)] = self._host[index].to(self.tensor.device, non_blocking=True)


@dataclass(frozen=True)
class Pending:
    """Accepted tokens that the drafter has not seen yet, each with the target's feature one position before it.

    Row j pairs tokens[j], which stands at position start + j + 1, with the feature of position start + j.
    """

    start: int
    tokens: Tensor  # int64 [n]
    features: Tensor  # [n, F]


@dataclass(frozen=True)
class ExtendBatch:
    """Everything the drafter must catch up on, decodes first, then prompt chunks of earlier cycles."""

    tokens: Tensor  # int64 [rows]
    features: Tensor  # [rows, F]
    positions: Tensor  # int64 [rows]
    attention: AttentionBatch
    counts: tuple[int, ...]
    last_rows: Tensor  # int64 [decodes], each decode's newest row


@dataclass(frozen=True)
class DecodeBatch:
    """The decoding requests of one cycle."""

    rows: Tensor  # int64 [bs], rows of req_to_token
    seq_lens: Tensor  # int64 [bs]
    verified_id: Tensor  # int64 [bs]
    seq_lens_host: tuple[int, ...]
    sampling: SamplingBatch
    req_to_token: Tensor  # int32 [rows, width]


@dataclass(frozen=True)
class PrefillBatch:
    """The prompt chunks of one cycle."""

    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    attention: AttentionBatch
    counts: tuple[int, ...]


class Batches:
    """Builds a cycle's batches, and keeps what the drafter has yet to see of each row."""

    def __init__(self, table: PageTable, device: torch.device) -> None:
        self.device = device
        self.req_to_token = ReqToToken(table, device)
        self.pending: dict[int, Pending] = {}
        self._sampling: tuple[tuple[Sampling, ...], SamplingBatch] = ((), SamplingBatch.of((), device))

    def begin(self, plan: CyclePlan) -> None:
        """Forget the rows that ended, and bring the page table's rows over."""
        for row in plan.released:
            self.pending.pop(row, None)
        self.req_to_token.refresh(plan.rows)

    def extend(self, plan: CyclePlan) -> ExtendBatch | None:
        """Take what is pending for the plan's rows; None if there is nothing."""
        rows = [row for row in plan.rows if row in self.pending]
        if not rows:
            return None
        work = [self.pending.pop(row) for row in rows]
        counts = tuple(len(item.tokens) for item in work)
        ends = torch.tensor(counts).cumsum(0)
        return ExtendBatch(
            tokens=torch.cat([item.tokens for item in work]),
            features=torch.cat([item.features for item in work]),
            positions=torch.cat([torch.arange(item.start, item.start + len(item.tokens)) for item in work]).to(
                self.device
            ),
            attention=batch_arguments(
                torch.tensor(rows, device=self.device),
                counts,
                tuple(item.start + n for item, n in zip(work, counts, strict=True)),
                self.req_to_token.tensor,
                Causal(),
            ),
            counts=counts,
            last_rows=(ends[: len(plan.decodes)] - 1).to(self.device),
        )

    def decode(self, decodes: Sequence[Decode]) -> DecodeBatch:
        seq_lens = tuple(d.seq_len for d in decodes)
        numbers = torch.tensor([[d.row for d in decodes], seq_lens, [d.verified_id for d in decodes]]).to(self.device)
        return DecodeBatch(
            rows=numbers[0],
            seq_lens=numbers[1],
            verified_id=numbers[2],
            seq_lens_host=seq_lens,
            sampling=self._sampling_of(decodes),
            req_to_token=self.req_to_token.tensor,
        )

    def prefill(self, chunks: Sequence[Chunk]) -> PrefillBatch:
        counts = tuple(len(c.tokens) for c in chunks)
        flat = [token for c in chunks for token in c.tokens]
        positions = [p for c in chunks for p in range(c.start, c.start + len(c.tokens))]
        numbers = torch.tensor([flat, positions]).to(self.device)
        ends = tuple(c.start + n for c, n in zip(chunks, counts, strict=True))
        rows = torch.tensor([c.row for c in chunks], device=self.device)
        attention = batch_arguments(rows, counts, ends, self.req_to_token.tensor, Causal())
        return PrefillBatch(numbers[0], numbers[1], attention, counts)

    def _sampling_of(self, decodes: Sequence[Decode]) -> SamplingBatch:
        """The same requests in the same order, as in most cycles, keep their tensors."""
        settings, kept = tuple(d.sampling for d in decodes), self._sampling[0]
        if len(settings) != len(kept) or not all(map(operator.is_, settings, kept)):
            self._sampling = (settings, SamplingBatch.of(settings, self.device))
        return self._sampling[1]
