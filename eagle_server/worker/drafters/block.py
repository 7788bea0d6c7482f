"""Block drafters: one forward scores the tokens of all levels, and a tree grows over them without another one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eagle_server.attention.batches import (
    cache_locations,
    extend_batch,
    extend_layout,
    window_batch,
    window_layout,
)
from eagle_server.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    BoundAttention,
    Layout,
    PagedRequests,
    TreeMask,
)
from eagle_server.models.drafts.block import BlockAttention, BlockHead
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree import Tree
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.batch.accepted_tokens import AcceptedTokens
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.batch.draft_ranking import DraftRanking
from eagle_server.worker.drafters.interface import DrafterSetup, ModelDrafter
from eagle_server.worker.drafters.rows import RowTrees
from eagle_server.worker.graphs import GraphKey


@dataclass(frozen=True)
class ContextWritten:
    """The context's draft KV reaches the root. There is nothing else to know."""

    def rows_of(self, requests: Tensor) -> ContextWritten:
        return self


@dataclass(frozen=True)
class _Planned:
    """The forward of the rows in causal layers, or in the others."""

    plan: AttentionPlan
    layout: Layout

    def bind(self, requests: PagedRequests) -> BoundAttention:
        rows, device = self.layout.q_lens[0], requests.seq_lens.device
        if self.layout.mask_width is None:
            return self.plan.bind(extend_batch(requests, requests.seq_lens, self.layout))
        bs, depths = len(requests.seq_lens), torch.arange(rows, device=device)
        every = torch.ones(bs, rows, rows, dtype=torch.bool, device=device)
        mask = TreeMask(every, depths.expand(bs, -1), depths.expand(bs, -1))
        return self.plan.bind(window_batch(mask, 0, requests, self.layout))


def lookahead(tree: TreeConfig) -> int:
    """KV slots after a request's text: the rows of draft-extend, or a block in their place: the root and the levels."""
    return tree.steps + 1


def block_drafter(head: BlockHead, setup: DrafterSetup) -> ModelDrafter[ContextWritten]:
    """A reader of the context, and a proposer of the rows behind it."""
    rows = {min(steps, setup.tree.model_steps) + head.first_draft for steps, *_ in setup.tree.shapes(1)}
    attention = setup.attention(rows)
    return ModelDrafter(ContextReader(head, attention, setup), BlockTrees(head, attention, setup))


class ContextReader:
    """Writes the context's KV from the target's features alone."""

    uses_features = extends_ahead = True
    reads_late = False

    def __init__(self, head: BlockHead, attention: AttentionBackend, setup: DrafterSetup) -> None:
        self.head, self.attention = head, attention
        self.graphs, self.graph_sizes = setup.graphs, frozenset(setup.graph_sizes)

    def forget(self, req_pool_index: int) -> None:
        """The next request overwrites the KV."""

    def prefill(self, prompts: Prompts) -> None:
        """The context's KV of prompt rows. A row needs its feature alone, not the token after it."""
        if prompts.pairs is not None and prompts.features is not None:
            batch = prompts.pairs
            slots = batch.attention.out_cache_loc
            self.head.write_context(prompts.features, batch.positions, slots, self.attention)

    def extend(self, batch: DecodeBatch) -> ContextWritten:
        """The context's KV of accepted tokens. Rows past these are scratch behind the context, as blocks are."""
        size, width = len(batch.seq_lens_host), batch.extend_width
        key = ("extend", size, width) if size in self.graph_sizes else None
        function = partial(self._extend, batch.accepted_tokens, width)
        return self.graphs.run(key, function, batch.requests, batch.extend_lens)

    def _extend(
        self, accepted: AcceptedTokens, width: int, requests: PagedRequests, extend_lens: Tensor
    ) -> ContextWritten:
        first = requests.seq_lens - extend_lens
        _, features = accepted.take(requests.req_pool_indices, width)
        positions = (first[:, None] + torch.arange(width, device=first.device)).view(-1)
        slots = cache_locations(requests.req_pool_indices, first, width, requests.req_to_token)
        self.head.write_context(features, positions, slots, self.attention)
        return ContextWritten()


class BlockTrees(RowTrees):
    """One forward of a block's rows. Their own KV is scratch behind the context: draft-extend overwrites it."""

    head: BlockHead

    def __init__(self, head: BlockHead, attention: AttentionBackend, setup: DrafterSetup) -> None:
        edges = () if head.edges is None else (head.edge, head.edges.candidates, head.edges.native_rows)
        super().__init__(head, setup, *edges)
        self.attention = attention

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        """One, of the rows that the levels need."""
        return 1, shape.steps + self.head.first_draft

    def propose(self, draft: ContextWritten, batch: DecodeBatch) -> Tree:
        """One forward of the rows that the levels need, then a tree over their scores."""
        rows, lens = batch.steps + self.head.first_draft, batch.seq_lens_host
        planned = []
        for causal in sorted(set(self.head.block.causal)):
            layout = extend_layout(lens, (0,) * len(lens), rows) if causal else window_layout(lens, rows, rows)
            planned.append((causal, _Planned(self.attention.plan(layout), layout)))
        keys = tuple(each.plan.graph_key for _, each in planned)
        key: GraphKey = ("propose", keys, batch.steps, batch.nodes)
        function = partial(self._propose, dict(planned), batch.steps, batch.nodes)
        captured = None if None in keys or batch.ranking.has_grammars else key
        return self.graphs.run(captured, function, batch.verified_id, batch.requests, batch.ranking)

    def _propose(
        self,
        planned: dict[bool, _Planned],
        steps: int,
        nodes: int,
        verified_id: Tensor,
        requests: PagedRequests,
        ranking: DraftRanking,
    ) -> Tree:
        kinds = (planned.get(kind) for kind in (True, False))
        causal, bidirectional = (None if each is None else partial(each.bind, requests) for each in kinds)
        rows, seq_lens = steps + self.head.first_draft, requests.seq_lens
        attention = BlockAttention(causal, bidirectional, rows)
        positions = seq_lens[:, None] + torch.arange(rows, device=seq_lens.device)
        y = self.head.rows(verified_id, positions, attention)[:, self.head.first_draft :]  # [bs, steps, H]
        return self.tree_over(nodes, y, verified_id, seq_lens, ranking)
