"""The target's forwards: verify windows and prompt chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eagle_server.attention.batches import (
    MIXED_CHUNKS,
    MIXED_ROWS,
    mixed_batch,
    mixed_layout,
    pieces_batch,
    verify_batch,
    verify_layout,
)
from eagle_server.attention.interface import AttentionBackend, AttentionPlan, BoundAttention, Layout, PagedRequests
from eagle_server.attention.recurrent import MixedRows, PromptRows, TreeRows
from eagle_server.attention.spec_info import EagleVerifyInput
from eagle_server.cache.pool import Pool
from eagle_server.models.ranks import RankGroup
from eagle_server.models.targets.interface import Target, TargetOutput
from eagle_server.ops.device import upload
from eagle_server.plan import NO_MOVES, Chunk, StateMoves, StateSave
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Tree, compacted
from eagle_server.worker.batch.batch import DecodeBatch, PromptBatch, PromptPieces
from eagle_server.worker.graphs import GraphKey, Graphs
from eagle_server.worker.host import to_host
from eagle_server.worker.rank_messages import send_keep, send_prefill, send_settle, send_verify
from eagle_server.worker.request_states import RequestStates


@dataclass(frozen=True)
class Verified:
    """Logits [n, vocab] of the computed nodes, in `Target.logits_dtype`, and features [n, F] for the drafter.

    The rows are those of `Tree.retrive_index`.
    """

    logits: Tensor
    features: Tensor

    def rows_of(self, requests: Tensor) -> Verified:
        """The rows of some requests, int64 [n], if each has one row."""
        return Verified(self.logits.index_select(0, requests), self.features.index_select(0, requests))


@dataclass(frozen=True)
class Prefilled:
    """features [rows, F] of all chunk rows; logits [n, vocab], as in `Verified`, of which each chunk has `logit_rows`.

    padding: rows that were computed beside those of the chunks.
    """

    features: Tensor
    logits: Tensor
    logit_rows: tuple[int, ...]
    padding: int = 0


class Verifier:
    """Runs the target over its KV pool, and the states of its recurrent layers if it has some.

    ranks: those above 0 are told to run theirs, see `worker.follower`.

    aux_boundaries: the residual streams that form the drafter's features, see `Target`; (): the last hidden states do.

    captured_rows: rows of the largest captured verify forward; 0: none. All captured ones write their logits to one
    buffer, so they are valid until the next verification. So are the features of captured mixed forwards.

    prefill_observers: see the chunks of each forward of `prefill`, and what the target gave for their rows.
    """

    def __init__(
        self,
        target: Target,
        attention: AttentionBackend,
        pool: Pool,
        graphs: Graphs | None = None,
        ranks: RankGroup | None = None,
        captured_rows: int = 0,
        states: RequestStates | None = None,
        aux_boundaries: tuple[int, ...] = (),
    ) -> None:
        self.target, self.attention, self.pool, self.states = target, attention, pool, states
        self.graphs, self.ranks, self.aux_boundaries = graphs or Graphs(), ranks, aux_boundaries
        config, device = target.config, target.embed.device
        logits, features = (captured_rows + most if captured_rows else 0 for most in (MIXED_CHUNKS, MIXED_ROWS))
        self._logits = torch.empty((logits, config.vocab_size), dtype=target.logits_dtype, device=device)
        width = max(1, len(aux_boundaries)) * config.hidden_size
        self._mixed_features = torch.empty((features, width), dtype=config.dtype, device=device)
        self.prefill_observers: list[Callable[[tuple[Chunk, ...], TargetOutput], None]] = []

    @property
    def settled(self) -> bool:
        """Whether the states of recurrent layers are at the ends of their texts."""
        return self.states is None or self.states.settled

    def settle(self, moves: StateMoves = NO_MOVES) -> None:
        """Move the states of recurrent layers along the last cycle's accepted paths. `moves`: copy some of them."""
        if self.states is None or (self.settled and moves == NO_MOVES):
            return
        if self.ranks is not None:
            send_settle(self.ranks, moves)
        self.states.settle(moves)

    def compacted(self, tree: Tree) -> Tree:
        """The trees as `verify` computes them: without the padding, if the attention backend allows that."""
        return compacted(tree) if self.attention.ragged_trees else tree

    def verify(self, batch: DecodeBatch, tree: Tree) -> Verified:
        """All nodes of all trees in one forward, under the tree mask."""
        self.settle()  # has an effect before a forward that runs ahead; `Worker.run` has settled before others
        layout = _layout_of(batch, tree)
        if self.ranks is not None:
            counts = None if tree.counts is None else layout.q_lens
            send_verify(self.ranks, batch.seq_lens_host, batch.req_pool_indices, tree, counts)
        return self.run_verify(layout, tree, batch.requests)

    def run_verify(self, layout: Layout, tree: Tree, requests: PagedRequests) -> Verified:
        """The verify forward of this rank."""
        plan = self.attention.plan(layout)
        key = None if plan.graph_key is None else ("verify", plan.graph_key)
        logits = None if key is None else self._logits[: sum(layout.q_lens)]
        function = partial(self._verify, plan, layout, logits)
        return self.graphs.run(key, function, tree.without_estimates(), requests)

    def _verify(
        self, plan: AttentionPlan, layout: Layout, logits: Tensor | None, tree: Tree, requests: PagedRequests
    ) -> Verified:
        batch = verify_batch(EagleVerifyInput(tree), requests, layout)
        if self.states is not None:
            batch = replace(batch, recurrent=TreeRows(self.states.pool, tree, requests.req_pool_indices))
        bound = plan.bind(batch)
        out = self.target(*_computed_nodes(tree), bound, self.aux_boundaries)
        return Verified(self.target.logits(out.hidden, logits), self._features(out))

    def prefill(self, batch: PromptBatch, chunks: tuple[Chunk, ...]) -> Prefilled:
        """Prompt chunks, causally. Logits only for rows that sample a token or need prompt log-probabilities."""
        rows, counts = _wanted_rows(chunks)
        if self.ranks is not None:
            send_prefill(self.ranks, chunks, rows)
        out, logits = self.run_prefill(batch, rows, *_pieces(chunks))
        for observe in self.prefill_observers:
            observe(chunks, out)
        return Prefilled(self._features(out), logits, counts)

    def mixes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether `mixed` may compute these chunks."""
        return (
            self.ranks is None
            and 0 < len(chunks) <= MIXED_CHUNKS
            and sum(len(chunk.tokens) for chunk in chunks) <= MIXED_ROWS
        )

    def mixed_key(self, batch: DecodeBatch, tree: Tree, pieces: PromptPieces) -> GraphKey | None:
        """The key of the graph of a mixed forward; None: it is not captured."""
        if self.states is not None:
            return None
        key = self.attention.key_of(mixed_layout(_layout_of(batch, tree), pieces.layout))
        return None if key is None else ("verify", key)

    def mixed(
        self,
        batch: DecodeBatch,
        tree: Tree,
        prompts: PromptBatch,
        chunks: tuple[Chunk, ...],
        pieces: PromptPieces | None = None,
    ) -> tuple[Verified, Prefilled]:
        """`verify` and `prefill` in one forward, which reads the weights once.

        pieces: the chunks for a captured forward, see `mixed_key`; None: it is launched eagerly.
        """
        self.settle()
        if pieces is not None:
            return self._mixed_captured(batch, tree, chunks, pieces)
        return self._mixed_eager(batch, tree, prompts, chunks)

    def _mixed_captured(
        self, batch: DecodeBatch, tree: Tree, chunks: tuple[Chunk, ...], pieces: PromptPieces
    ) -> tuple[Verified, Prefilled]:
        layout = mixed_layout(_layout_of(batch, tree), pieces.layout)
        plan = self.attention.plan(layout)
        (rows, counts), computed = _wanted_rows(chunks), sum(layout.q_lens)
        wanted, nodes = np.zeros(MIXED_CHUNKS, dtype=np.int64), computed - sum(pieces.layout.q_lens)
        wanted[: len(rows)] = pieces.places[rows]
        numbers = upload(np.concatenate([pieces.numbers, wanted, pieces.places]), batch.seq_lens.device)
        fixed, places = numbers.tensor_split([len(pieces.numbers) + MIXED_CHUNKS])
        out = self._logits[: nodes + MIXED_CHUNKS], self._mixed_features[:computed]
        function = partial(self._mixed_pieces, plan, layout, out)
        both = self.graphs.run(("verify", plan.graph_key), function, tree.without_estimates(), batch.requests, fixed)
        features, logits = both.features[nodes:].index_select(0, places), both.logits[nodes : nodes + len(rows)]
        prefilled = Prefilled(features, logits, counts, computed - nodes - len(places))
        return Verified(both.logits[:nodes], both.features[:nodes]), prefilled

    def _mixed_pieces(
        self,
        plan: AttentionPlan,
        layout: Layout,
        out: tuple[Tensor, Tensor],
        tree: Tree,
        requests: PagedRequests,
        numbers: Tensor,
    ) -> Verified:
        """numbers: those of `PromptPieces`, and MIXED_CHUNKS rows of the pieces whose logits are wanted."""
        trees, pieces = layout.parts
        rows, count = sum(pieces.q_lens), len(pieces.q_lens)
        sizes = [rows, rows, rows, rows, count, count, MIXED_CHUNKS]
        tokens, positions, slots, row_slots, indices, kv_lens, wanted = numbers.split_with_sizes(sizes)
        verified = verify_batch(EagleVerifyInput(tree), requests, trees)
        paged = PagedRequests(indices, kv_lens, requests.req_to_token)
        prompts = pieces_batch(paged, slots, row_slots, pieces)
        bound = plan.bind(mixed_batch(verified, prompts, layout))
        return self._mixed_rows(bound, tree, (tokens, positions), wanted, out)

    def _mixed_eager(
        self, batch: DecodeBatch, tree: Tree, prompts: PromptBatch, chunks: tuple[Chunk, ...]
    ) -> tuple[Verified, Prefilled]:
        trees = verify_batch(EagleVerifyInput(tree), batch.requests, _layout_of(batch, tree))
        layout = mixed_layout(trees.layout, prompts.attention.layout)
        indices = upload(prompts.req_pool_indices, batch.seq_lens.device)  # `prompts` may have a page table of its own
        attention = mixed_batch(trees, replace(prompts.attention, req_pool_indices=indices), layout)
        nodes, (rows, counts) = sum(trees.layout.q_lens), _wanted_rows(chunks)
        if self.states is not None:
            pool = self.states.pool
            tree_rows = TreeRows(pool, tree, batch.req_pool_indices)
            attention = replace(attention, recurrent=MixedRows(tree_rows, PromptRows(pool, *_pieces(chunks)), nodes))
        bound = self.attention.plan(layout).bind(attention)
        wanted = upload(rows, batch.seq_lens.device)
        both = self._mixed_rows(bound, tree, (prompts.tokens, prompts.positions), wanted)
        prefilled = Prefilled(both.features[nodes:], both.logits[nodes:], counts)
        return Verified(both.logits[:nodes], both.features[:nodes]), prefilled

    def _mixed_rows(
        self,
        bound: BoundAttention,
        tree: Tree,
        prompts: tuple[Tensor, Tensor],
        wanted: Tensor,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Verified:
        """Logits of all nodes and of the wanted rows of the prompts, and features of all rows.

        prompts: tokens and positions. out: where to write both.
        """
        tokens, positions = (torch.cat(parts) for parts in zip(_computed_nodes(tree), prompts, strict=True))
        computed = self.target(tokens, positions, bound, self.aux_boundaries)
        nodes, features = len(tokens) - len(prompts[0]), self._features(computed)
        hidden = torch.cat([computed.hidden[:nodes], computed.hidden[nodes:].index_select(0, wanted)])
        if out is None:
            return Verified(self.target.logits(hidden), features)
        return Verified(self.target.logits(hidden, out[0]), out[1].copy_(features))

    def run_prefill(
        self, batch: PromptBatch, rows: list[int], pieces: Sequence[tuple[int, int, int]], saves: Sequence[StateSave]
    ) -> tuple[TargetOutput, Tensor]:
        """The prefill forward of this rank: the target's output for all rows, and logits of `rows`.

        pieces, saves: as `PromptRows` has them.
        """
        recurrent = None if self.states is None else PromptRows(self.states.pool, pieces, saves)
        bound = self.attention.plan(batch.attention.layout).bind(replace(batch.attention, recurrent=recurrent))
        out = self.target(batch.tokens, batch.positions, bound, self.aux_boundaries)
        hidden = out.hidden.index_select(0, upload(rows, out.hidden.device))
        return out, self.target.logits(hidden)

    def keep(self, batch: DecodeBatch, tree: Tree, accepted: Accepted) -> None:
        """Move the accepted nodes' KV to the front of each window. States move in the next cycle.

        The next cycle overwrites the rest. The draft's KV does not move: draft-extend rewrites those slots.
        """
        branched, lengths = tree.topk != 1, {decode.req_pool_index: decode.seq_len for decode in batch.decodes}
        if self.ranks is not None and (branched or self.states is not None):
            send_keep(self.ranks, accepted.path, batch.requests, lengths, branched=branched)
        self.run_keep(accepted.path, batch.requests, lengths, branched=branched)

    def run_keep(self, path: Tensor, requests: PagedRequests, lengths: Mapping[int, int], *, branched: bool) -> None:
        """What this rank keeps. lengths: as `RequestStates.accept` has them. A chain's path is in place already."""
        if self.states is not None:
            self.states.accept(path, requests.req_pool_indices, lengths)
        if branched:
            self.pool.keep(path, requests.seq_lens, requests.req_pool_indices, requests.req_to_token)

    def _features(self, out: TargetOutput) -> Tensor:
        """What the drafter reads, in the model's dtype. Logits are made of what may be more exact."""
        return out.hidden.to(self.target.config.dtype) if out.aux is None else out.aux


def _layout_of(batch: DecodeBatch, tree: Tree) -> Layout:
    counts = None if tree.counts is None else to_host(tree.counts)[0]
    return verify_layout(batch.seq_lens_host, tree.size, tree.topk, counts)


def _computed_nodes(tree: Tree) -> tuple[Tensor, Tensor]:
    """Tokens and positions of the nodes that are computed, int64 [n] each."""
    tokens, positions = tree.tokens.view(-1).clamp(min=0), tree.positions.view(-1)
    if tree.rows is not None:
        tokens, positions = tokens.index_select(0, tree.rows), positions.index_select(0, tree.rows)
    return tokens, positions


def _wanted_rows(chunks: Sequence[Chunk]) -> tuple[list[int], tuple[int, ...]]:
    """The rows of the chunks whose logits are read, and how many of each chunk."""
    rows, counts, end = list[int](), list[int](), 0
    for chunk in chunks:
        start, end = end, end + len(chunk.tokens)
        wanted = range(start if chunk.prompt_logprobs else end - 1, end)
        if not chunk.prompt_logprobs and chunk.next_token is not None:
            wanted = range(0)
        rows.extend(wanted)
        counts.append(len(wanted))
    return rows, tuple(counts)


def _pieces(chunks: Sequence[Chunk]) -> tuple[list[tuple[int, int, int]], list[StateSave]]:
    """`chunks` and `saves` as `PromptRows` has them."""
    pieces = [(chunk.req_pool_index, chunk.start, len(chunk.tokens)) for chunk in chunks]
    return pieces, [save for chunk in chunks for save in chunk.saves]
