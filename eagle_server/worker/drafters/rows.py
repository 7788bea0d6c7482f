"""One forward scores the tokens of all levels, and a tree grows over these rows of scores without another one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle_server.ops.native.drafting import SelectorRows, row_trees
from eagle_server.ops.native.library import available
from eagle_server.ops.native.sampling import NativeScoring
from eagle_server.ops.tree.candidates import CandidatePool, Children
from eagle_server.speculation.candidates import organize_draft_results
from eagle_server.speculation.tree import Tree, selected_tree
from eagle_server.worker.batch.draft_ranking import DraftRanking, finite_or_off
from eagle_server.worker.drafters.interface import DrafterSetup, ScoringHead, vocabulary_of

# (y [bs, H] of a row, parents [bs, nodes], candidates [bs, 1 or nodes, C] or None: all that the head drafts, state [bs,
# nodes, r] or None at the roots) -> what each parent adds to the scores, [bs, nodes, C], and the state below it.
# Parents and candidates are target ids.
EdgeScores = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
# (y [rows, H], roots int64 [bs], candidates at least) -> the same for native kernels; None: they do not compute it.
NativeEdges = Callable[[Tensor, Tensor, int], SelectorRows | None]


class RowTrees:
    """Proposes the best paths over the rows of a head: topk nodes of each level have children."""

    proposes_ahead = False
    widest = 1

    def __init__(
        self,
        head: ScoringHead,
        setup: DrafterSetup,
        edge: EdgeScores | None = None,
        candidates: int = 0,
        native_edges: NativeEdges | None = None,
    ) -> None:
        """`edge`: None: a row scores alike below all parents. `candidates`: how many of a row's best tokens get edges;
        0: all.
        """
        self.head, self.edge, self.candidates, self.native_edges = head, edge, candidates, native_edges
        self.steps, self.topk = setup.tree.model_steps, setup.tree.topk
        self.graphs, self.graph_sizes = setup.graphs, frozenset(setup.graph_sizes)
        self.vocabulary = vocabulary_of(head, setup.device)

    def tree_over(self, nodes: int, y: Tensor, roots: Tensor, seq_lens: Tensor, ranking: DraftRanking) -> Tree:
        """The trees under the roots, int64 [bs]. y [bs, levels, H]: row j scores the tokens of level j + 1."""
        scores = self.head.logits(y.flatten(0, 1)).unflatten(0, y.shape[:2])  # [bs, levels, draft vocabulary]
        if ranking.is_plain and available(scores.device, scores.dtype):
            edges = None if self.native_edges is None else self.native_edges(y.flatten(0, 1), roots, self.topk)
            if self.edge is None or edges is not None:
                return self._grow_at_once(roots, seq_lens, scores, nodes, ranking, edges)
        levels, expanded = self._grow(roots, y, scores, ranking)
        tree = organize_draft_results(roots, seq_lens, CandidatePool.of(levels, expanded), nodes)
        return ranking.without_refused(tree)

    def _grow_at_once(
        self,
        roots: Tensor,
        seq_lens: Tensor,
        scores: Tensor,
        nodes: int,
        ranking: DraftRanking,
        edges: SelectorRows | None,
    ) -> Tree:
        """The same by native kernels, one call for all levels."""
        (bs, levels, vocab), noise = scores.shape, ranking.noise_of_levels(scores.shape[1])
        corrected = None
        if ranking.estimates is not None and ranking.temperature_bin is not None:
            corrected = ranking.estimates.native_correction(ranking.temperature_bin)
        scoring = NativeScoring(scores.flatten(0, 1), vocab, *noise, self.vocabulary)
        best, parents = row_trees(scoring, bs, self.topk, corrected, nodes - 1, edges)
        return selected_tree(roots, seq_lens, best, parents, self.topk, levels)

    def _grow(
        self, roots: Tensor, y: Tensor, scores: Tensor, ranking: DraftRanking
    ) -> tuple[list[Children], list[Tensor]]:
        """The children that each level scores, and the nodes that have children, see `CandidatePool`.

        Rows y [bs, levels, H] have scores [bs, levels, draft vocabulary]. Without edges the nodes of a level have the
        same children, unless a grammar tells them apart.
        """
        bs, topk = len(roots), self.topk
        fed, state = roots[:, None], None  # nodes that have children
        above = scores.new_zeros(bs, 1, dtype=torch.float32)  # their paths' scores
        levels, expanded = list[Children](), list[Tensor]()
        for level in range(scores.shape[1]):
            nodes, row = fed.shape[1], scores[:, level]
            if ranking.has_grammars:
                row = row.repeat_interleave(nodes, dim=0)
            logp, tokens, state = self._children(y[:, level], row, fed, state, ranking)
            paths = above[:, :, None] + ranking.chances(logp.flatten(0, 1)).view_as(logp)
            chosen: Tensor | None = None
            if level == 0:
                levels.append(Children(tokens[:, 0], paths[:, 0], logp[:, 0]))
                above, fed = paths[:, 0], tokens[:, 0]
            else:
                levels.append(Children(tokens, paths, logp))
                above, chosen = paths.flatten(1).topk(topk, dim=1)
                fed = tokens.flatten(1).gather(1, chosen)
            if level == scores.shape[1] - 1:
                break
            if state is not None:
                parents = torch.zeros_like(fed) if chosen is None else chosen.div(topk, rounding_mode="floor")
                state = state.gather(1, parents[:, :, None].expand(-1, -1, state.shape[2]))
            if chosen is not None:
                expanded.append(chosen)
            ranking = ranking.advance(fed, chosen, topk)
        return levels, expanded

    def _children(
        self, y: Tensor, row: Tensor, fed: Tensor, state: Tensor | None, ranking: DraftRanking
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores and tokens of the children of each node fed, [bs, nodes, topk], and the edges' state below it.

        The noise ranks candidates before the edges do: above temperature 0 the draw is often not among the most
        probable ones. Without candidates edges are part of all scores.
        """
        (bs, nodes), edge, topk = fed.shape, self.edge, self.topk
        if edge is not None and not self.candidates:
            added, state = edge(y, fed, None, state)
            row = (row.view(bs, -1, row.shape[1]) + added).flatten(0, 1)
            logp, tokens = (x.view(bs, nodes, topk) for x in ranking.best(row, topk, self.vocabulary))
            return logp, tokens, state
        count = topk if edge is None else min(max(topk, self.candidates), self.head.draft_vocab_size)
        logp, tokens = (x.view(bs, -1, count) for x in ranking.best(row, count, self.vocabulary))
        if edge is None:
            return logp.expand(-1, nodes, -1).contiguous(), tokens.expand(-1, nodes, -1), None
        added, state = edge(y, fed, tokens, state)
        best, places = ranking.conditioned(logp, added).topk(topk, dim=-1)
        return finite_or_off(best), tokens.expand(-1, nodes, -1).gather(2, places), state
