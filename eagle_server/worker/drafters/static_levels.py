"""Proposes the nodes of a static tree (vLLM's speculative_token_tree), level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from eagle_server.attention.batches import window_batch, window_layout
from eagle_server.attention.interface import AttentionPlan, Layout, PagedRequests, TreeMask
from eagle_server.attention.spec_info import EagleDraftInput
from eagle_server.ops.kv.indices import window_slots
from eagle_server.plan import TreeShape
from eagle_server.speculation.static_tree import Level, StaticTree
from eagle_server.speculation.tree import Tree, build_tree
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.batch.draft_ranking import DraftRanking, finite_or_off
from eagle_server.worker.drafters.multi_step import clear_later
from eagle_server.worker.drafters.pairs import PairReader
from eagle_server.worker.graphs import Graphs


class StaticLevels:
    """Each level takes the children whose ranks the tree lists, whatever their scores."""

    widest = 1
    proposes_ahead = False  # the window of a static tree would not fit behind the accepted tokens

    def __init__(self, reader: PairReader, tree: StaticTree, graphs: Graphs) -> None:
        self.reader, self.head, self.attention, self.graphs = reader, reader.head, reader.attention, graphs
        self.tree, self.steps = tree, len(tree.levels)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        """Draft-extend finds the first level."""
        return max(0, shape.steps - 1), shape.topk or self.widest

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Tree:
        """One forward for each level that has children. Draft-extend has already found the first level."""
        layouts = [
            window_layout(batch.seq_lens_host, rows, self.tree.window) for rows in self.tree.rows[: batch.steps - 1]
        ]
        distinct = {layout: self.attention.plan(layout) for layout in dict.fromkeys(layouts)}
        keys = tuple(plan.graph_key for plan in distinct.values())
        key = None if None in keys or not keys or batch.ranking.has_grammars else ("propose", keys)
        plans = [distinct[layout] for layout in layouts]
        function = partial(self._grow, plans, layouts)
        first = replace(draft, normed=None)
        return self.graphs.run(key, function, first, batch.verified_id, batch.requests, batch.ranking)

    def _grow(
        self,
        plans: Sequence[AttentionPlan],
        layouts: Sequence[Layout],
        draft: EagleDraftInput,
        verified_id: Tensor,
        requests: PagedRequests,
        ranking: DraftRanking,
    ) -> Tree:
        seq_lens = requests.seq_lens
        bs = len(seq_lens)
        if len(layouts) > 1:
            slots = window_slots(requests.req_to_token, requests.req_pool_indices, seq_lens, self.tree.window)
            clear_later(self.attention, slots[:, self.tree.rows[0] :])
        first, *deeper = self.tree.levels
        tokens, scores = [draft.topk_index.index_select(1, first.picks)], [draft.topk_logp.index_select(1, first.picks)]
        feedback = draft.hidden_states[:: self.reader.topk].to(self.head.config.dtype)[
            :, None
        ]  # [bs, 1, H], the root's
        for step, (level, below) in enumerate(zip(self.tree.levels, deeper[: len(layouts)], strict=False)):
            count, fed = len(level.fed), tokens[-1].index_select(1, level.fed)
            ranking = ranking.advance(fed, level.parents.expand(bs, -1))
            mask, layout = self._mask(level, step, bs), layouts[step]
            attention = window_batch(mask, level.start, requests, layout)
            out = self.head.step(
                step + 1,
                fed.view(-1),
                feedback.index_select(1, level.parents).flatten(0, 1),
                (seq_lens + step)[:, None].expand(-1, count).reshape(-1),
                plans[step].bind(attention),
                is_last=step == len(layouts) - 1,
            )
            logp, children = self.reader.best(out.normed, ranking)
            paths = scores[-1].index_select(1, level.fed)[:, :, None] + logp.view(bs, count, -1)  # [bs, rows, topk]
            tokens.append(children.view(bs, -1).index_select(1, below.picks))
            scores.append(paths.flatten(1).index_select(1, below.picks))
            feedback = out.feedback.unflatten(0, (bs, count))
        drafts, worth = torch.cat(tokens, dim=1), finite_or_off(torch.cat(scores, dim=1))
        parents = self.tree.parents[: drafts.shape[1]].expand(bs, -1)
        tree = build_tree(verified_id, seq_lens, drafts, parents, len(tokens), worth)
        return ranking.without_refused(tree)

    def _mask(self, level: Level, step: int, bs: int) -> TreeMask:
        """The fed nodes of a level see their ancestors and themselves."""
        row_depths = torch.full((bs, len(level.fed)), step, device=level.sees.device)
        return TreeMask(level.sees.expand(bs, -1, -1), row_depths, self.tree.slot_depths.expand(bs, -1))
