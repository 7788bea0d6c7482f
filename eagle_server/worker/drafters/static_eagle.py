"""EAGLE heads that draft the nodes of a static tree (vLLM's speculative_token_tree), level by level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBackend, AttentionBatch, AttentionPlan, Layout, TreeMask
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.speculation.draft_input import EagleDraftInput
from eagle_server.speculation.static_tree import Level, StaticTree
from eagle_server.speculation.tree import TreeNodes
from eagle_server.worker.batch import DecodeBatch
from eagle_server.worker.draft_token_mask import DraftTokenMask
from eagle_server.worker.drafters.eagle import EagleDrafter
from eagle_server.worker.graphs import Graphs


class StaticEagleDrafter(EagleDrafter):
    """Extends like `EagleDrafter`; every level takes the children of the ranks that the tree names, best or not."""

    def __init__(
        self, head: DraftHead, attention: AttentionBackend, tree: StaticTree, graphs: Graphs | None = None
    ) -> None:
        depth, size = len(tree.levels), tree.size + 1
        super().__init__(head, attention, num_steps=depth, topk=tree.topk, draft_token_num=size, graphs=graphs)
        self.tree = tree

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> TreeNodes:  # type: ignore[override]
        """A forward for each level that has children; the first level is what draft-extend already found."""
        window = self.tree.window
        lens = tuple(length + window for length in batch.seq_lens_host)
        layouts = [Layout((rows,) * len(lens), lens, window=window) for rows in self.tree.rows]
        distinct = {layout: self.attention.plan(layout) for layout in layouts}
        keys = tuple(each.graph_key for each in distinct.values())
        key = None if None in keys or not keys or batch.token_mask.is_active else ("propose", keys)
        prepared = [distinct[layout] for layout in layouts]
        function = partial(self._grow, prepared, layouts, batch.req_to_token, batch.token_mask)
        first = batch.token_mask.without_refused(draft.topk_index, draft.topk_logp)
        return self.graphs.run(key, function, batch.rows, batch.seq_lens, first, draft.hidden_states)

    def _grow(  # noqa: PLR0913, PLR0917  bound arguments first, then the captured inputs
        self,
        prepared: Sequence[AttentionPlan],
        layouts: Sequence[Layout],
        req_to_token: Tensor,
        token_mask: DraftTokenMask,
        rows: Tensor,
        seq_lens: Tensor,
        topk_index: Tensor,
        hidden: Tensor,
    ) -> TreeNodes:
        bs = len(rows)
        if len(layouts) > 1:
            self._clear_later(rows, seq_lens, req_to_token)
        first, *deeper = self.tree.levels
        tokens, feedback = [topk_index.index_select(1, first.picks)], hidden[:, None]
        for step, (level, below) in enumerate(zip(self.tree.levels, deeper, strict=False)):
            attention = self._attention(level, step, rows, seq_lens, req_to_token, layouts[step])
            count, fed = len(level.fed), tokens[-1].index_select(1, level.fed)
            token_mask = token_mask.advance(fed, level.parents.expand(bs, -1))
            out = self.head(
                (fed.clamp(min=0) if token_mask.is_active else fed).view(-1),  # a refused node is padding
                feedback.index_select(1, level.parents).flatten(0, 1),
                (seq_lens + step)[:, None].expand(-1, count).reshape(-1),
                prepared[step].bind(attention),
            )
            logp, children = self._best(out.normed, token_mask)
            children = token_mask.without_refused(children, logp).view(bs, -1)  # [bs, rows * topk]
            tokens.append(children.index_select(1, below.picks))
            feedback = out.feedback.unflatten(0, (bs, count))
        parents = self.tree.parents.expand(bs, -1)
        return TreeNodes(torch.cat(tokens, dim=1), parents, spec_steps=self.num_steps)

    def _attention(
        self, level: Level, step: int, rows: Tensor, seq_lens: Tensor, req_to_token: Tensor, layout: Layout
    ) -> AttentionBatch:
        """One pass of a level's fed nodes over prefix and window; they see their ancestors and themselves."""
        bs, count = len(rows), len(level.fed)
        places = seq_lens[:, None] + torch.arange(level.start, level.start + count, device=rows.device)
        mask = TreeMask(
            level.sees.expand(bs, -1, -1),
            row_depths=torch.full((bs, count), step, device=rows.device),
            column_depths=self.tree.slot_depths.expand(bs, -1),
        )
        slots = req_to_token.index_select(0, rows).gather(1, places).view(-1).long()
        return AttentionBatch(rows, seq_lens + self.tree.window, req_to_token, slots, mask, layout)

    def _clear_later(self, rows: Tensor, seq_lens: Tensor, req_to_token: Tensor) -> None:
        """Steps read the slots of later steps, masked; whatever freed KV stands there must not be NaN."""
        later = torch.arange(self.tree.rows[0], self.tree.window, device=rows.device)
        slots = req_to_token.index_select(0, rows).gather(1, seq_lens[:, None] + later)
        self.attention.pool.clear(slots.view(-1).long())
