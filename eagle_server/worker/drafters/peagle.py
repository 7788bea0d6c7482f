"""P-EAGLE: draft-extend and the rows of all levels are one forward, and a tree grows over the rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eagle_server.attention.batches import extend_batch, extend_layout
from eagle_server.attention.interface import AttentionPlan, Layout, PagedRequests
from eagle_server.models.drafts.peagle import PEagleHead
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree import Tree
from eagle_server.speculation.tree_config import TreeConfig, extend_widths
from eagle_server.worker.batch.accepted_tokens import AcceptedTokens
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.interface import DrafterSetup, ModelDrafter
from eagle_server.worker.drafters.rows import RowTrees


@dataclass(frozen=True)
class DraftRows:
    """y [bs, levels, H]: row j scores the tokens of level j + 1."""

    y: Tensor

    def rows_of(self, requests: Tensor) -> DraftRows:
        return DraftRows(self.y.index_select(0, requests))


def lookahead(tree: TreeConfig) -> int:
    """KV slots after a request's text: the rows of draft-extend, and mask slots of all levels but the first."""
    return tree.steps + 1 + tree.model_steps - 1


def peagle_drafter(head: PEagleHead, setup: DrafterSetup) -> ModelDrafter[DraftRows]:
    """A reader that computes the rows as well, and trees over them."""
    return ModelDrafter(MaskSlots(head, setup), ReadRows(head, setup))


class MaskSlots:
    """Reads pairs, and computes mask slots behind them. These slots' KV is scratch: draft-extend overwrites it.

    With captured graphs draft-extend may run before the cycle's number of levels is known. It computes the rows of all
    levels then, and otherwise those of the cycle's.
    """

    uses_features = extends_ahead = True
    reads_late = False

    def __init__(self, head: PEagleHead, setup: DrafterSetup) -> None:
        levels = setup.tree.model_steps - 1  # but the first, which the newest pair's row scores
        self.head, self.steps, self.graphs = head, setup.tree.model_steps, setup.graphs
        self.attention = setup.attention({width + levels for width in extend_widths(setup.tree.steps)})

    def forget(self, req_pool_index: int) -> None:
        """The next request overwrites the KV."""

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally."""
        if prompts.pairs is not None and prompts.features is not None:
            batch = prompts.pairs
            bound = self.attention.plan(batch.attention.layout).bind(batch.attention)
            self.head.extend(batch.tokens, prompts.features, batch.positions, bound)

    def extend(self, batch: DecodeBatch) -> DraftRows:
        """One forward: the pairs of accepted tokens, then the mask slots, then padding up to the widest request."""
        width = batch.extend_width
        steps = self.steps if self.graphs.captures else min(batch.steps, self.steps)
        layout = extend_layout(batch.seq_lens_host, batch.extend_lens_host, width + steps - 1)
        plan = self.attention.plan(layout)
        key = None if plan.graph_key is None else ("extend", plan.graph_key)
        function = partial(self._extend, plan, layout, batch.accepted_tokens, width)
        return self.graphs.run(key, function, batch.requests, batch.extend_lens)

    def _extend(
        self,
        plan: AttentionPlan,
        layout: Layout,
        accepted: AcceptedTokens,
        width: int,
        requests: PagedRequests,
        extend_lens: Tensor,
    ) -> DraftRows:
        tokens, features = accepted.take(requests.req_pool_indices, width)
        first = requests.seq_lens - extend_lens
        positions = first[:, None] + torch.arange(layout.q_lens[0], device=first.device)
        bound = plan.bind(extend_batch(requests, first, layout))
        return DraftRows(self.head.rows(tokens.view(-1, width), features, extend_lens, positions, bound))


class ReadRows(RowTrees):
    """Trees over rows that draft-extend has computed. No forward."""

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        return 0, 0

    def propose(self, draft: DraftRows, batch: DecodeBatch) -> Tree:
        """A tree over the first rows."""
        size, steps, nodes = len(batch.seq_lens_host), batch.steps, batch.nodes
        captured = size in self.graph_sizes and not batch.ranking.has_grammars
        function = partial(self.tree_over, nodes)
        key = ("propose", size, steps, nodes) if captured else None
        return self.graphs.run(key, function, draft.y[:, :steps], batch.verified_id, batch.seq_lens, batch.ranking)
