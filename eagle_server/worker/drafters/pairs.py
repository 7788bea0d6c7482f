"""Reads pairs of a token and the target's feature before it into a head's KV: EAGLE-1/2/3 and MTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from eagle_server.attention.batches import extend_batch, extend_layout, pieces_batch
from eagle_server.attention.interface import AttentionBackend, AttentionPlan, Layout, PagedRequests
from eagle_server.attention.spec_info import DraftWindow, EagleDraftInput
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.ops.device import upload
from eagle_server.ops.native.drafting import DraftRequests, HeadWeights, NativeHead
from eagle_server.ops.tree.accepted import newest_rows
from eagle_server.worker.batch.accepted_tokens import AcceptedTokens
from eagle_server.worker.batch.batch import DecodeBatch, PromptBatch, PromptPieces, Prompts
from eagle_server.worker.batch.draft_ranking import DraftRanking
from eagle_server.worker.drafters.interface import DrafterSetup, vocabulary_of
from eagle_server.worker.drafters.row_states import RowStates


class PairReader:
    """Stores the pair (token p + 1, feature of p) in slot p. Draft-extend also finds the first level of the trees."""

    uses_features = extends_ahead = True

    def __init__(self, head: DraftHead, attention: AttentionBackend, setup: DrafterSetup) -> None:
        tree = setup.tree
        self.head, self.attention, self.topk, self.graphs = head, attention, tree.topk, setup.graphs
        self.windows = {
            topk: DraftWindow.of(topk, (tree.model_steps - 1) * topk, setup.device) for topk in range(1, tree.topk + 1)
        }
        self.vocabulary = vocabulary_of(head, setup.device)
        rows = (setup.requests, tree.steps + 1)
        self._states = None if head.num_layers == 1 else RowStates(head, *rows, setup.device)
        self.reads_late = self._states is None

    def forget(self, req_pool_index: int) -> None:
        """The next request overwrites the KV."""
        if self._states is not None:
            self._states.forget(req_pool_index)

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally. Few rows are one captured forward, as they are in verification."""
        features = prompts.features
        if features is not None and prompts.pieces is not None and self._has_read(*prompts.pieces, features):
            return
        if prompts.pairs is not None and features is not None:
            self.read(prompts.pairs, features)

    def read(self, batch: PromptBatch, features: Tensor | None) -> None:
        """Write the KV of prompt rows. features: [rows, F]; None: the head ignores them."""
        bound = self.attention.plan(batch.attention.layout).bind(batch.attention)
        before = None if self._states is None else self._states.reading(batch)
        given = batch.tokens if features is None else features
        self.head.extend(batch.tokens, given, batch.positions, bound, before)

    def _has_read(self, pieces: PromptPieces, req_to_token: Tensor, features: Tensor) -> bool:
        """Read the prompts in a captured forward; False: none is captured."""
        layout = replace(pieces.layout, chunks=len(pieces.layout.q_lens))
        key = self.attention.key_of(layout) if self._states is None and self.graphs.captures else None
        if key is None:
            return False
        source = np.zeros(sum(layout.q_lens), dtype=np.int64)  # padding may be any row
        source[pieces.places] = np.arange(len(features))
        numbers = upload(np.concatenate([pieces.numbers, source]), features.device)
        rows, count = len(source), len(layout.q_lens)
        fixed, indices, kv_lens, of_rows = numbers.split_with_sizes([4 * rows, count, count, rows])
        requests = PagedRequests(indices, kv_lens, req_to_token)
        function = partial(self._read_pieces, self.attention.plan(layout), pieces.layout)
        self.graphs.run(("read", key), function, requests, fixed, features.index_select(0, of_rows))
        return True

    def _read_pieces(
        self, plan: AttentionPlan, layout: Layout, requests: PagedRequests, numbers: Tensor, features: Tensor
    ) -> None:
        """numbers: the first four of `PromptPieces`, each of all rows."""
        tokens, positions, slots, row_slots = numbers.view(4, -1)
        bound = plan.bind(pieces_batch(requests, slots, row_slots, layout))
        self.head.extend(tokens, features, positions, bound)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        """Draft-extend: rewrite the draft KV of accepted tokens from the target's features, causally.

        Every request has `extend_width` rows. Rows past its accepted tokens come last, so no row that counts reads
        them, and the next cycle overwrites their KV.
        """
        layout = extend_layout(batch.seq_lens_host, batch.extend_lens_host, batch.extend_width)
        plan = self.attention.plan(layout)
        ranking = batch.ranking.without_grammars()
        function = partial(self._extend, plan, layout, batch.accepted_tokens)
        key = None if plan.graph_key is None else ("extend", plan.graph_key)
        draft = self.graphs.run(key, function, batch.requests, batch.extend_lens, ranking)
        if not batch.ranking.has_grammars:
            return draft
        assert draft.normed is not None
        logp, tokens = self.best(draft.normed, batch.ranking)
        return replace(draft, topk_logp=logp, topk_index=tokens)

    def best(self, normed: Tensor, ranking: DraftRanking) -> tuple[Tensor, Tensor]:
        """Scores and target ids of the topk children, [rows, topk]."""
        return ranking.best(self.head.logits(normed), self.topk, self.vocabulary)

    def _extend(
        self,
        plan: AttentionPlan,
        layout: Layout,
        accepted: AcceptedTokens,
        requests: PagedRequests,
        extend_lens: Tensor,
        ranking: DraftRanking,
    ) -> EagleDraftInput:
        width = layout.q_lens[0]
        tokens, features, positions, first = accepted.extend_rows(requests, extend_lens, width)
        bound = plan.bind(extend_batch(requests, first, layout))
        before = None if self._states is None else self._states.extending(requests.req_pool_indices, first, width)
        out = self.head.extend(tokens, features, positions, bound, before)
        normed, hidden = newest_rows(out.normed, out.feedback, extend_lens, self.topk)
        logp, best = self.best(normed, ranking)
        return EagleDraftInput.first(logp, best, hidden, self.windows[self.topk], normed)


class NativePairReader(PairReader):
    """By native kernels, one call each. Grammars and sampling parameters take the torch road."""

    def __init__(
        self,
        head: DraftHead,
        attention: AttentionBackend,
        setup: DrafterSetup,
        weights: HeadWeights,
        caches: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """caches: keys and values of the head's layers."""
        super().__init__(head, attention, setup)
        self.native = NativeHead(weights, caches, self.topk, self.vocabulary)

    def read(self, batch: PromptBatch, features: Tensor | None) -> None:
        bound = self.attention.plan(batch.attention.layout).bind(batch.attention)
        assert bound.native_rows is not None
        self.native.prefill(batch.tokens, features, batch.positions, bound.native_rows)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        if not batch.ranking.is_plain:
            return super().extend(batch)
        feedback, logp, tokens = self.native.extend(native_requests(batch), *batch.accepted_tokens.storage)
        hidden = feedback.repeat_interleave(self.topk, dim=0)
        return EagleDraftInput.first(logp, tokens, hidden, self.windows[self.topk])


def native_requests(batch: DecodeBatch) -> DraftRequests:
    """The requests as native drafting takes them."""
    fields = (batch.seq_lens, batch.extend_lens, batch.req_pool_indices, batch.req_to_token)
    noise = batch.ranking.noise
    if noise is None:
        return DraftRequests(*fields)
    return DraftRequests(*fields, noise.keys, batch.ranking.positions, noise.temperature)
