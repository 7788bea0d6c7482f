"""Batches of one cycle: from the plan's host values to device tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.attention.batches import CAPTURED_PIECES, PIECE_ROWS, piece_ends, pieces_layout, prefill_batch
from eagle_server.attention.interface import AttentionBatch, Causal, Layout, PagedRequests
from eagle_server.cache.page_table import PageTable
from eagle_server.models.ranks import RankGroup
from eagle_server.ops.device import mirrors, upload
from eagle_server.ops.tree.accepted import next_lengths
from eagle_server.plan import Chunk, CyclePlan, Decode, RequestSampling
from eagle_server.request import SamplingParams
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.sampling import SamplingBatch
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.accepted_tokens import AcceptedTokens, UnreadPrompts
from eagle_server.worker.batch.draft_ranking import (
    BY_PROBABILITY,
    DraftRanking,
    GrammarPaths,
    KeyedNoise,
    SamplingParameters,
)
from eagle_server.worker.batch.penalizer_state import PenalizerStates
from eagle_server.worker.batch.verify_token_mask import VerifyTokenMask
from eagle_server.worker.budget.budget import CycleBudget
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.rank_messages import send_changes

Piece = tuple[int, int, Sequence[int]]  # of prompt: req_pool_index, first position, tokens
_PADDING = RequestSampling(SamplingParams(max_tokens=1, seed=0, temperature=0.0), key=0)


@dataclass(frozen=True)
class DecodeBatch:
    """The decoding requests of one cycle, padded to a batch size that a graph was captured for.

    Padding stands last: requests of length 1 in the page table's `pad_row`.
    """

    req_pool_indices: Tensor  # int64 [bs], rows of req_to_token
    seq_lens: Tensor  # int64 [bs]
    verified_id: Tensor  # int64 [bs]
    extend_lens: Tensor  # int64 [bs], entries of accepted_tokens that count
    decodes: tuple[Decode, ...]  # without padding
    seq_lens_host: tuple[int, ...]
    extend_lens_host: tuple[int, ...]
    extend_width: int  # rows of every request in draft-extend, at least the largest of extend_lens
    accepted_tokens: AcceptedTokens
    sampling: SamplingBatch
    req_to_token: Tensor  # int32 [max requests, width]
    ranking: DraftRanking = BY_PROBABILITY  # of the children of the roots
    steps: int = 0  # levels that a draft model drafts in this cycle
    nodes: int = 1  # the most nodes of a tree, root included
    topk: int = 0  # nodes that each draft step feeds; 0: as many as the flags say
    least_logp: float = -math.inf  # a drafter may leave out nodes whose score is lower

    @property
    def requests(self) -> PagedRequests:
        return PagedRequests(self.req_pool_indices, self.seq_lens, self.req_to_token)

    @property
    def size(self) -> int:
        """With its padding."""
        return len(self.seq_lens_host)

    @property
    def extend_rows(self) -> int:
        """Of draft-extend, all requests together."""
        return len(self.seq_lens_host) * self.extend_width

    def past_verified(self) -> DecodeBatch:
        """The same requests as if verified_id were computed: every length is one more."""
        return replace(self, seq_lens=self.seq_lens + 1, seq_lens_host=tuple(n + 1 for n in self.seq_lens_host))

    def after(self, accepted: Accepted) -> DecodeBatch:
        """The same requests with what they have accepted, for draft-extend.

        Only the device knows the lengths. On the host they are one more, and each extend_len is 1, so the rows begin at
        the old seq_len. Every request has as many rows as the trees could accept tokens.
        """
        after = next_lengths(self.seq_lens, accepted.accept_length, accepted.tokens)
        return replace(
            self,
            seq_lens=after.seq_lens,
            verified_id=after.verified_id,
            extend_lens=after.extend_lens,
            seq_lens_host=tuple(n + 1 for n in self.seq_lens_host),
            extend_lens_host=(1,) * len(self.seq_lens_host),
            extend_width=self.accepted_tokens.extend_width(accepted.tokens.shape[1]),
            ranking=replace(self.ranking, positions=after.following),
        )


@dataclass(frozen=True)
class PromptBatch:
    """Pieces of prompt, concatenated."""

    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    attention: AttentionBatch
    counts: tuple[int, ...]
    requests: tuple[int, ...]  # rows of attention.req_to_token
    req_pool_indices: tuple[int, ...]  # of the pieces, in the page table


@dataclass(frozen=True)
class Prompts:
    """Pieces of prompt as drafters read them: tokens alone, or pairs of token and feature."""

    chunks: tuple[Chunk, ...]
    rows: PromptBatch  # the target's rows
    make_pairs: Callable[[], PromptBatch] | None = None  # None: no features are read, or no row's next token is known
    features: Tensor | None = None  # [rows, F], of the pairs: the target's at the positions before the tokens
    pieces: tuple[PromptPieces, Tensor] | None = None  # the pairs as a captured forward takes them, and the page table

    @cached_property
    def pairs(self) -> PromptBatch | None:
        """The pairs' tokens."""
        return None if self.make_pairs is None else self.make_pairs()


@dataclass(frozen=True)
class PromptPieces:
    """Prompt chunks in pieces of equal rows, with padding, for a captured forward: see `pieces_layout`.

    numbers: int64, tokens, positions, and slots to write and to read of all rows, then req_pool_indices and lengths of
    the pieces.
    places: int64 [rows of the chunks], their rows among those of the pieces.
    """

    layout: Layout
    numbers: NDArray[np.int64]
    places: NDArray[np.int64]


def prompt_batch(
    pieces: Sequence[Piece], req_to_token: Tensor, req_pool_indices: Sequence[int] | None = None
) -> PromptBatch:
    """Pieces of prompt, each with the request and position that it starts at.

    req_pool_indices: their requests in the page table, if req_to_token is a copy of a part of it.

    On a CPU the batch copies its rows of the page table: its requests may end before the drafter reads the prompts.
    """
    device, counts = req_to_token.device, tuple(len(tokens) for _, _, tokens in pieces)
    ends = tuple(start + len(tokens) for _, start, tokens in pieces)
    flat = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, _, tokens in pieces])
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    numbers = upload(np.stack([flat, positions]), device)
    requests = tuple(index for index, _, _ in pieces)
    given = requests if req_pool_indices is None else tuple(req_pool_indices)
    if not mirrors(device):
        req_to_token, requests = req_to_token[list(requests), : max(ends)], tuple(range(len(pieces)))
    indices, kv_lens = upload([requests, ends], device)
    attention = prefill_batch(indices, kv_lens, req_to_token, Causal(), Layout(counts, ends))
    return PromptBatch(numbers[0], numbers[1], attention, counts, requests, given)


class Batches:
    """Builds a cycle's batches. Owns what waits for the drafter, and the penalizer states.

    `steps` is the depth of the trees. `sizes`: batch sizes that decodes are padded to, if there are any, because
    graphs are captured for them. `coupling`: drafters rank by the noise of the target's draws as well. `estimates`:
    they learn from what was accepted.
    """

    def __init__(
        self,
        table: PageTable,
        *,
        vocab_size: int,
        steps: int = 0,
        sizes: Sequence[int] = (),
        coupling: bool = True,
        estimates: AcceptanceEstimates | None = None,
        ranks: RankGroup | None = None,
        unread: UnreadPrompts | None = None,
    ) -> None:
        device = self.device = table.tensor.device
        self.sizes, self.coupling, self.vocab_size = tuple(sizes), coupling, vocab_size
        self.estimates = estimates
        self.table, self.ranks, self.unread = table, ranks, unread or UnreadPrompts(0, 1)
        self.accepted_tokens = AcceptedTokens(
            table.pad_row + 1, steps + 1, device, lazy=not mirrors(device) and not sizes
        )
        self.steps = steps
        self.penalizers = PenalizerStates(table.pad_row + 1, vocab_size, device, steps)
        self.pad_row = table.pad_row
        nothing = ((), SamplingBatch.of((), device))
        self._sampling: dict[bool, tuple[tuple[RequestSampling, ...], SamplingBatch]] = {True: nothing, False: nothing}

    def begin(self, plan: CyclePlan) -> None:
        """Drop the state of released requests, and refresh the page table."""
        for req_pool_index in plan.released:
            self.accepted_tokens.forget(req_pool_index)
            self.unread.forget(req_pool_index)
            self.penalizers.forget(req_pool_index)
        changes = self.table.refresh()
        if changes is not None and self.ranks is not None:
            send_changes(self.ranks, changes)

    def can_draft(self, decodes: Sequence[Decode]) -> list[bool]:
        """Which requests may draft: they do not forbid it, and their accepted tokens are known."""
        return [decode.speculative and not self.accepted_tokens.is_lost(decode.req_pool_index) for decode in decodes]

    def draft_batch(self, batch: DecodeBatch, budget: CycleBudget, *, cut: bool = False) -> DecodeBatch | None:
        """The requests of the batch that draft in this cycle; None: there are none. `cut`: see `least_logp`."""
        if not budget.drafting or budget.nodes == 1:
            return None
        if len(budget.drafting) < len(batch.decodes):
            size = batch.size  # the shape was captured for the size of the whole batch
            some = [batch.decodes[i] for i in budget.drafting]
            batch = self.decode(some, drafting=True, size=size if size in self.sizes else 0)
        least_logp = budget.least_logp if cut else -math.inf
        return replace(batch, ranking=self._ranking(batch), least_logp=least_logp, **budget.shape._asdict())

    @property
    def has_backlog(self) -> bool:
        """Whether the drafter has something to read of any request's text before it drafts."""
        return bool(self.accepted_tokens.backlog_bytes) or not self.unread.is_empty

    def backlog_length(self, decode: Decode) -> int:
        """How many tokens the drafter must read before the request drafts, about."""
        unread = self.unread.rows(decode, self.table.slots)
        return unread + self.accepted_tokens.backlog_length(decode.req_pool_index)

    def backlog(self, decodes: Sequence[Decode]) -> Prompts | None:
        """What the drafter has not read of the requests' texts, for its prefill; None: there is nothing."""
        pieces, features = list[tuple[int, int, Sequence[int]]](), list[Tensor]()
        for decode in decodes:
            unread = self.unread.take(decode, self.table.slots)
            for start, rows in unread + self.accepted_tokens.backlog(decode.req_pool_index):
                pieces.append((decode.req_pool_index, start, decode.all_tokens[start + 1 : start + 1 + len(rows)]))
                features.append(rows)
        if not pieces:
            return None
        prompts = prompt_batch([(index, start + 1, tokens) for index, start, tokens in pieces], self.table.tensor)
        return Prompts((), prompts, partial(prompt_batch, pieces, self.table.tensor), torch.cat(features))

    def prefill(self, chunks: Sequence[Chunk]) -> PromptBatch:
        """The rows of all chunks for the target."""
        return prompt_batch([(c.req_pool_index, c.start, c.tokens) for c in chunks], self.table.tensor)

    def pieces(self, chunks: Sequence[Chunk]) -> PromptPieces | None:
        """The chunks as a captured mixed forward takes them; None: they do not fit one."""
        if any(chunk.prompt_logprobs for chunk in chunks):
            return None
        return self._in_pieces([(chunk.req_pool_index, chunk.start, chunk.tokens) for chunk in chunks])

    def _in_pieces(self, prompts: Sequence[Piece]) -> PromptPieces | None:
        spans = [(start, len(tokens)) for _, start, tokens in prompts]
        needed = sum(len(piece_ends(rows)) for _, rows in spans)
        count = next((count for count in CAPTURED_PIECES if count >= needed), 0)
        layout = pieces_layout(spans, count) if count else None
        if layout is None or max(layout.kv_lens) > self.table.width:
            return None
        rows = np.zeros((4, count * PIECE_ROWS), dtype=np.int64)
        indices, places, first = np.full(count, self.pad_row), list[NDArray[np.int64]](), 0
        for (index, _, tokens), (start, length) in zip(prompts, spans, strict=True):
            own, pieces = slice(first * PIECE_ROWS, first * PIECE_ROWS + length), len(piece_ends(length))
            slots = self.table.slots[index, start : start + length]
            rows[:, own] = tokens, np.arange(start, start + length), slots, slots
            rows[3, own.stop : (first + pieces) * PIECE_ROWS] = slots[-1]
            indices[first : first + pieces] = index
            places.append(np.arange(own.start, own.stop))
            first += pieces
        numbers = np.concatenate([rows.ravel(), indices, np.asarray(layout.kv_lens)])
        return PromptPieces(layout, numbers, np.concatenate(places))

    def prompt_sampling(self, chunks: Sequence[Chunk]) -> SamplingBatch:
        """How the first tokens after the prompts are sampled; chunks are the last ones of their prompts."""
        sampling = SamplingBatch.of([chunk.sampling for chunk in chunks], self.device, self.steps)
        sampling, token_mask = self._with_penalizer_state(sampling, chunks), self.token_mask(chunks)
        return sampling if token_mask is None else token_mask.sampling(sampling)

    def token_mask(self, scheduled: Sequence[Decode | Chunk], tree: Tree | None = None) -> VerifyTokenMask | None:
        """What grammars allow in these requests' draws; None: no request has a grammar."""
        if all(each.grammar_matcher is None for each in scheduled):
            return None
        return VerifyTokenMask.of(scheduled, self.device, tree)

    def prompts(self, chunks: tuple[Chunk, ...], rows: PromptBatch, features: Tensor | None) -> Prompts:
        """The prompts for the drafter: `rows` for the target, or each feature with the prompt's next token.

        A prompt's last row has no next token yet. It is recorded in the accepted tokens once the token is sampled.
        """
        pieces, kept, start, known = [], list[Tensor](), 0, list[Piece]()
        for chunk, request in zip(chunks, rows.requests, strict=True):
            if chunk.following and features is not None:
                pieces.append((request, chunk.start, chunk.following))
                known.append((chunk.req_pool_index, chunk.start, chunk.following))
                kept.append(features[start : start + len(chunk.following)])
            start += len(chunk.tokens)
        if not pieces:
            return Prompts(chunks, rows)
        pairs = partial(prompt_batch, pieces, rows.attention.req_to_token, [index for index, _, _ in known])
        given = kept[0] if len(kept) == 1 else torch.cat(kept)
        own = self._in_pieces(known) if self.sizes else None
        return Prompts(chunks, rows, pairs, given, None if own is None else (own, self.table.tensor))

    def decode(self, decodes: Sequence[Decode], *, drafting: bool = False, size: int = 0) -> DecodeBatch:
        """The batch of decoding requests, at least one. `drafting`: they are only some of the cycle's.

        size: with padding; 0: the smallest that a graph was captured for.
        """
        padding = (size or self._padded_size(len(decodes))) - len(decodes)
        extend_lens = self.accepted_tokens.counts(decodes) + (1,) * padding
        seq_lens = tuple(d.seq_len for d in decodes) + (1,) * padding
        indices = [d.req_pool_index for d in decodes] + [self.pad_row] * padding
        verified = [d.verified_id for d in decodes] + [0] * padding
        numbers, widest = upload([indices, seq_lens, verified, extend_lens], self.device), max(extend_lens)
        return DecodeBatch(
            req_pool_indices=numbers[0],
            seq_lens=numbers[1],
            verified_id=numbers[2],
            extend_lens=numbers[3],
            decodes=tuple(decodes),
            seq_lens_host=seq_lens,
            extend_lens_host=extend_lens,
            extend_width=self.accepted_tokens.extend_width(widest) if self.sizes else widest,
            accepted_tokens=self.accepted_tokens,
            sampling=self._with_penalizer_state(self._sampling_of(decodes, padding, drafting=drafting), decodes),
            req_to_token=self.table.tensor,
        )

    def join(self, batch: DecodeBatch, chunks: Sequence[Chunk], tokens: Tensor) -> DecodeBatch:
        """A batch of `DecodeBatch.after`, and the requests whose prompts these last chunks have completed.

        tokens: int64 [n, 1], their first ones, which only the device knows.
        """
        joining = [
            Decode(chunk.req_pool_index, chunk.end, 0, chunk.sampling, grammar_matcher=chunk.grammar_matcher)
            for chunk in chunks
        ]
        decodes, count = batch.decodes + tuple(joining), len(batch.decodes)
        padding = self._padded_size(len(decodes)) - len(decodes)
        indices = [each.req_pool_index for each in joining] + [self.pad_row] * padding
        lens = tuple(each.seq_len for each in joining) + (1,) * padding
        numbers = upload([indices, lens, [0] * len(lens), [1] * len(lens)], self.device)
        numbers[2, : len(joining)] = tokens[:, 0]
        fields = (batch.req_pool_indices, batch.seq_lens, batch.verified_id, batch.extend_lens)
        known = torch.stack([each[:count] for each in fields])
        indices_of, seq_lens, verified_id, extend_lens = torch.cat([known, numbers], dim=1)
        joined = replace(
            batch,
            req_pool_indices=indices_of,
            seq_lens=seq_lens,
            verified_id=verified_id,
            extend_lens=extend_lens,
            decodes=decodes,
            seq_lens_host=batch.seq_lens_host[:count] + lens,
            extend_lens_host=(1,) * (len(decodes) + padding),
            sampling=self._sampling_of(decodes, padding, drafting=False),
        )
        return replace(joined, ranking=self._ranking(joined))

    def _ranking(self, batch: DecodeBatch) -> DraftRanking:
        """How drafters rank the children of the roots.

        A captured function reads keys and temperatures only. An all-greedy batch on a CPU needs neither.
        """
        sampling, noise, parameters = batch.sampling, None, None
        if self.coupling and (self.sizes or mirrors(self.device) or sampling.stochastic is not None):
            noise = KeyedNoise(sampling.all_keys, sampling.all_temperature)
        if self.coupling and not self.sizes and (sampling.transforms or sampling.floored is not None):
            parameters = SamplingParameters(sampling, self.vocab_size)
        return DraftRanking(
            batch.seq_lens + 1,
            GrammarPaths.of(batch.decodes),
            parameters,
            noise,
            self.estimates,
            None if self.estimates is None else sampling.temperature_bin,
        )

    def _padded_size(self, size: int) -> int:
        return next((bucket for bucket in self.sizes if bucket >= size), size)

    def _sampling_of(self, decodes: Sequence[Decode], padding: int, *, drafting: bool) -> SamplingBatch:
        """The sampling tensors. They are reused while the same requests decode in the same order, as in most cycles."""
        settings, kept = tuple(d.sampling for d in decodes) + (_PADDING,) * padding, self._sampling[drafting][0]
        if len(settings) != len(kept) or not all(map(operator.is_, settings, kept)):
            self._sampling[drafting] = (settings, SamplingBatch.of(settings, self.device, self.steps))
        return self._sampling[drafting][1]

    def _with_penalizer_state(self, sampling: SamplingBatch, scheduled: Sequence[Decode | Chunk]) -> SamplingBatch:
        state = self.penalizers.state_of(scheduled) if sampling.transforms else None
        return sampling if state is None else replace(sampling, penalizer_state=state)
